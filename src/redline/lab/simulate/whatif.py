"""`redline simulate RUN KEY=VALUE …`: what is changed, whether the recording supports it, and what comes of it beside the
recorded run replayed, whose step time is known."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

import numpy as np

from redline.errors import ConfigError
from redline.lab.simulate.events import Loop, Simulator
from redline.lab.simulate.recorded import Group, Recording

SEEDS = 5
MOST_ATTEMPTS = 6_000
"""Attempts of one simulated run: fewer steps are taken where steps are large, and the rest is alike."""
FEWEST_STEPS, MOST_STEPS = 12, 200
SKIPPED = 2
"""First steps, which fill the pipeline; with a lag, as many more as the oldest sample may be old, and as many at the end, when
less and less is begun."""
MOST_AT_ONCE = 50_000
"""Attempts under way at once in a simulated run: more would take minutes."""
MOST = {
    "max_lag": 100, "trainers": 1024, "tensor_parallel": 1024, "engines": 10**6, "groups_per_step": 10**6, "group_size": 10**6,
}  # fmt: skip
"""Field of `WhatIf` → the most that is answered."""
MOST_BEYOND = 4.0
"""How far outside of what was recorded a size may be, as a factor."""
FEWER_ROWS = 0.8
"""Rows of an engine's step, over those recorded, below which it matters what a row costs."""
MOST_OFF = 0.25
"""How far the replay of the recorded run may be from its measurement before nothing is said."""
PER_DOUBLING = {"tensor_parallel": 1.6, "trainers": 1.8}
"""Times faster with twice the devices: assumed, since one run records one number of them."""
SLOWER_ON_ONE_DEVICE, SLOWER_ON_ONE_CPU = 2.0, 1.4
"""Times that training and sampling each take while both are at work, over what they take alone: in turn on one device, and in
processes of their own on one machine's cores, whose memory and caches they share. Assumed where a lag is asked of a recording
in lockstep."""


@dataclass(slots=True, frozen=True)
class WhatIf:
    """The settings of a simulated loop."""

    engines: int
    """Engines that sample; `placement.engines`, where 0 is one in the trainer's process."""
    max_num_seqs: int
    groups_per_step: int
    group_size: int
    max_lag: int
    is_apart: bool = False
    """Whether engines have processes of their own."""
    lengths: float = 1.0
    """Tokens of every answer, over those recorded."""
    environments: float = 1.0
    """Seconds of environments and rewards, over those recorded."""
    tensor_parallel: int = 1
    """Devices of each engine, over those recorded."""
    trainers: int = 1
    """Trainer ranks, over those recorded."""
    failure_every_h: float = 0.0
    """Mean hours between two losses of one engine; 0: never."""
    recovery_s: float = 60.0

    @property
    def attempts(self) -> int:
        """Attempts under way at once: groups_per_step · group_size · (max_lag + 1)."""
        return self.groups_per_step * self.group_size * (self.max_lag + 1)

    @property
    def rows(self) -> float:
        """Rows that one engine decodes at once: min(max_num_seqs, attempts / engines)."""
        return min(self.max_num_seqs, self.attempts / self.engines)


KEYS = {
    "placement.engines": "engines",
    "engine.max_num_seqs": "max_num_seqs",
    "rollouts.groups_per_step": "groups_per_step",
    "rollouts.group_size": "group_size",
    "buffer.max_lag": "max_lag",
    "lengths": "lengths",
    "environments": "environments",
    "tensor_parallel": "tensor_parallel",
    "trainers": "trainers",
    "failure_every_h": "failure_every_h",
    "recovery_s": "recovery_s",
}
"""What may be changed: a recipe's key where there is one, else a word → the field of `WhatIf`."""


@dataclass(slots=True, frozen=True)
class Prediction:
    """A step's time, simulated with several seeds."""

    step_s: float
    low_s: float
    high_s: float
    """The range over the seeds, wider by what the replay is off by and by what the recorded steps vary."""
    lags: Mapping[int, float]
    """Lag → share of the groups that were trained on at it."""
    trainer_waits: float
    """Share of the time."""
    engines_busy: float
    """Share of the engines' time with at least one row."""
    samples_per_s: float

    def widened(self, share: float) -> Prediction:
        """The same, with an interval that is wider by a share to either side."""
        return replace(self, low_s=self.low_s * (1 - min(share, 1.0)), high_s=self.high_s * (1 + share))


@dataclass(slots=True, frozen=True)
class Answer:
    """A what-if beside what was measured."""

    measured_s: float
    replayed: Prediction
    """The recorded settings."""
    simulated: Prediction
    assumptions: tuple[str, ...]

    @property
    def error(self) -> float:
        """By how much the replay is off: above 0, it is slower than the run was."""
        return self.replayed.step_s / self.measured_s - 1

    @property
    def speedup(self) -> float:
        """Samples per second over those of the replay."""
        return self.simulated.samples_per_s / self.replayed.samples_per_s

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error, "speedup": self.speedup}


def recorded_settings(config: Mapping[str, Any]) -> WhatIf:
    """The settings that a run was recorded with."""
    of = lambda section, key, default: (config.get(section) or {}).get(key) or default  # noqa: E731
    return WhatIf(
        engines=of("placement", "engines", 1),
        max_num_seqs=of("engine", "max_num_seqs", 256),
        groups_per_step=of("rollouts", "groups_per_step", 8),
        group_size=of("rollouts", "group_size", 8),
        max_lag=of("buffer", "max_lag", 0),
        is_apart=bool(of("placement", "engines", 0)),
    )


def changed(settings: WhatIf, overrides: Sequence[str]) -> WhatIf:
    """Apply `key=value` texts. Raises `ConfigError` for what cannot be simulated."""
    values: dict[str, Any] = {}
    for override in overrides:
        key, is_given, text = override.partition("=")
        if key not in KEYS or not is_given:
            raise ConfigError(f"{override}: cannot be simulated", f"one of {', '.join(f'{known}=' for known in KEYS)}")
        field = KEYS[key]
        kind = type(getattr(settings, field))
        try:
            value = kind(text)
        except ValueError:
            raise ConfigError(f"{override}: not a {'whole ' if kind is int else ''}number", f"such as {key}=2") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{override}: not a number", f"such as {key}=2")
        least = 0 if field in ("max_lag", "failure_every_h", "engines") else 1 if kind is int else 1e-9
        if value < least:
            raise ConfigError(f"{override}: less than {least:g}", f"such as {key}=2")
        if value > MOST.get(field, value):
            raise ConfigError(f"{key}: more than {MOST[field]:,}", f"such as {key}=2")
        if field == "engines":
            values["is_apart"], value = value > 0, max(1, value)
        values[field] = value
    return replace(settings, **values)


def simulate(recording: Recording, overrides: Sequence[str]) -> Answer:
    """Answer a what-if. Raises `ConfigError` outside of what the recording supports. Blocks for seconds."""
    recorded = recorded_settings(recording.config)
    wanted = changed(recorded, overrides)
    _refuse_what_cannot_be_told(recording, wanted)
    assumptions = tuple(_assumed(recording, recorded, wanted))
    measured_s, replayed = float(recording.step_s.mean()), _predicted(recording, recorded, recorded)
    if abs(replayed.step_s / measured_s - 1) > MOST_OFF:
        raise ConfigError(
            f"the recorded run itself cannot be explained: replayed, its steps take {replayed.step_s:.3g} s, and they took"
            f" {measured_s:.3g} s",
            "record more steps on a quiet machine; `redline doctor RUN` says what else took the time",
        )
    unsure = abs(replayed.step_s / measured_s - 1) + _unsure(recording.step_s)
    simulated = _predicted(recording, recorded, wanted)
    return Answer(measured_s, replayed.widened(unsure), simulated.widened(unsure), assumptions)


def _unsure(step_s: np.ndarray) -> float:
    """Twice the standard error of the recorded steps, as a share of their mean."""
    return float(2 * step_s.std() / np.sqrt(len(step_s)) / step_s.mean())


def _refuse_what_cannot_be_told(recording: Recording, wanted: WhatIf) -> None:
    """Raise `ConfigError` where too much would have to be assumed."""
    attempts, rows = wanted.attempts, wanted.rows
    if attempts > MOST_AT_ONCE:
        raise ConfigError(f"{attempts:,} attempts at once are more than {MOST_AT_ONCE:,}", "simulate a part of such a machine")
    if recording.engine.rows.beyond(rows) > MOST_BEYOND:
        is_more = rows > recording.engine.rows.high
        raise ConfigError(
            f"an engine would decode about {rows:.2g} rows at once, and up to {recording.engine.rows.high:.0f} were recorded",
            "record a run with larger batches, or add engines" if is_more else "give larger batches, or fewer engines",
        )
    if not 1 / MOST_BEYOND <= wanted.lengths <= MOST_BEYOND:
        raise ConfigError(f"lengths = {wanted.lengths:g}: answers of such lengths were not recorded", "between 0.25 and 4")
    if 0 < 3600 * wanted.failure_every_h < MOST_BEYOND * wanted.recovery_s:
        raise ConfigError(
            f"failure_every_h = {wanted.failure_every_h:g}: engines would be lost faster than they come back",
            "give a longer time, or a shorter recovery_s",
        )


def _assumed(recording: Recording, recorded: WhatIf, wanted: WhatIf) -> Iterator[str]:
    """What has to be assumed, a sentence each."""
    rows = wanted.rows
    if rows > recording.engine.rows.high:
        yield f"a step of {rows:.0f} rows costs what smaller ones say; {recording.engine.rows.high:.0f} were recorded"
    elif rows < FEWER_ROWS * recording.engine.rows.high and not recording.engine.tells_rows:
        share = recording.engine.row_s * rows / recording.engine.decode_s(rows)
        yield f"of a step of {rows:.3g} rows, {share:.0%} is for its rows; all recorded steps had about as many rows"
    if rows * wanted.lengths > recording.engine.rows.high:
        yield "the KV cache holds every row: none gives way to another and begins anew"
    size = wanted.groups_per_step * wanted.group_size * wanted.lengths / (recorded.groups_per_step * recorded.group_size)
    if recording.trainer.tokens.beyond(size * recording.trainer.mean_tokens) > 1:
        yield f"training on {size:.3g} times the tokens of a step costs what the recorded steps say"
    if len(recording.groups) < recorded.groups_per_step:
        yield f"all groups are like the {len(recording.groups)} that the store kept"
    for field, factor in PER_DOUBLING.items():
        if getattr(wanted, field) > 1:
            yield f"{field.replace('_', ' ')}: twice the devices are {factor:g} times as fast"
    if wanted.group_size > recorded.group_size == 1:
        yield "further attempts of a group compute nothing of its prompt; groups of one do not tell"
    if wanted.lengths != 1:
        yield "all answers are longer or shorter by the same factor"
    yield from _assumed_of_placement(recording, recorded, wanted)
    if (slower := _slower(recording, recorded, wanted)) > 1:
        yield (
            f"training takes {slower:g} times as long where the engine has work when it begins, and so does sampling beside it:"
            " only a recording with a lag would tell"
        )


def _assumed_of_placement(recording: Recording, recorded: WhatIf, wanted: WhatIf) -> Iterator[str]:
    """What has to be assumed of stages that work elsewhere, or beside others, than they were recorded."""
    if wanted.engines > recorded.engines:
        yield f"each of {wanted.engines} engines is as fast as recorded: they have cores or devices that nobody else uses"
    elif wanted.is_apart != recorded.is_apart:
        yield "an engine is as fast in the trainer's process as in one of its own"
    if recorded.max_lag and not wanted.max_lag:
        yield "trainer and engines take as long in turn as beside each other: alone they may be faster"
    if wanted.max_lag and not recorded.max_lag and recording.is_scored_last:
        yield "rewards of all attempts are computed at once beside the trainer; a run computes as many as have threads"


def _slower(recording: Recording, recorded: WhatIf, wanted: WhatIf) -> float:
    """Times that trainer and engines take while both work. A recording in lockstep does not have that; one with a lag has it in
    what each stage took."""
    if recorded.max_lag or not wanted.max_lag:
        return 1.0
    placement = recording.config.get("placement") or {}
    if not placement.get("engines"):
        return SLOWER_ON_ONE_DEVICE if wanted.engines == 1 else 1.0
    is_one_machine = not placement.get("cluster") and not placement.get("remote_engines")
    return SLOWER_ON_ONE_CPU if is_one_machine and (recording.config.get("run") or {}).get("device") == "cpu" else 1.0


def _predicted(recording: Recording, recorded: WhatIf, wanted: WhatIf) -> Prediction:
    attempts = wanted.groups_per_step * wanted.group_size
    begin = SKIPPED + wanted.max_lag
    end = begin + max(FEWEST_STEPS, min(MOST_STEPS, MOST_ATTEMPTS // attempts))
    steps = end + wanted.max_lag
    outcomes = [Simulator(_loop(recording, recorded, wanted, steps, seed)).run() for seed in range(SEEDS)]
    means = [float(np.mean(outcome.step_s[begin:end])) for outcome in outcomes]
    trained = slice(begin * wanted.groups_per_step, end * wanted.groups_per_step)
    lags = Counter(lag for outcome in outcomes for lag in outcome.lags[trained])
    step_s = float(np.mean(means))
    return Prediction(
        step_s=step_s,
        low_s=min(means),
        high_s=max(means),
        lags={lag: count / lags.total() for lag, count in sorted(lags.items())},
        trainer_waits=_mean(outcome.trainer_waits_s / outcome.seconds for outcome in outcomes),
        engines_busy=_mean(outcome.busy_s / outcome.seconds / wanted.engines for outcome in outcomes),
        samples_per_s=attempts / step_s,
    )


def _loop(recording: Recording, recorded: WhatIf, wanted: WhatIf, steps: int, seed: int) -> Loop:
    engine, trainer = recording.engine, recording.trainer
    faster = _times_faster("tensor_parallel", wanted.tensor_parallel)
    per_token = trainer.token_s * recording.trained_share / _times_faster("trainers", wanted.trainers)
    scored = _attempts(wanted) / _attempts(recorded) if recording.is_scored_last else 1.0
    return Loop(
        groups=_changed_groups(recording.groups, replace(wanted, environments=wanted.environments * scored), Random(seed)),
        engine=engine.faster(faster),
        engines=wanted.engines,
        rows=wanted.max_num_seqs,
        groups_per_step=wanted.groups_per_step,
        max_lag=wanted.max_lag,
        train_s=per_token,
        step_s=trainer.step_s + recording.other_s,
        sync_s=recording.sync_s,
        steps=steps,
        begin_s=recording.begin_s,
        slower=_slower(recording, recorded, wanted),
        failure_every_s=3600 * wanted.failure_every_h / wanted.engines,
        recovery_s=wanted.recovery_s,
        seed=seed,
    )


def _attempts(settings: WhatIf) -> int:
    """Attempts of a step."""
    return settings.groups_per_step * settings.group_size


def _changed_groups(groups: Sequence[Group], wanted: WhatIf, draw: Random) -> tuple[Group, ...]:
    """Groups with as many attempts as wanted. Fewer are drawn from a group's own. More come from groups whose answers are about
    as long: its own ones a second time would have no longer answer among them."""
    by_length = sorted(groups, key=lambda group: group.mean_tokens)
    places = {id(group): place for place, group in enumerate(by_length)}
    return tuple(_changed_group(group, by_length, places[id(group)], wanted, draw) for group in groups)


def _changed_group(group: Group, by_length: Sequence[Group], place: int, wanted: WhatIf, draw: Random) -> Group:
    attempts = list(zip(group.tokens, group.environment_s, strict=True))
    if len(attempts) > wanted.group_size:
        attempts = draw.sample(attempts, wanted.group_size)
    others = _nearest(by_length, place)
    while len(attempts) < wanted.group_size:
        other = next(others, group)
        attempts += zip(other.tokens, other.environment_s, strict=True)
    chosen = attempts[: wanted.group_size]
    return Group(
        tuple(max(1, round(tokens * wanted.lengths)) for tokens, _ in chosen),
        tuple(environment_s * wanted.environments for _, environment_s in chosen),
        group.prompt_tokens,
        group.again_tokens,
    )


def _nearest(by_length: Sequence[Group], place: int) -> Iterator[Group]:
    """The groups other than the one at a place, those whose answers are about as long first."""
    below, above, own = place - 1, place + 1, by_length[place].mean_tokens
    while below >= 0 or above < len(by_length):
        is_above = below < 0 or (
            above < len(by_length) and by_length[above].mean_tokens - own < own - by_length[below].mean_tokens
        )
        yield by_length[above if is_above else below]
        below, above = (below, above + 1) if is_above else (below - 1, above)


def _times_faster(what: str, times: int) -> float:
    return float(PER_DOUBLING[what] ** np.log2(times))


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))
