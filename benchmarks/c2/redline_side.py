"""The redline side of C2: `recipes/demo.yaml` at C2's sizes, one step for every line on stdin."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from redline.config import load_recipe, resolve
from redline.launch import build, prepare_process
from redline.loop import run
from redline.telemetry import Progress, Recorder, RunFolder, recording
from redline.types import StepReport, TrainBatch, TrajectoryGroup, WeightUpdate

ROOT = Path(__file__).parents[2]


class StepOnDemand:
    """Holds the loop before every step until it is told to go on."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._groups: list[TrajectoryGroup] = []

    def should_stop(self) -> bool:
        go_on = sys.stdin.readline().strip() == "step"
        self._recorder.step_mark()
        return not go_on

    def group_collected(self, group: TrajectoryGroup) -> None:
        self._groups.append(group)

    def step_finished(self, batch: TrainBatch, report: StepReport, update: WeightUpdate) -> None:
        spent = {name: ns / 1e9 for name, ns in self._recorder.step_mark().items()}
        attempts = [t for group in self._groups for t in group.trajectories]
        new_tokens = sum(t.num_completion_tokens for t in attempts)
        say(
            {
                "step_s": sum(spent.values()),
                "engine_s": sum(s for name, s in spent.items() if name.startswith("engine.")),
                "trainer_s": sum(s for name, s in spent.items() if name.startswith("trainer.")),
                "reward": sum(t.reward for t in attempts) / len(attempts),
                "mean_tokens": new_tokens / len(attempts),
                "new_tokens": new_tokens,
                "prompt_tokens": sum(int((~g.trajectories[0].loss_mask).sum()) for g in self._groups),
                "trainer_tokens": report.num_tokens,
                "trained_tokens": report.num_trained_tokens,
            }
        )
        self._groups = []


def say(document: dict) -> None:
    print(json.dumps({"c2": document}), flush=True)


def main() -> None:
    steps, seed = sys.argv[1:]
    sizes = ["rollouts.group_size=8", "rollouts.max_new_tokens=64", "rollouts.temperature=1"]
    rate = ["trainer.learning_rate=1e-5", "trainer.decay_steps=0"]
    run_ = [f"run.seed={seed}", f"run.steps={steps}"]
    config = resolve(load_recipe(ROOT / "recipes" / "demo.yaml", [*sizes, *rate, *run_])).config
    recorder = Recorder(keep_spans=False)
    with tempfile.TemporaryDirectory() as folder, recording(recorder):
        prepare_process(config)
        stages = build(config, RunFolder.create(Path(folder), "c2"), Progress(config.run.steps))
        say({"ready": 1})
        ports = (stages.rollouts, stages.buffer, stages.trainer, stages.weight_sync, stages.engine)
        run(*ports, steps=config.run.steps, watch=StepOnDemand(recorder))


if __name__ == "__main__":
    main()
