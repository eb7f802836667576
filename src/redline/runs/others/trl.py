"""TRL's logs (GRPO and RLOO, 0.15 to 1.10): trainer_state.json, TensorBoard, W&B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from redline.runs.others.framework import Figures, Framework, Metrics, phases, time_of, whole
from redline.runs.others.log import Log, Row

METRICS: Metrics = {
    "reward": ("rollouts/reward_mean", 1.0),
    "reward_std": ("rollouts/reward_std", 1.0),
    "frac_reward_zero_std": ("rollouts/no_signal_fraction", 1.0),
    "completions/mean_length": ("rollouts/completion_tokens_mean", 1.0),
    "completion_length": ("rollouts/completion_tokens_mean", 1.0),
    "completions/max_length": ("rollouts/completion_tokens_max", 1.0),
    "completions/clipped_ratio": ("rollouts/truncated_fraction", 1.0),
    "tools/call_frequency": ("rollouts/tool_calls_mean", 1.0),
    "loss": ("trainer/loss", 1.0),
    "grad_norm": ("trainer/grad_norm", 1.0),
    "learning_rate": ("trainer/learning_rate", 1.0),
    "entropy": ("trainer/entropy", 1.0),
    "kl": ("trainer/kl", 1.0),
    "clip_ratio/region_mean": ("trainer/clip_fraction", 1.0),
    "clip_ratio": ("trainer/clip_fraction", 1.0),
    "sampling/importance_sampling_ratio/max": ("trainer/max_ratio", 1.0),
    "step_time": ("run/step_s", 1.0),
}
"""grpo_trainer.py, rloo_trainer.py: `self._metrics[mode][…]`. `step_time` is forward, backward and what comes before them; the
update itself is not in it."""
_PROFILED = "profiling/Time taken: "
"""extras/profiling.py; goes to W&B alone, a row for each call."""
_PHASES = {
    "vLLM.generate": "generation",
    "transformers.generate": "generation",
    "transformers.generate_batch": "generation",
    "sync_weights": "weight_sync",
    "_move_model_to_vllm": "weight_sync",
    "_calculate_rewards": "reward",
}
"""Parts of `_prepare_inputs` that are in no other part, and what they are."""
_WHOLE = "_prepare_inputs"


def _rows(log: Log) -> Iterator[Row]:
    """Give the rows by their step, without the prefixes of the integrations; an evaluation's names begin with `eval/`. What was
    profiled is summed into the next row that has the time of steps. Rows without a step are somebody else's."""
    profiled = _Profiled(whole(log.config.get("gradient_accumulation_steps")) or 1)
    for row in log.rows:
        profiled.take(row.values)
        own = {name: value for name, value in row.values.items() if not name.startswith(_PROFILED)}
        step = own.pop("train/global_step", row.step if log.kind != "W&B" else None)
        if step is None or not own:
            continue
        plain = {_plain(name): value for name, value in own.items()}
        if "step_time" in plain:
            plain |= {f"profiled/{part}": seconds for part, seconds in profiled.logged(int(step)).items()}
        elif any(name.startswith("eval/") for name in plain):
            profiled.evaluated(int(step))
        yield Row(plain, int(step), row.time)


class _Profiled:
    """What was profiled since the last row that has the time of steps. Every micro-batch ends with one `_prepare_inputs`, also
    in an evaluation: how many of them are of training follows from the steps taken."""

    def __init__(self, per_step: int) -> None:
        """`per_step`: micro-batches of a step."""
        self._per_step = per_step
        self._step = 0
        self._parts: list[dict[str, float]] = [{}]
        """Part → seconds, for each micro-batch; the last has not ended."""

    def take(self, values: Mapping[str, float]) -> None:
        for name, seconds in values.items():
            if name.startswith(_PROFILED):
                part = name.removeprefix(_PROFILED).partition(".")[2]
                self._parts[-1][part] = self._parts[-1].get(part, 0.0) + seconds
                if part == _WHOLE:
                    self._parts.append({})

    def evaluated(self, step: int) -> None:
        """Leave out what is of an evaluation after this step."""
        self._parts = [*self._parts[:-1][: max(0, step - self._step) * self._per_step], {}]

    def logged(self, step: int) -> dict[str, float]:
        """Return the sums, and begin again after this step."""
        found: dict[str, float] = {}
        for parts in self._parts:
            for part, seconds in parts.items():
                found[part] = found.get(part, 0.0) + seconds
        self._step, self._parts = step, [{}]
        return found


def _plain(name: str) -> str:
    if name.startswith("train/"):
        return name.removeprefix("train/")
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else name


def _derive(theirs: Mapping[str, float], row: Figures, names: AbstractSet[str]) -> None:
    """Add the phases, where the parts of a step were profiled: training is what is left of it after `_prepare_inputs`."""
    for name in [name for name in row if name.startswith("trl/profiled/")]:
        row[name] /= row.get("run/steps", 1)
    step, prepared = time_of(theirs, "step_time"), time_of(row, "trl/profiled/_prepare_inputs")
    if step is None or prepared is None:
        return
    phases(row, row, {f"trl/profiled/{part}": phase for part, phase in _PHASES.items()})
    known = sum(value for name, value in row.items() if name.startswith("timeline/"))
    row["timeline/other_s"] = max(0.0, prepared - known)
    row["timeline/training_s"] = max(0.0, step - prepared)


def _evaluated(theirs: Mapping[str, float]) -> float | None:
    return theirs.get("eval/reward")


def _settings(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    steps, group = whole(config.get("max_steps")), whole(config.get("num_generations"))
    model = config.get("model_name_or_path") or config.get("_name_or_path") or ""
    return {
        "run": {"steps": steps or 0},
        "model": {"path": str(model)},
        "trainer": {"algorithm": str(config.get("loss_type") or "")},
        "rollouts": {"group_size": group or 0},
        "buffer": {"max_lag": 0},
    }


def _devices(config: Mapping[str, Any]) -> tuple[int, int]:
    return 0, 0


TRL = Framework(
    "TRL",
    "trl",
    METRICS,
    (
        "completions/mean_length",
        "train/completions/mean_length",
        "completion_length",
        "train/completion_length",
        "frac_reward_zero_std",
        "train/frac_reward_zero_std",
    ),
    _rows,
    _derive,
    _evaluated,
    _settings,
    _devices,
)
