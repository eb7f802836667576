"""Saved results as `redline compare` reads them: which numbers of a document make its figure, and which way is better."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redline.config.earlier import as_of_now
from redline.errors import CompareError

USUAL = {"tok/s": ("tokens_per_s",), "GB/s": ("bytes_per_s",), "s": ("p50", "seconds", "step_s")}
"""Unit → fields of a sample that have it, for values that are no median of one: pooled, or scaled."""
SMALLER = ("s", "ns", "bytes", "$")
"""Units of which less is better, where a result has no bound to tell."""
LARGER_FIELDS = ("_per_s", "hit_rate", "reward", "reward_mean")
SMALLER_FIELDS = ("_s", "seconds", "bytes", "p50", "p90", "p99")
NEITHER_FIELDS = (
    "tokens",
    "_flops",
    "_mean",
    "loss",
    "norm",
    "logprob",
    "batch",
    "batches",
    "turns",
    "attempts",
    "lag",
    "growth",
)
"""Endings of fields: of those that are better when they are larger, or smaller, and of those that are neither."""
SHOWN = 120
"""Characters of a sample in a message."""

Result = Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class Saved:
    """The samples of one side of one figure."""

    path: Path
    side: str | None
    figure: str
    field: str
    """Of a sample; empty where it is a number."""
    samples: Sequence[float]
    larger_is_better: bool
    unit: str
    identity: Mapping[str, Any]
    """Of the document: where it was measured, and with what."""
    config: Any
    """Its settings, by the names that they have now."""


@dataclass(slots=True, frozen=True)
class Place:
    """Where in a sample a number is: by side and field, by either, or the sample itself."""

    side: str = ""
    field: str = ""
    parts: tuple[str, ...] = ()
    """Fields that add up to the number, where none has it."""

    def number(self, sample: Any) -> float | None:
        """The number there; None where there is none."""
        if not self.parts:
            return self._of(sample, self.field)
        found = [self._of(sample, part) for part in self.parts]
        return None if None in found else math.fsum(part for part in found if part is not None)

    def _of(self, sample: Any, field: str) -> float | None:
        value = sample
        for key in filter(None, (self.side, field)):
            value = value.get(key) if isinstance(value, dict) else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_saved(text: str, metric: str | None) -> Saved:
    """`metric` names a result of the document (`throughput`), or one and a field of its samples (`throughput:tokens_per_s`)."""
    name, _, side = text.partition("#")
    path = Path(name)
    document = _read(path)
    figure, field = _wanted(metric, document["results"], path)
    result = _with_side([each for each in document["results"] if each["name"] == figure], side)
    _refuse_probes(result, text)
    identity = document["identity"]
    sides = _sides(result, identity)
    own = _own_place(result, sides)
    place = replace(own, side=side or own.side)
    if field:
        place = Place(place.side, field)
    _refuse_missing_side(result, side, sides, text)
    samples = [_positive(place, sample, text, figure) for sample in result["samples"]]
    is_own = not field or field == own.field
    larger = _is_larger_better(result, document) if is_own else _is_larger_better_of(field, result, text)
    config = as_of_now(identity.get("config")) if isinstance(identity.get("config"), dict) else identity.get("config")
    unit = result["unit"] if is_own else _unit_of(field)
    return Saved(path, side or None, figure, place.field, samples, larger, unit, identity, config)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        for result in document["results"]:
            _ = result["name"], result["unit"], len(result["samples"])
        if not document["results"] or not isinstance(document["identity"], dict):
            raise ValueError("no results, or nobody's")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CompareError(f"{path}: not a saved result: {error}", "give what `redline bench CASE --save DIR` wrote") from error
    if document.get("case") == "eval":
        raise CompareError(f"{path}: scores, not times", "to compare two models: redline eval MODEL --against MODEL")
    return document


def _wanted(metric: str | None, results: Sequence[Result], path: Path) -> tuple[str, str]:
    """The name of a result, which may have a colon in it, and the field that is asked for."""
    names = list(dict.fromkeys(result["name"] for result in results))
    if metric is None or metric in names:
        return metric or names[0], ""
    name, _, field = metric.rpartition(":")
    if name not in names:
        raise CompareError(f"{path} has no result called {metric}", f"--metric with one of: {', '.join(names)}")
    return name, field


def _with_side(results: Sequence[Result], side: str) -> Result:
    """One result for each peer has the same name: that which has the side."""
    return next((each for each in results if any(isinstance(s, dict) and side in s for s in each["samples"])), results[0])


def _sides(result: Result, identity: Mapping[str, Any]) -> set[str]:
    """The names of those that were measured: only they tell {side: number} from {field: number}."""
    return {*(identity.get("warm_up") or ()), *(identity.get("peers") or ()), (result.get("peer") or {}).get("name", "")}


def _refuse_missing_side(result: Result, side: str, sides: Collection[str], text: str) -> None:
    there = [name for name, value in _first(result["samples"]).items() if isinstance(value, dict) or name in sides]
    if side and side not in there:
        hint = f"name one of {', '.join(there)}" if there else "name a result whose samples have both sides, with --metric"
        raise CompareError(f"{text}: samples of {result['name']!r} have no side {side}", hint)


def _first(samples: Sequence[Any]) -> Mapping[str, Any]:
    return samples[0] if samples and isinstance(samples[0], dict) else {}


def _own_place(result: Result, sides: Collection[str]) -> Place:
    """Where the numbers are that the value of a result is the median or the mean of. A sample holds a number, or one per side,
    or a few figures, or a few per side, or the parts of one (those of all steps of a round, where a round has several)."""
    columns = _columns(result["samples"], sides)
    for place, numbers in columns.items():
        if _is_made_of(result.get("value"), numbers):
            return place
    usual = [place for field in USUAL.get(result["unit"], ()) for place in columns if place.field == field]
    own = Place(next((place.side for place in columns), ""))  # ours comes first
    return next(iter(usual), replace(own, parts=_parts(result, columns, own.side)))


def _parts(result: Result, columns: Collection[Place], side: str) -> tuple[str, ...]:
    """The parts of a result by name, where its samples have exactly these."""
    parts = tuple(result.get("parts") or ())
    return parts if {place.field for place in columns if place.side == side} == set(parts) else ()


def _columns(samples: Sequence[Any], sides: Collection[str] = ()) -> dict[Place, list[float]]:
    """The numbers of all samples, by their place, where every sample has one."""
    first = _first(samples)
    flat = [Place(name) if name in sides else Place("", name) for name, value in first.items() if not isinstance(value, dict)]
    of_sides = [Place(side, name) for side, value in first.items() if isinstance(value, dict) for name in value]
    found = {place: [place.number(sample) for sample in samples] for place in (*flat, *of_sides)}
    return {place: [n for n in numbers if n is not None] for place, numbers in found.items() if None not in numbers}


def _is_made_of(value: Any, numbers: Sequence[float]) -> bool:
    if not isinstance(value, int | float):
        return False
    return any(math.isclose(middle(numbers), value, rel_tol=1e-9) for middle in (statistics.median, statistics.fmean))


def _positive(place: Place, sample: Any, text: str, figure: str) -> float:
    value = place.number(sample)
    if value is None or not 0 < value < math.inf:
        fields = ", ".join(dict.fromkeys(known.field for known in _columns([sample])))
        raise CompareError(
            f"{text}: no positive number in a sample: {json.dumps(sample)[:SHOWN]}",
            f"name a side, FILE#SIDE, or a field: --metric '{figure}:FIELD'{f' with one of {fields}' if fields else ''}",
        )
    return value


def _refuse_probes(result: Result, text: str) -> None:
    """What a search tried is no sample of what it found."""
    if any(isinstance(sample, dict) and "fits" in sample for sample in result["samples"]):
        why = f"{text}: {result['name']!r} was found by a search, and has one value and no samples"
        raise CompareError(why, "compare its values by eye, or name another result with --metric")


def _is_larger_better_of(field: str, result: Result, text: str) -> bool:
    """A field tells by its name, or is a part of the seconds or bytes of its result."""
    if field.endswith(LARGER_FIELDS):
        return True
    if field.endswith(SMALLER_FIELDS) or (result["unit"] in SMALLER and not field.endswith(NEITHER_FIELDS)):
        return False
    why = f"{text}: nothing says whether more or less of {field} is better"
    raise CompareError(why, f"name a field that ends in one of {', '.join((*LARGER_FIELDS, *SMALLER_FIELDS))}")


def _is_larger_better(result: Result, document: Mapping[str, Any]) -> bool:
    """A document has it in how the fraction of the bound was computed: value / bound, or bound / value. A median of rounds'
    fractions is near one of them."""
    value, bound, fraction = result.get("value"), (result.get("bound") or {}).get("value"), result.get("fraction_of_bound")
    if value and bound and fraction and not math.isclose(value, bound):
        return abs(math.log(fraction * bound / value)) < abs(math.log(fraction * value / bound))
    return document.get("case") != "perf" and result["unit"] not in SMALLER


def _unit_of(field: str) -> str:
    return "tok/s" if field.endswith("tokens_per_s") else "s" if field.endswith(("_s", "seconds")) else ""
