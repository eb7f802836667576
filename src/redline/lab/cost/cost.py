"""What a run has cost so far, what of that its devices stood still, and what it takes to a target reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from redline.errors import ConfigError
from redline.lab.cost.curve import FEWEST, HORIZON, Reaching, reaching
from redline.lab.cost.idle import Devices, Idle, devices_of, idle_of
from redline.runs.others.log import is_number
from redline.runs.run import Run, setting
from redline.telemetry.delays import PLAN

Row = Mapping[str, Any]
HOUR_S = 3600.0


@dataclass(slots=True, frozen=True)
class Asked:
    """What somebody wants to know."""

    price: float | None = None
    """What one device costs for an hour, in whatever currency."""
    devices: int | None = None
    target: float | None = None
    """A mean reward."""

    def __post_init__(self) -> None:
        if self.price is not None and not 0 <= self.price < math.inf:
            raise ConfigError(
                f"--price {self.price:g}: not a price", "give what an hour of one device costs, such as --price 2.5"
            )
        if self.devices is not None and self.devices < 1:
            raise ConfigError(f"--devices {self.devices}: a run has at least one", "give how many devices are paid for")
        if self.target is not None and not math.isfinite(self.target):
            raise ConfigError(f"--target {self.target}: not a reward", "give a mean reward, such as --target 0.8")

    @property
    def is_nothing(self) -> bool:
        return self.price is None and self.target is None


@dataclass(slots=True, frozen=True)
class Target:
    """When a mean reward is reached, and what that takes from the first recorded step on."""

    reward: float
    of: str
    """Whose mean: of held-out tasks, or of sampled attempts."""
    found: Reaching | None
    """None where there are too few points."""
    seconds: tuple[float | None, float | None, float | None]
    """Time in steps until then: low, likely, high; None where it lies beyond what can be said."""

    @property
    def sentence(self) -> str:
        what = f"A mean reward of {self.reward:g} ({self.of})"
        found = self.found
        if found is None:
            return f"{what}: too few points to tell, at least {FEWEST} are needed."
        beyond = f"Beyond step {found.horizon:,}, {HORIZON:g} times what was recorded, nothing is claimed."
        if found.step is None:
            return f"{what} is not reached at this rate{_why_not(found)}. {beyond}"
        word = "was reached" if found.step <= found.last_step else "is expected"
        latest = f"{found.low:,.0f} to {found.high:,.0f}" if found.low is not None and found.high is not None else None
        if latest is None:
            after = f"after about {found.step:,.0f} steps, not before {found.low or 0:,.0f}"
            return f"{what} {word} {after}{_unsure(found)}. {beyond}"
        lost = "" if found.ends_at is None else f", and lost again: the last steps have {found.ends_at:.3f}"
        return f"{what} {word} after about {found.step:,.0f} steps ({latest}){lost}."


@dataclass(slots=True, frozen=True)
class Cost:
    """What a run has cost, and will."""

    asked: Asked
    devices: Devices
    seconds: float
    """Seconds of all steps recorded."""
    steps: int
    idle: Idle | None
    target: Target | None
    missing: int = 0
    """Steps before the first that is recorded: what they cost is not known."""
    untimed: int = 0
    """Recorded steps that do not say how long they took: what they cost is not known."""

    def money(self, seconds: float, devices: int | None = None) -> float | None:
        """What the devices cost for so many seconds; None without a price."""
        count = self.devices.count if devices is None else devices
        return None if self.asked.price is None else seconds / HOUR_S * count * self.asked.price

    @property
    def sentences(self) -> tuple[str, ...]:
        """Everything, for people."""
        target = self._target(self.target) if self.target else ""
        return tuple(filter(None, (self._spent, self._before, self._untimed, self._idle, target)))

    @property
    def _before(self) -> str:
        if not self.missing:
            return ""
        return f"The log begins at step {self.missing + 1:,}: what the steps before it cost is not known, and not included."

    @property
    def _untimed(self) -> str:
        if not self.untimed or not self.seconds:
            return ""
        return f"{self.untimed:,} of these steps do not say how long they took: they are not included."

    @property
    def _spent(self) -> str:
        if self.untimed and not self.seconds:
            return f"What {self.steps:,} steps cost cannot be told: they do not say how long they took."
        money = self.money(self.seconds)
        count = f"{self.devices.count} device{'s' if self.devices.count > 1 else ''}"
        why = f", {self.devices.why}: say --devices N if there are others" if self.devices.why else ""
        if money is None:
            return f"{duration(self.seconds)} in {self.steps:,} steps."
        return (
            f"{amount(money)} for {duration(self.seconds)} in {self.steps:,} steps"
            f" ({count} at {self.asked.price:g} per device-hour{why})."
        )

    @property
    def _idle(self) -> str:
        whole = self.seconds * self.devices.count
        if self.asked.price is None:
            return ""
        if self.idle is None or not whole:
            return (
                "Whether devices stood still cannot be told: there are neither samples of all of them nor phases of the steps."
            )
        low, high = (self.money(seconds, 1) or 0.0 for seconds in (self.idle.low_s, self.idle.high_s))
        shares = f"{self.idle.low_s / whole:.0%}"
        if self.idle.high_s > 1.01 * self.idle.low_s:
            shares, paid = f"{shares} to {self.idle.high_s / whole:.0%}", f"{amount(low)} to {amount(high)}"
        else:
            paid = amount(high)
        return f"Devices stood still {shares} of the time, which cost {paid} (by {self.idle.source})."

    def _target(self, target: Target) -> str:
        low, likely, high = target.seconds
        if likely is None:
            return target.sentence
        spread = f" ({duration(low)} to {duration(high)})" if low is not None and high is not None else ""
        money, least, most = (None if seconds is None else self.money(seconds) for seconds in (likely, low, high))
        paid = "" if money is None else f", {amount(money)}"
        if least is not None and most is not None:
            paid += f" ({amount(least)} to {amount(most)})"
        first = f"step {self.missing + 1:,}, the first of the log," if self.missing else "the first step"
        return f"{target.sentence} From {first} on that takes {duration(likely)}{spread}{paid}."

    def as_json(self) -> dict[str, Any]:
        target = self.target
        return {
            "price_per_device_hour": self.asked.price,
            "devices": asdict(self.devices),
            "seconds": self.seconds,
            "steps": self.steps,
            "steps_missing": self.missing,
            "steps_untimed": self.untimed,
            "money": self.money(self.seconds) if self.seconds or not self.untimed else None,
            "idle": self.idle
            and {**asdict(self.idle), "money": [self.money(s, 1) for s in (self.idle.low_s, self.idle.high_s)]},
            "target": target
            and {
                "reward": target.reward,
                "of": target.of,
                "fit": target.found and asdict(target.found),
                "seconds": target.seconds,
                "money": [None if seconds is None else self.money(seconds) for seconds in target.seconds],
            },
            "sentences": self.sentences,
        }


def cost_of(run: Run, asked: Asked) -> Cost:
    """Read what a run has cost, and will. Blocks for as long as its logs take to read."""
    rows = [row for row in run.rows("metrics") if is_number(row.get("step"))]
    devices = devices_of(run, asked.devices)
    seconds = float(sum(_seconds(rows)))
    missing = _missing(rows)
    steps = int(rows[-1]["step"]) - missing if rows else 0
    idle, target = idle_of(run, list(filter(_is_timed, rows)), devices), _target(run, rows, asked.target)
    untimed = int(sum(_steps(row) for row in rows if not _is_timed(row)))
    return Cost(asked, devices, seconds, steps, idle, target, missing, untimed)


def _missing(rows: Sequence[Row]) -> int:
    """Steps before those that the first row stands for: the log of a resumed run may begin with them taken."""
    return max(0, int(rows[0]["step"] - _steps(rows[0]))) if rows else 0


def _target(run: Run, rows: Sequence[Row], given: float | None) -> Target | None:
    """When the target is reached: the one given, or `rollouts.evaluation.stop_at`. Held-out tasks count where they were
    evaluated often enough."""
    reward = given if given is not None else setting(run.config, "rollouts", "evaluation", {}).get("stop_at")
    if not isinstance(reward, int | float):
        return None
    evaluated = _points(run.rows("evaluations"), "evaluation/reward_mean")
    is_held_out = len(evaluated) >= FEWEST
    points = evaluated if is_held_out else _points(rows, "rollouts/reward_mean")
    found = reaching([step for step, _ in points], [value for _, value in points], float(reward))
    times = tuple(_time_of(rows, step) for step in ((found.low, found.step, found.high) if found else (None, None, None)))
    return Target(float(reward), "held-out tasks" if is_held_out else "sampled attempts", found, (times[0], times[1], times[2]))


def _points(rows: Any, name: str) -> list[tuple[float, float]]:
    found = [(row.get("step"), row.get(name)) for row in rows]
    return [(step, value) for step, value in found if is_number(step) and is_number(value) and step > 0]


def _time_of(rows: Sequence[Row], step: float | None) -> float | None:
    """Seconds in steps until a step: as they were measured, and beyond them as the last quarter was."""
    seconds = _seconds(rows)
    if step is None or not any(seconds):
        return None
    steps = [row["step"] for row in rows]
    passed = np.cumsum(seconds)
    if step <= steps[-1]:
        return float(np.interp(step, [float(_missing(rows)), *steps], [0.0, *passed]))
    timed = [row for row in rows if _is_timed(row)]
    usual = [row for row in timed if PLAN not in row] or timed  # others were delayed on purpose
    recent = usual[-max(1, len(usual) // 4) :]
    rate = sum(_seconds(recent)) / sum(_steps(row) for row in recent)
    return float(passed[-1] + (step - steps[-1]) * rate)


def _seconds(rows: Sequence[Row]) -> list[float]:
    """Seconds of the steps that each row stands for."""
    return [(row["run/step_s"] if _is_timed(row) else 0.0) * _steps(row) for row in rows]


def _is_timed(row: Row) -> bool:
    return is_number(row.get("run/step_s")) and row["run/step_s"] > 0


def _steps(row: Row) -> float:
    count = row.get("run/steps", 1)
    return float(count) if is_number(count) else 1.0


# ── in words ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _why_not(found: Reaching) -> str:
    low, likely, high = (f"{round(gain, 3) + 0.0:+.3f}" for gain in found.rise)  # + 0.0: no -0.000
    gained = f"over the last fifth of the steps the reward changes by {likely} ({low} to {high})"
    if found.low is not None:
        return f": {found.share:.0%} of the curves that fit the points reach it by step {found.horizon:,}; {gained}"
    return (
        f": the curve is flat at {found.level:.3f}; {gained}"
        if found.is_flat
        else f": it stands at {found.level:.3f}; {gained}"
    )


def _unsure(found: Reaching) -> str:
    return f"; {1 - found.share:.0%} of the curves that fit the points do not reach it by step {found.horizon:,}"


def amount(money: float) -> str:
    """`1,234.50`, `0.0137`."""
    return f"{money:,.2f}" if money >= 1 or not money else f"{money:.3g}"


def duration(seconds: float) -> str:
    """`12.3 s`, `4 min`, `3.2 h`."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 2 * HOUR_S else f"{seconds / HOUR_S:,.3g} h"
