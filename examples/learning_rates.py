"""Train one recipe with several learning rates, and compare what its held-out tasks gave.

    cd examples
    ../.venv/bin/python learning_rates.py ../recipes/smoke.yaml 1e-3 3e-3 1e-2 --steps 40

Each run has a folder of its own under `runs/`, as `redline train` leaves it, so that a look at one of them
(`redline report runs/smoke-lr-0.003-001`) or a second call of this script costs nothing of the others. A rate whose run is
there already and finished is not trained again.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import redline


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("rates", type=float, nargs="+", metavar="RATE")
    parser.add_argument("--steps", type=int, default=40, help="default %(default)s")
    args = parser.parse_args()
    runs = {rate: trained(args.recipe, rate, args.steps) for rate in args.rates}
    print(f"{'rate':>8}  {'before':>7}  {'after':>7}  {'best step':>9}  s/step  run")
    for rate, run in sorted(runs.items(), key=lambda pair: -rewards(pair[1])[-1]):
        before, after = rewards(run)[0], rewards(run)[-1]
        print(f"{rate:8g}  {before:7.3f}  {after:7.3f}  {best_step(run):9d}  {seconds(run):6.2f}  {run.path}")


def trained(recipe: Path, rate: float, steps: int) -> redline.Run:
    """Return the finished run of this rate and length, where there is one; else train it."""
    name = f"{recipe.stem}-lr-{rate:g}"
    for folder in sorted(Path("runs").glob(f"{name}-[0-9]*")):
        run = redline.Run.open(folder)
        if run.status.state == "finished" and run.total_steps == steps:
            return run
    return redline.train(recipe, {"run.name": name, "run.steps": steps, "trainer.learning_rate": rate})


def rewards(run: redline.Run) -> list[float]:
    """Return the mean reward of the held-out tasks at each evaluation, from before the first step to after the last."""
    return run.evaluations()["evaluation/reward_mean"].to_pylist()


def best_step(run: redline.Run) -> int:
    """Return the step, counted from 1, whose attempts were rewarded most."""
    metrics = run.metrics()
    best = max(zip(metrics["rollouts/reward_mean"].to_pylist(), metrics["step"].to_pylist(), strict=True))
    return best[1]


def seconds(run: redline.Run) -> float:
    """Return the mean time of a step."""
    times = run.metrics()["run/step_s"].to_pylist()
    return sum(times) / len(times)


if __name__ == "__main__":
    try:
        main()
    except redline.RedlineError as error:
        raise SystemExit(f"error: {error}") from None
