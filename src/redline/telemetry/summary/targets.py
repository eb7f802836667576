"""The key metrics of a run beside their targets: met, missed, or not measured.

Thresholds are those of the recipe (`telemetry.targets`). What was not measured is never met, and says why it was not; what has
no threshold is shown without a verdict.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from redline.config.installation import how_to_install
from redline.config.schema import Config
from redline.telemetry.summary.sample_times import seconds_of
from redline.telemetry.summary.timeline import PREFIX, ROLLOUTS_PREFIX, rollouts_phases, step_phases

Row = Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class Verdict:
    """One metric of a run against its target."""

    name: str
    value: float | None
    """None where it was not measured."""
    unit: str
    target: str
    """As `< 2`; empty where there is none."""
    met: bool | None
    """None without a value or a target."""
    why: str
    """Where the value comes from, or why there is none."""

    @property
    def word(self) -> str:
        """`met`, `missed`, `not measured`, or nothing where there is no target."""
        if self.met is not None:
            return "met" if self.met else "missed"
        return "not measured" if self.value is None else ""


class Found(NamedTuple):
    """A value and where it comes from; None and why there is none."""

    value: float | None
    why: str


@dataclass(slots=True)
class Mean:
    """A mean that weighs: Σ weight · value / Σ weight."""

    total: float = 0.0
    weight: float = 0.0
    num_rows: int = 0

    def add(self, value: object, weight: object, steps: object) -> None:
        """Take the value of a row that stands for `steps`. Null, and text of somebody else's, does not count."""
        if isinstance(value, int | float) and isinstance(weight, int | float) and isinstance(steps, int | float):
            self.total += steps * weight * value
            self.weight += steps * weight
            self.num_rows += 1

    @property
    def value(self) -> float | None:
        """None where nothing weighs anything."""
        return self.total / self.weight if self.weight > 0 else None


class Evidence:
    """What a run left, row by row, as numbers: eight bytes for each that some metric is judged by, and nothing of the rest."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.values: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        """Key of `metrics.jsonl` → the values of the steps that have one."""
        self.step_s = Mean()
        """Seconds of a step. A row of somebody else's log may stand for several."""
        self.weighed: defaultdict[str, Mean] = defaultdict(Mean)
        """Key of `WEIGHTS` → its mean over all steps that have both, weighed by what it is a rate of."""
        self.phases: dict[str, Counter[str]] = {PREFIX: Counter(), ROLLOUTS_PREFIX: Counter()}
        """Lane, by the prefix of its keys → seconds of each phase in all steps."""
        self.forget_samples()

    def forget_samples(self) -> None:
        self.gpu_utilization, self.gpu_times = array("d"), array("d")
        """Percent, mean over the GPUs of a sample, and when that was."""
        self.gpu_memory_share = -1.0
        self.host_memory_share = -1.0
        """The largest of all samples; negative where none has it."""

    def add_row(self, row: Row, phases: Mapping[str, float] | None = None) -> None:
        """A row of `metrics.jsonl`. `phases` are its `step_phases`, where the caller has them."""
        self.num_rows += 1
        for key in KEYS:
            value = row.get(key)
            if isinstance(value, int | float):  # not null, and no text of somebody else's
                self.values[key].append(value)
        self.step_s.add(row.get("run/step_s") or None, 1, row.get("run/steps", 1))
        for key, weight in WEIGHTS.items():
            self.weighed[key].add(row.get(key), row.get(weight), row.get("run/steps", 1))
        self.phases[PREFIX].update(step_phases(row) if phases is None else phases)
        self.phases[ROLLOUTS_PREFIX].update(rollouts_phases(row))

    def add_sample(self, sample: Row) -> None:
        """A row of `samples.jsonl`; of another framework it may lack what ours have."""
        if busy := _of_gpus(sample, "utilization_percent"):
            moment = sample.get("time")
            self.gpu_utilization.append(fmean(busy))
            self.gpu_times.append(moment if isinstance(moment, int | float) else len(self.gpu_times))
        peak = sample.get("memory/peak_bytes", 0)
        for used, total in zip(_of_gpus(sample, "memory_used_bytes"), _of_gpus(sample, "memory_total_bytes"), strict=False):
            self.gpu_memory_share = max(self.gpu_memory_share, max(used, peak) / total)
        if "host/rss_bytes" in sample and "host/total_bytes" in sample:
            resident = max(sample["host/rss_bytes"], peak) + sample.get("host/children_rss_bytes", 0)
            self.host_memory_share = max(self.host_memory_share, resident / sample["host/total_bytes"])


Find = Callable[[Evidence, Config], Found]


@dataclass(slots=True, frozen=True)
class Metric:
    key: str
    """The name of its threshold in `telemetry.targets`; empty where there is none to set."""
    name: str
    unit: str
    sign: str
    find: Find
    typical: str = ""
    """What to show for a target where there is no threshold."""


def verdicts(rows: Iterable[Row], samples: Iterable[Row], config: Config) -> list[Verdict]:
    """Judge rows of `metrics.jsonl` and samples of `samples.jsonl`. Returns verdicts in the order of `METRICS`."""
    evidence = Evidence()
    for row in rows:
        evidence.add_row(row)
    for sample in samples:
        evidence.add_sample(sample)
    return judge(evidence, config)


def judge(evidence: Evidence, config: Config) -> list[Verdict]:
    """What was seen so far, in the order of `METRICS`."""
    return [_verdict(metric, evidence, config) for metric in METRICS]


def _verdict(metric: Metric, evidence: Evidence, config: Config) -> Verdict:
    value, why = metric.find(evidence, config)
    threshold = getattr(config.telemetry.targets, metric.key) if metric.key else None
    target = metric.typical if threshold is None else f"{metric.sign} {threshold:g}"
    met = None if threshold is None or value is None else COMPARISONS[metric.sign](value, threshold)
    return Verdict(metric.name, value, metric.unit, target, met, why)


COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">": lambda value, threshold: value > threshold,
    "≥": lambda value, threshold: value >= threshold,
    "<": lambda value, threshold: value < threshold,
    "≤": lambda value, threshold: value <= threshold,
}

# ── where values come from ─────────────────────────────────────────────────────────────────────────────────────────────


def _of_steps(key: str, summary: Callable[[Sequence[float]], float], word: str, scale: float = 1.0) -> Find:
    """Summarise one key of the rows; steps that have none, or null, do not count."""

    def find(evidence: Evidence, config: Config) -> Found:
        values = evidence.values.get(key)
        if not values:
            return Found(None, f"no step has {key}")
        return Found(scale * summary(values), f"{word} of {key} in {len(values)} of {evidence.num_rows} steps")

    return find


def _of_all(key: str, scale: float = 1.0) -> Find:
    """The mean of a rate over all steps, by what it is a rate of: what they made together over the time they took together."""

    def find(evidence: Evidence, config: Config) -> Found:
        mean = evidence.weighed[key]
        if mean.value is None:
            return Found(None, f"no step has {key}")
        rows = f"{mean.num_rows} of {evidence.num_rows} steps"
        return Found(scale * mean.value, f"mean of {key} in {rows}, weighed by {WEIGHTS[key]}")

    return find


def _beside_or(key: str, in_lockstep: Find) -> Find:
    """With rollouts beside the trainer, steps that wait for groups and steps that find them there take turns: what one step
    samples may be a tenth of what the next does, and a median of the two is no speed."""
    of_all = _of_all(key)

    def find(evidence: Evidence, config: Config) -> Found:
        return (of_all if evidence.weighed[key].value is not None and evidence.phases[ROLLOUTS_PREFIX] else in_lockstep)(
            evidence, config
        )

    return find


def _while_training(key: str, scale: float = 1.0) -> Find:
    """Median of a rate of the trainer. A step whose groups all lack a signal trains nothing, and says nothing of the rate."""

    def find(evidence: Evidence, config: Config) -> Found:
        known = evidence.values.get(key, array("d"))
        rates = [value for value in known if value > 0]
        if not rates:
            return Found(None, "no step trained anything" if known else f"no step has {key}")
        trained = f"{len(rates)} of {evidence.num_rows} steps"
        return Found(scale * median(rates), f"median of {key} in the {trained} that trained")

    return find


def _share_of(phase: str) -> Find:
    """Percent of the steps' time in which the lane that does it was at it; where both do, the one that was at it longer."""

    def find(evidence: Evidence, config: Config) -> Found:
        totals = {prefix: sum(phases.values()) for prefix, phases in evidence.phases.items()}
        shares = {prefix: evidence.phases[prefix][phase] / total for prefix, total in totals.items() if total}
        if not shares:
            return Found(None, "no step has a timeline")
        prefix = max(shares, key=lambda prefix: shares[prefix])
        if phase == "generation" and not shares[prefix] and config.buffer.max_lag and ROLLOUTS_PREFIX not in shares:
            return Found(None, "the rollouts ran beside the trainer, and no step has their timeline")
        return Found(100 * shares[prefix], f"{prefix}{phase}_s over that lane's time in all steps")

    return find


def _steps_per_hour(evidence: Evidence, config: Config) -> Found:
    seconds = evidence.step_s.value
    if seconds is None:
        return Found(None, "no step has run/step_s")
    return Found(3600 / seconds, "3600 / mean of run/step_s")


def _mfu(evidence: Evidence, config: Config) -> Found:
    if evidence.values.get("trainer/mfu"):
        return _while_training("trainer/mfu", scale=100)(evidence, config)
    return Found(None, "the device's peak is not known; set telemetry.peak_tflops")


def _gpu_utilization(evidence: Evidence, config: Config) -> Found:
    values = evidence.gpu_utilization
    if values:
        mean = fmean(values, seconds_of(evidence.gpu_times).tolist())
        return Found(mean, f"mean of gpu/N/utilization_percent in {len(values)} samples, by the time that each stands for")
    return Found(None, _why_no_gpu(config))


def _memory(evidence: Evidence, config: Config) -> Found:
    """Samples may miss a peak; the allocator, and on the CPU the kernel, remember it."""
    if config.run.device == "cuda":
        why = "peak of gpu/N/memory_used_bytes over gpu/N/memory_total_bytes"
        share = evidence.gpu_memory_share
        return Found(100 * share, why) if share >= 0 else Found(None, _why_no_gpu(config))
    why = "peak resident memory of the run's processes over host/total_bytes"
    share = evidence.host_memory_share
    return Found(100 * share, why) if share >= 0 else Found(None, _why_no_samples(config))


def _of_gpus(sample: Row, name: str) -> list[float]:
    return [sample[key] for key in _gpu_keys(tuple(sample), name)]


@functools.lru_cache(maxsize=64)
def _gpu_keys(keys: tuple[str, ...], name: str) -> list[str]:
    return [key for key in keys if key.startswith("gpu/") and key.endswith(f"/{name}")]


def median(values: Sequence[float]) -> float:
    """As `statistics.median`, in a moment for a hundred thousand steps."""
    import numpy as np

    return float(np.median(np.asarray(values)))


def _why_no_gpu(config: Config) -> str:
    if config.run.device != "cuda":
        return "the run was on the CPU"
    return _why_no_samples(config) if not config.telemetry.sample_every_s else f"NVML gave none; {how_to_install('gpu')}"


def _why_no_samples(config: Config) -> str:
    return "telemetry.sample_every_s is 0" if not config.telemetry.sample_every_s else "there are no samples"


_generation = _beside_or("engine/tokens_per_s", _of_steps("engine/tokens_per_s", median, "median"))
_decoded_at_once = _beside_or("engine/batch_size_mean", _of_steps("engine/batch_size_mean", median, "median"))

METRICS = (
    Metric("generation_tokens_per_s", "generation", "tok/s", "≥", _generation),
    Metric("training_tokens_per_s", "training", "tok/s", "≥", _while_training("trainer/tokens_per_s")),
    Metric("samples_per_hour", "throughput", "samples/h", "≥", _of_all("run/samples_per_s", scale=3600)),
    Metric("steps_per_hour", "steps", "steps/h", "≥", _steps_per_hour),
    Metric("weight_sync_s", "weight sync", "s", "<", _of_steps("weight_sync/total_s", median, "median")),
    Metric("gpu_utilization_percent", "GPU utilisation", "%", ">", _gpu_utilization),
    Metric("memory_percent", "peak memory", "%", "<", _memory),
    Metric("first_token_s", "time to first token", "s", "<", _of_steps("engine/first_token_p50_s", median, "median")),
    Metric("mfu_percent", "MFU", "%", "≥", _mfu),
    Metric("batch_size", "decoded at once", "sequences", "≥", _decoded_at_once),
    Metric("preemptions", "preemptions", "", "≤", _of_steps("engine/preemptions", sum, "sum")),
    Metric("padding_tokens", "padding", "tokens", "≤", _of_steps("trainer/padding_tokens", sum, "sum")),
    Metric("imbalance", "imbalance", "", "≤", _of_steps("trainer/imbalance", median, "median")),
    Metric("policy_lag_steps", "policy lag", "steps", "≤", _of_steps("buffer/policy_lag_max_steps", max, "largest")),
    Metric("", "generation share", "%", "", _share_of("generation"), typical="40–60 is typical"),
    Metric("", "training share", "%", "", _share_of("training"), typical="20–30 is typical"),
    Metric("weight_sync_percent", "weight sync share", "%", "≤", _share_of("weight_sync")),
    Metric("data_percent", "data share", "%", "≤", _share_of("data")),
    Metric("other_percent", "other share", "%", "≤", _share_of("other")),
    Metric("unaccounted_percent", "unaccounted share", "%", "≤", _share_of("unaccounted")),
)

KEYS = (
    "engine/batch_size_mean",
    "engine/first_token_p50_s",
    "engine/preemptions",
    "engine/tokens_per_s",
    "buffer/policy_lag_max_steps",
    "trainer/imbalance",
    "trainer/mfu",
    "trainer/padding_tokens",
    "trainer/tokens_per_s",
    "weight_sync/total_s",
)
"""Those of `metrics.jsonl` that some metric is computed from, step by step."""

WEIGHTS = {
    "run/samples_per_s": "run/step_s",
    "engine/tokens_per_s": f"{ROLLOUTS_PREFIX}generation_s",
    "engine/batch_size_mean": "engine/steps",
}
"""Those of which all steps together are a metric, and what each counts by: seconds, or steps of the engine."""

# ── for people ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def summary_line(found: Sequence[Verdict]) -> str:
    """Return one line: `targets: 11 met, 1 missed (padding 3 tokens, not ≤ 0), 2 not measured`."""
    judged = [verdict for verdict in found if verdict.target[:1] in COMPARISONS]
    parts = []
    for word in ("met", "missed", "not measured"):
        of_word = [verdict for verdict in judged if verdict.word == word]
        which = f" ({', '.join(map(_miss, of_word))})" if word == "missed" and of_word else ""
        parts.append(f"{len(of_word)} {word}{which}")
    return "targets: " + ", ".join(parts)


def _miss(verdict: Verdict) -> str:
    value = f"{verdict.value:,.4g}{'' if verdict.unit == '%' else ' '}{verdict.unit}".rstrip()
    return f"{verdict.name} {value}, not {verdict.target}"
