"""A learning curve, and when it reaches a target: a fit, with an interval from curves that are drawn again.

    reward(t) = a + b · sigmoid((t − c) / w)        t = step / last step, c from −1 to 1, w from 0.04 to 1.5

The family holds straight lines (w large), curves that level off (c small) and curves with a slow start. Its middle lies at the
last step at the latest: no fit takes off where there is no data. For given c and w the best a and b are a projection; c and w
are taken from a grid. The interval comes from refits to curves whose residuals were drawn again in blocks, since a step's
reward resembles the one before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST = 8
"""Points that a fit needs."""
HORIZON = 2.0
"""Times the last step up to which a fit is followed."""
_MOST = 240
"""Points of a fit; of more, neighbours are averaged."""
_CURVES = 400
"""Curves that are drawn again."""
_LEVEL = 0.98
"""Of the curves drawn, those that the interval holds. It holds the truth nine times in ten or more: residuals of a fit are
smaller than the noise, and the family is not the truth."""
_STRETCHES, _SMALLEST_STRETCH = 12, 4
"""A stretch of points is one of so many, and has at least so many points."""
_ERRORS = 4.0
"""Standard errors by which a stretch is clearly above a target, or below it: hundreds of stretches are looked at."""
_MIDDLES = np.linspace(-1.0, 1.0, 33)
_WIDTHS = np.geomspace(0.04, 1.5, 20)


@dataclass(slots=True, frozen=True)
class Reaching:
    """When a curve reaches a target."""

    step: float | None
    """The median of all curves drawn; None where most of them do not reach it before the horizon."""
    low: float | None
    """Hardly before this step; None where no curve reaches it."""
    high: float | None
    """Hardly after this step; None where that may be beyond the horizon."""
    share: float
    """Share of the curves that reach it before the horizon."""
    rise: tuple[float, float, float]
    """What the reward gains in the last fifth of the steps: low, likely, high."""
    last_step: int
    level: float
    """The fit at the last step."""
    ends_at: float | None = None
    """The mean of the last steps, where earlier ones had the target and these are clearly below it; None otherwise."""

    @property
    def horizon(self) -> int:
        """The last step of which anything is said."""
        return int(HORIZON * self.last_step)

    @property
    def is_flat(self) -> bool:
        """Whether the end of the curve may as well not rise."""
        return self.rise[0] <= 0


def reaching(steps: Sequence[float], rewards: Sequence[float], target: float, seed: int = 0) -> Reaching | None:
    """Fit a curve and say when it reaches the target; None where there are fewer than `FEWEST` points. The same points and seed
    give the same answer."""
    known = np.isfinite(np.asarray(rewards, dtype=float)) & (np.asarray(steps) > 0)
    x, y = np.asarray(steps, dtype=float)[known], np.asarray(rewards, dtype=float)[known]
    if len(x) < FEWEST:
        return None
    last = float(x[-1])
    x, y = _averaged(x / last), _averaged(y)
    fit = _Fits(x, y[None])
    drawn = _Fits(x, fit.at(x) + _drawn_again(y - fit.at(x)[0], np.random.default_rng(seed)))
    when = drawn.reach(target, float(x[0]))
    rises = (drawn.at(np.array([1.0])) - drawn.at(np.array([0.8])))[:, 0]
    low, middle, high = _quantiles(when)
    met, clearly = _met(x, y, target), _met(x, y, target, _ERRORS)
    if met and clearly and clearly[1] < min(1.0, middle):  # it rose and fell again, which no curve of the family does
        low, middle, high = met[0], *clearly
    elif met and low <= 1:  # reached inside the recording: where no curve bends as the points do, those know better
        low, high = min(low, met[0]), max(high, met[0])
    found = [None if place > HORIZON else float(place * last) for place in (low, middle, high)]
    gains = [float(gain) for gain in np.quantile(rises, ((1 - _LEVEL) / 2, 0.5, (1 + _LEVEL) / 2))]
    share = float(np.mean(when <= HORIZON))
    return Reaching(
        found[1], found[0], found[2], share, (gains[0], gains[1], gains[2]), int(last), float(fit.at(np.array([1.0]))[0, 0]),
        _end_below(y, target) if middle <= 1 else None,
    )  # fmt: skip


class _Fits:
    """The best curve of the family for each row of rewards."""

    def __init__(self, x: np.ndarray, rewards: np.ndarray) -> None:
        middles, widths = (grid.ravel() for grid in np.meshgrid(_MIDDLES, _WIDTHS))
        shapes = _sigmoid((x[:, None] - middles) / widths)
        means = shapes.mean(axis=0)
        sizes = np.linalg.norm(shapes - means, axis=0)
        is_shape = sizes > 1e-6 * len(x)  # others are constant where there is data
        self._middles, self._widths, means, sizes = (each[is_shape] for each in (middles, widths, means, sizes))
        parts = rewards @ ((shapes[:, is_shape] - means) / sizes)
        best = np.argmax(np.abs(parts), axis=1)
        self._best = best
        self._gain = np.take_along_axis(parts, best[:, None], axis=1)[:, 0] / sizes[best]
        self._base = rewards.mean(axis=1) - self._gain * means[best]

    def at(self, x: np.ndarray) -> np.ndarray:
        """The rewards of each curve at the given places, a row for each curve."""
        middles, widths = self._middles[self._best][:, None], self._widths[self._best][:, None]
        return self._base[:, None] + self._gain[:, None] * _sigmoid((x - middles) / widths)

    def reach(self, target: float, first: float) -> np.ndarray:
        """Where each curve first has the target, not before the first point; infinite where it never does."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            part = (target - self._base) / self._gain
            place = self._middles[self._best] + self._widths[self._best] * np.log(part / (1 - part))
        place = np.where((self._gain > 0) & (part < 1), np.where(part > 0, place, first), np.inf)
        return np.where(self.at(np.array([first]))[:, 0] >= target, first, np.maximum(first, place))


def _drawn_again(residuals: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Residuals in another order, blocks of neighbours kept together, a row for each curve; a little larger, since the fit took
    four parameters from them."""
    count = len(residuals)
    size = max(1, round(count ** (1 / 3)))
    starts = random.integers(0, count, (_CURVES, -(-count // size)))
    places = (starts[:, :, None] + np.arange(size)).reshape(_CURVES, -1)[:, :count] % count
    centred = residuals - residuals.mean()
    return centred[places] * np.sqrt(count / (count - 4))


def _met(x: np.ndarray, y: np.ndarray, target: float, errors: float = 0.0) -> tuple[float, float] | None:
    """Where the first stretch of points begins and ends whose mean has the target, by so many standard errors; None where none
    has it, or points are few."""
    found = _stretches(y)
    if found is None:
        return None
    means, off = found
    there = np.flatnonzero(means - errors * off >= target)
    return (float(x[there[0]]), float(x[there[0] + len(y) - len(means)])) if len(there) else None


def _end_below(y: np.ndarray, target: float) -> float | None:
    """The mean of the last stretch of points; None where it is not clearly below the target, or points are few."""
    found = _stretches(y)
    return float(found[0][-1]) if found and found[0][-1] + _ERRORS * found[1][-1] < target else None


def _stretches(y: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The mean of every stretch of points and its standard error; None where points are few."""
    size = len(y) // _STRETCHES
    if size < _SMALLEST_STRETCH:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(y, size)
    return windows.mean(axis=1), windows.std(axis=1, ddof=1) / np.sqrt(size)


def _quantiles(places: np.ndarray) -> tuple[float, float, float]:
    """The ends of the interval and the median, of numbers that may be infinite."""
    ordered = np.sort(places)
    take = functools.partial(_ranked, ordered)
    return take((1 - _LEVEL) / 2), take(0.5), take((1 + _LEVEL) / 2)


def _ranked(ordered: np.ndarray, share: float) -> float:
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])


def _averaged(values: np.ndarray) -> np.ndarray:
    """At most `_MOST` points, each the mean of as many neighbours as the others; the oldest that are left over go."""
    size = -(-len(values) // _MOST)
    kept = values[len(values) % size :]
    return kept.reshape(-1, size).mean(axis=1)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * values))
