"""The verbs that measure or predict: bench, compare, plan, perf and profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from redline.lab.bench.every import AllDocument
    from redline.lab.evidence.document import Document


def bench(
    case: Annotated[
        str,
        typer.Argument(
            help="What to measure: generate, n-sampling, rollout, trainer, e2e, weight-sync, memory, transfer, serialize,"
            " telemetry, or all."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the case, such as workload=W1.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: a few seconds a case.")] = False,
    against: Annotated[str | None, typer.Option(help="Of e2e: who takes the same steps in turn, trl.")] = None,
    trl_python: Annotated[Path | None, typer.Option(metavar="PATH", help="The python of an environment with trl.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also write a profile, next to the saved result.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON document on stdout.")] = False,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write the document to DIR/CASE.json.")] = None,
) -> None:
    """Measure a part of redline beside its physical bound and its peers.

    Exit code 1: of `all`, a case failed.
    """
    from redline.lab.bench.every import ALL, bench_all
    from redline.lab.bench.settings import make_settings, quick_overrides
    from redline.lab.bench.table import render
    from redline.telemetry.console.tables import log_console, results_console

    document: Document | AllDocument
    asked = {"against": against, "trl_python": trl_python}
    given = [*(overrides or []), *(f"{key}={value}" for key, value in asked.items() if value is not None)]
    try:
        if case == ALL:
            document = bench_all(given, quick=quick, profile=save or Path() if profile else None)
        else:
            settings = make_settings(case, [*(quick_overrides(case) if quick else ()), *given])
            from redline.lab.bench.run import bench as run_bench

            document = run_bench(case, settings, log_console(), profile=save or Path() if profile else None)
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was saved", err=True)
        raise typer.Exit(130) from None
    path = document.save(save) if save else None
    results_console(as_json=as_json).print(render(document))
    if as_json:
        typer.echo(json.dumps(document.as_json()))
    elif path:
        typer.echo(path)
    raise typer.Exit(document.exit_code)


def compare(
    a: Annotated[str, typer.Argument(help="A recipe, git:REV, a source tree, or a saved result (FILE.json, FILE.json#SIDE).")],
    b: Annotated[str, typer.Argument(help="The same for B.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Of the recipe or the case, on both sides.")
    ] = None,
    a_overrides: Annotated[list[str] | None, typer.Option("--a", metavar="KEY=VALUE", help="On A alone.")] = None,
    b_overrides: Annotated[list[str] | None, typer.Option("--b", metavar="KEY=VALUE", help="On B alone.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="What revisions and source trees run: steps of this recipe.")] = None,
    case: Annotated[str | None, typer.Option(help="Or a case of redline bench, such as trainer.")] = None,
    metric: Annotated[str | None, typer.Option(help="What is compared; by default the time of a step.")] = None,
    effect: Annotated[float, typer.Option(help="The smallest difference to find: 0.03 is 3%.", min=0.001, max=1)] = 0.03,
    tolerance: Annotated[float, typer.Option(help="How much worse B may be before it counts.", min=0, max=1)] = 0.0,
    guard: Annotated[
        list[str] | None, typer.Option(metavar="NAME=TOLERANCE", help="memory, reward or KL; how much worse it may get.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Turns that each process of a pair takes; an even number.", min=2)] = None,
    max_pairs: Annotated[int, typer.Option(help="Most pairs of A and B; fewer than 8 give no verdict.", min=1)] = 60,
    max_minutes: Annotated[float, typer.Option(help="Most minutes, whatever was found by then.", min=0)] = 30,
    seed: Annotated[int, typer.Option(help="Decides the order in each pair.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON document on stdout.")] = False,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write the document to DIR/compare.json.")] = None,
) -> None:
    """Find out whether B is better than A, by interleaved pairs.

    Exit code 0: B is not worse. 1: B is worse beyond the tolerance, or a guard is broken. 2: no verdict, or an error.
    """
    from redline.lab.compare.command import Request
    from redline.lab.compare.command import compare as run_compare
    from redline.lab.compare.sides import What
    from redline.lab.evidence.experiment import Wish
    from redline.lab.evidence.guards import read_tolerances
    from redline.telemetry.console.tables import log_console

    what = What(recipe, case, overrides or (), a_overrides or (), b_overrides or ())
    wish = Wish(effect, tolerance, max_pairs, 60 * max_minutes)
    request = Request(a, b, what, wish, metric, rounds, read_tolerances(guard or []), seed)
    try:
        report = run_compare(request, log_console())
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was saved", err=True)
        raise typer.Exit(130) from None
    path = report.save(save) if save else None
    typer.echo(report.verdict.sentence, err=as_json)
    if path:
        typer.echo(path, err=True)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    raise typer.Exit(report.verdict.exit_code)


def plan(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Replace values of the recipe.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Plan for this device: h200, h100, a100, l40s, …, cpu; by default for what is here.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="How many of them, in one machine.", min=1)] = 1,
    price: Annotated[list[str] | None, typer.Option(metavar="DEVICE=DOLLARS", help="What an hour of a device costs.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt; tasks are not loaded to count them.", min=1)] = 128,
    new_tokens: Annotated[
        float | None, typer.Option(help="Tokens of an attempt, on average; by default as many as it may have.")
    ] = None,
    sharding: Annotated[
        Literal["none", "grad_op", "full"] | None,
        typer.Option(help="What trainers on several devices divide; by default the least that fits."),
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Devices that divide one engine; by default what samples fastest.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON document on stdout.")] = False,
) -> None:
    """Say what a recipe will take, in memory, time and money, before anything is loaded.

    Exit code 0: it fits. 1: it does not.
    """
    from redline.config import load_recipe, refuse_without_effect
    from redline.config.algorithms import fill_algorithm

    config = load_recipe(recipe, overrides or [])
    refuse_without_effect(fill_algorithm(config)[0])
    from redline.lab.plan.plan import make_plan
    from redline.lab.plan.table import render
    from redline.telemetry.console.tables import results_console

    made = make_plan(
        config,
        gpu,
        gpus,
        prices=price or [],
        prompt_tokens=prompt_tokens,
        mean_new_tokens=new_tokens,
        sharding=sharding,
        tensor_parallel_size=tensor_parallel,
    )
    results_console(as_json=as_json).print(render(made))
    if as_json:
        typer.echo(json.dumps(made.as_json()))
    if not made.fits:
        raise typer.Exit(1)


def perf(
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="What is measured; each has a baseline.")] = "auto",
    baselines: Annotated[Path, typer.Option(metavar="DIR", help="Where they are.")] = Path("benchmarks/baselines"),
    update: Annotated[bool, typer.Option("--update", help="Make what is found the baseline.")] = False,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Why; it is kept in the file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON document on stdout.")] = False,
) -> None:
    """Hold counts and ratios of small workloads against the committed baseline.

    Exit code 0: nothing is worse. 1: something is. 2: there is no baseline, or an error.
    """
    from redline.lab.gate.perf import perf as run_perf
    from redline.lab.gate.perf import render, require_reason
    from redline.telemetry.console.tables import log_console, results_console

    outcome = run_perf(device, baselines, require_reason(update, reason), log_console())
    results_console(as_json=as_json).print(render(outcome))
    if as_json:
        typer.echo(json.dumps(outcome.as_json()))
    raise typer.Exit(outcome.exit_code)


def profile(
    run: Annotated[Path, typer.Argument(help="The folder of a run that goes on.")],
    what: Annotated[
        Literal["rollout", "trainer", "e2e"], typer.Option(help="While groups are made, the trainer's step, or all of it.")
    ] = "e2e",
    steps: Annotated[int, typer.Option(help="How many steps, from the next one on.", min=1)] = 1,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the profiles and print their folders.")] = True,
) -> None:
    """Profile the next steps of a running job, without a restart."""
    from redline.telemetry import RunFolder
    from redline.telemetry.profiling.request import ask, wait_for_summaries

    folder = RunFolder.open(run)
    request = ask(folder, what, steps)
    typer.echo(f"asked; the next step will be profiled into {folder.profiles}", err=True)
    if wait:
        for path in wait_for_summaries(folder, request):
            typer.echo(path)
