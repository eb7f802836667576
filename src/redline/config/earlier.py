"""Keys of earlier versions: what a recipe is told that has one, and how a recorded config is read that has them.

One table says both. A recipe is refused, so that its author learns the new name; the `config.json` of a run folder was
written by an earlier version and is no mistake, so `as_of_now` gives it today's names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from redline.config.sections.rollouts import COLDEST, HOTTEST

Values = dict[str, Any]


@dataclass(slots=True, frozen=True)
class Earlier:
    """What became of a key."""

    now: str = ""
    """Its new name; empty where it is gone."""
    advice: str = ""
    """What to write instead, where that is more than the new name."""
    convert: Callable[[Any, Values], None] | None = None
    """Puts the old value of a recorded config where it belongs now. By default it goes to `now` as it is, or nowhere."""

    def told(self, key: str) -> tuple[str, str]:
        """What is wrong with a recipe that has the key, and what to write."""
        if not self.now:
            return f"{key}: no longer a key", self.advice
        return f"{key} is now {self.now}", self.advice or f"write {self.now}"


def _put(values: Values, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        if not isinstance(values.get(section), dict):
            values[section] = {}
        values = values[section]
    values[name] = value


def _take(values: Values, key: str) -> tuple[bool, Any]:
    """Whether the key was there, and its value; it is there no longer."""
    *sections, name = key.split(".")
    place: Any = values
    for section in sections:
        place = place.get(section) if isinstance(place, dict) else None
    if not isinstance(place, dict) or name not in place:
        return False, None
    return True, place.pop(name)


# ── values that change with their name ─────────────────────────────────────────────────────────────────────────────────


def _decay(steps: Any, values: Values) -> None:
    """0 steps meant a constant rate, whatever the kind of fall."""
    _put(values, "trainer.schedule.decay_steps", steps or None)
    if not steps:
        _put(values, "trainer.schedule.kind", "constant")


def _zero_if_false(key: str) -> Callable[[Any, Values], None]:
    return lambda wanted, values: None if wanted else _put(values, key, 0)


def _switch_off(kinds: Any, values: Values) -> None:
    for kind in kinds if isinstance(kinds, list) else ():
        _put(values, f"telemetry.alerts.{kind}", None)


def _advantages(normalized: Any, values: Values) -> None:
    _put(values, "rollouts.advantages", "group" if normalized else "group_centred")


_SERVED = "leave it out: only `redline serve` has it"

EARLIER: Mapping[str, Earlier] = {
    "rollouts.normalize_advantages": Earlier(
        advice="write rollouts.advantages: group for true, group_centred for false", convert=_advantages
    ),
    "weight_sync.method": Earlier(advice="leave it out: engine and trainer share their weights, and nothing is copied"),
    "trainer.data_parallel_size": Earlier(advice="leave it out: it is the ranks that are started / sequence_parallel_size"),
    "engine.max_loras": Earlier(advice=_SERVED),
    "engine.max_lora_rank": Earlier(advice=_SERVED),
    "trainer.warmup_steps": Earlier("trainer.schedule.warmup_steps"),
    "trainer.lr_scheduler_type": Earlier("trainer.schedule.kind"),
    "trainer.decay_steps": Earlier(
        "trainer.schedule.decay_steps",
        "write trainer.schedule.decay_steps, with trainer.schedule.kind: linear or cosine",
        _decay,  # after the kind of fall, which it may overrule
    ),
    "trainer.min_lr_ratio": Earlier("trainer.schedule.min_ratio"),
    "trainer.mismatch_low": Earlier("trainer.mismatch.low"),
    "trainer.mismatch_high": Earlier("trainer.mismatch.high"),
    "trainer.correct_lag": Earlier("trainer.mismatch.correct_lag"),
    "buffer.keep_trajectories": Earlier(
        "buffer.max_bytes", "write buffer.max_bytes: 0 to keep none", _zero_if_false("buffer.max_bytes")
    ),
    "telemetry.trace": Earlier(
        "telemetry.trace_max_bytes",
        "write telemetry.trace_max_bytes: 0 to write no trace",
        _zero_if_false("telemetry.trace_max_bytes"),
    ),
    "telemetry.profile_steps": Earlier("telemetry.profile.steps"),
    "telemetry.alerts.webhook": Earlier("telemetry.alert_webhook"),
    "telemetry.alerts.webhook_timeout_s": Earlier(advice="leave it out: posts have a thread of their own, and 5 s each"),
    "telemetry.alerts.wait_deviations": Earlier(
        advice="raise telemetry.alerts.stalled_rollouts or telemetry.alerts.long_wait: seconds of waiting that are always fine"
    ),
    "telemetry.alerts.rollouts_floor_s": Earlier("telemetry.alerts.stalled_rollouts"),
    "telemetry.alerts.wait_floor_s": Earlier("telemetry.alerts.long_wait"),
    "telemetry.alerts.staleness_steps": Earlier("telemetry.alerts.staleness_rise"),
    "telemetry.alerts.dropped_fraction": Earlier("telemetry.alerts.length_bias"),
    "telemetry.alerts.kv_use": Earlier("telemetry.alerts.kv_saturation"),
    "telemetry.alerts.memory_hours": Earlier("telemetry.alerts.host_memory_slope"),
    "telemetry.alerts.reward_drop": Earlier("telemetry.alerts.reward_collapse"),
    "telemetry.alerts.no_signal_steps": Earlier("telemetry.alerts.not_learning"),
    "telemetry.alerts.abort_fraction": Earlier("telemetry.alerts.abort_storm"),
    "telemetry.alerts.off": Earlier(
        advice="write off for each kind: telemetry.alerts: {length_bias: off}",
        convert=_switch_off,  # after the thresholds
    ),
}
"""Key of an earlier version → what became of it. Recorded configs are converted in this order."""

EARLIER_TASK_KINDS: Mapping[str, str] = {"jsonl": "file"}
"""`rollouts.task.kind` of an earlier version → the kind that it is now, with the same keys."""

_BARE = {"trainer.mismatch": "kind", "telemetry.profile": "what"}
"""Keys that held one value and hold a mapping now → the entry that the value is. A recipe may still write the bare value."""


def as_of_now(recorded: Mapping[str, Any]) -> Values:
    """The values of a run folder's `config.json`, of this version or an earlier one, under today's names. The argument stays
    as it is."""
    values = copy.deepcopy(dict(recorded))
    for key, entry in _BARE.items():
        was_there, value = _take(values, key)
        if was_there:
            _put(values, key, value if isinstance(value, dict) else {entry: value})
    for key, earlier in EARLIER.items():
        was_there, value = _take(values, key)
        if was_there and earlier.convert:
            earlier.convert(value, values)
        elif was_there and earlier.now:
            _put(values, earlier.now, value)
    was_there, kind = _take(values, "rollouts.task.kind")
    if was_there:
        _put(values, "rollouts.task.kind", EARLIER_TASK_KINDS.get(kind, kind) if isinstance(kind, str) else kind)
    for key in ("rollouts.temperature", "rollouts.evaluation.temperature"):  # engines of others took what ours never did
        was_there, degrees = _take(values, key)
        if was_there:
            is_number = isinstance(degrees, int | float) and degrees > 0
            _put(values, key, min(max(degrees, COLDEST), HOTTEST) if is_number else degrees)
    for section in {key.partition(".")[0] for key in EARLIER}:
        if values.get(section) == {}:
            del values[section]
    return values
