"""The key metrics of a run beside their targets: met, missed, or not measured.

Thresholds are those of the recipe (`telemetry.targets`). What was not measured is never met, and says why it was not; what has
no threshold is shown without a verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from redline.config.installation import how_to_install
from redline.config.schema import Config
from redline.telemetry.timeline import PREFIX, ROLLOUTS_PREFIX, rollouts_phases, step_phases

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


@dataclass(slots=True, frozen=True)
class Evidence:
    """What a run left."""

    rows: Sequence[Row]
    samples: Sequence[Row]
    config: Config


@dataclass(slots=True, frozen=True)
class Metric:
    key: str
    """Of the threshold in `telemetry.targets`; empty where there is none to set."""
    name: str
    unit: str
    sign: str
    find: Callable[[Evidence], Found]
    typical: str = ""
    """What to show for a target where there is no threshold."""


def verdicts(rows: Iterable[Row], samples: Iterable[Row], config: Config) -> list[Verdict]:
    """Of rows of `metrics.jsonl` and samples of `samples.jsonl`, in the order of `METRICS`."""
    evidence = Evidence(list(rows), list(samples), config)
    return [_verdict(metric, evidence) for metric in METRICS]


def _verdict(metric: Metric, evidence: Evidence) -> Verdict:
    value, why = metric.find(evidence)
    threshold = getattr(evidence.config.telemetry.targets, metric.key) if metric.key else None
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


def _of_steps(key: str, summary: Callable[[list[float]], float], word: str, scale: float = 1.0) -> Callable[[Evidence], Found]:
    """Of one key of the rows; steps that have none, or null, do not count."""

    def find(evidence: Evidence) -> Found:
        values = [float(row[key]) for row in evidence.rows if row.get(key) is not None]
        if not values:
            return Found(None, f"no step has {key}")
        return Found(scale * summary(values), f"{word} of {key} in {len(values)} of {len(evidence.rows)} steps")

    return find


def _while_training(key: str, scale: float = 1.0) -> Callable[[Evidence], Found]:
    """Median of a rate of the trainer. A step whose groups all lack a signal trains nothing, and says nothing of the rate."""

    def find(evidence: Evidence) -> Found:
        known = [float(row[key]) for row in evidence.rows if row.get(key) is not None]
        rates = [value for value in known if value > 0]
        if not rates:
            return Found(None, "no step trained anything" if known else f"no step has {key}")
        trained = f"{len(rates)} of {len(evidence.rows)} steps"
        return Found(scale * median(rates), f"median of {key} in the {trained} that trained")

    return find


def _share_of(phase: str) -> Callable[[Evidence], Found]:
    """Percent of the steps' time in which the lane that does it was at it; where both do, the one that was at it longer."""

    def find(evidence: Evidence) -> Found:
        lanes = {PREFIX: map(step_phases, evidence.rows), ROLLOUTS_PREFIX: map(rollouts_phases, evidence.rows)}
        shares = {prefix: share for prefix, steps in lanes.items() if (share := _share(phase, steps)) is not None}
        if not shares:
            return Found(None, "no step has a timeline")
        prefix = max(shares, key=lambda prefix: shares[prefix])
        if phase == "generation" and not shares[prefix] and evidence.config.buffer.max_lag and ROLLOUTS_PREFIX not in shares:
            return Found(None, "the rollouts ran beside the trainer, and no step has their timeline")
        return Found(100 * shares[prefix], f"{prefix}{phase}_s over that lane's time in all steps")

    return find


def _share(phase: str, steps: Iterable[Mapping[str, float]]) -> float | None:
    """Of the time of one lane; None where it has none."""
    total: Counter[str] = Counter()
    for phases in steps:
        total.update(phases)
    seconds = sum(total.values())
    return total[phase] / seconds if seconds else None


def _steps_per_hour(evidence: Evidence) -> Found:
    seconds = [row["run/step_s"] for row in evidence.rows if row.get("run/step_s")]
    if not seconds:
        return Found(None, "no step has run/step_s")
    return Found(3600 / fmean(seconds), "3600 / mean of run/step_s")


def _mfu(evidence: Evidence) -> Found:
    if any(row.get("trainer/mfu") is not None for row in evidence.rows):
        return _while_training("trainer/mfu", scale=100)(evidence)
    return Found(None, "the device's peak is not known; set telemetry.peak_tflops")


def _gpu_utilization(evidence: Evidence) -> Found:
    values = [value for sample in evidence.samples for value in _of_gpus(sample, "utilization_percent")]
    if values:
        return Found(fmean(values), f"mean of {len(values)} values of gpu/N/utilization_percent")
    return Found(None, _why_no_gpu(evidence.config))


def _memory(evidence: Evidence) -> Found:
    """Samples may miss a peak; the allocator, and on the CPU the kernel, remember it."""
    if evidence.config.run.device == "cuda":
        shares = [
            max(used, sample.get("memory/peak_bytes", 0)) / total
            for sample in evidence.samples
            for used, total in zip(_of_gpus(sample, "memory_used_bytes"), _of_gpus(sample, "memory_total_bytes"), strict=True)
        ]
        why = "peak of gpu/N/memory_used_bytes over gpu/N/memory_total_bytes"
        return Found(100 * max(shares), why) if shares else Found(None, _why_no_gpu(evidence.config))
    shares = [
        (max(sample["host/rss_bytes"], sample.get("memory/peak_bytes", 0)) + sample["host/children_rss_bytes"])
        / sample["host/total_bytes"]
        for sample in evidence.samples
        if "host/rss_bytes" in sample
    ]
    why = "peak resident memory of the run's processes over host/total_bytes"
    return Found(100 * max(shares), why) if shares else Found(None, _why_no_samples(evidence.config))


def _of_gpus(sample: Row, name: str) -> list[float]:
    return [value for key, value in sample.items() if key.startswith("gpu/") and key.endswith(f"/{name}")]


def _why_no_gpu(config: Config) -> str:
    if config.run.device != "cuda":
        return "the run was on the CPU"
    return _why_no_samples(config) if not config.telemetry.sample_every_s else f"NVML gave none; {how_to_install('gpu')}"


def _why_no_samples(config: Config) -> str:
    return "telemetry.sample_every_s is 0" if not config.telemetry.sample_every_s else "there are no samples"


METRICS = (
    Metric("generation_tokens_per_s", "generation", "tok/s", "≥", _of_steps("engine/tokens_per_s", median, "median")),
    Metric("training_tokens_per_s", "training", "tok/s", "≥", _while_training("trainer/tokens_per_s")),
    Metric("samples_per_hour", "throughput", "samples/h", "≥", _of_steps("run/samples_per_s", median, "median", scale=3600)),
    Metric("steps_per_hour", "steps", "steps/h", "≥", _steps_per_hour),
    Metric("weight_sync_s", "weight sync", "s", "<", _of_steps("weight_sync/total_s", median, "median")),
    Metric("gpu_utilization_percent", "GPU utilisation", "%", ">", _gpu_utilization),
    Metric("memory_percent", "peak memory", "%", "<", _memory),
    Metric("first_token_s", "time to first token", "s", "<", _of_steps("engine/first_token_p50_s", median, "median")),
    Metric("mfu_percent", "MFU", "%", "≥", _mfu),
    Metric("batch_size", "decoded at once", "sequences", "≥", _of_steps("engine/batch_size_mean", median, "median")),
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

# ── for people ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def summary_line(found: Sequence[Verdict]) -> str:
    """`targets: 11 met, 1 missed, 2 not measured`."""
    judged = [verdict.word for verdict in found if verdict.target[:1] in COMPARISONS]
    counts = {word: judged.count(word) for word in ("met", "missed", "not measured")}
    return "targets: " + ", ".join(f"{count} {word}" for word, count in counts.items())


def target_table(found: Sequence[Verdict]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("target")
    table.add_column("verdict")
    for verdict in found:
        value = "" if verdict.value is None else f"{verdict.value:,.4g} {verdict.unit}".rstrip()
        style = {"met": "green", "missed": "yellow", "not measured": "dim"}.get(verdict.word, "")
        why = verdict.why if verdict.value is None else ""
        word = Text(f"{verdict.word}: {why}" if why else verdict.word, style=style)
        table.add_row(verdict.name, value, verdict.target, word)
    return table
