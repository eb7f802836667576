"""The ledger: each nanosecond of a lane belongs to one span name, the innermost open one, or is `unaccounted`.

    wall = sum(rows) + unaccounted        in integers, so the equality is exact

A recorder keeps these sums as it goes; `ledger_from_spans` finds them again from intervals alone, for traces on disk and to
hold the recorder to account.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich import box
from rich.table import Table
from rich.text import Text

UNACCOUNTED = "unaccounted"
MAIN_LANE = "main"
_BAR_WIDTH = 20
# Blank but for a line under the head and one where a section ends; the eight rows are those rich asks for.
_RULES = box.Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")


class Interval(Protocol):
    """What the ledger needs to know of a span."""

    @property
    def lane(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...


@dataclass(slots=True, frozen=True)
class LaneLedger:
    """Where one lane's time went."""

    wall_ns: int
    rows: Mapping[str, int]
    """Span name → exclusive ns."""
    unaccounted_ns: int

    def __post_init__(self) -> None:
        assert sum(self.rows.values()) + self.unaccounted_ns == self.wall_ns, "a ledger must sum to the wall clock"

    @property
    def unaccounted_fraction(self) -> float:
        """unaccounted / wall; 0 for an empty lane."""
        return self.unaccounted_ns / self.wall_ns if self.wall_ns else 0.0

    @property
    def only_waits(self) -> bool:
        """Whether spans other than `wait.*` have less than 1% of the wall time."""
        waits = sum(ns for name, ns in self.rows.items() if name.startswith("wait."))
        return self.wall_ns - waits < 0.01 * self.wall_ns


@dataclass(slots=True, frozen=True)
class Ledger:
    """Where a process's time went, lane by lane."""

    lanes: Mapping[str, LaneLedger]

    def to_json(self) -> dict[str, Any]:
        return {
            "lanes": {
                name: {"wall_ns": lane.wall_ns, "rows": dict(sorted(lane.rows.items())), "unaccounted_ns": lane.unaccounted_ns}
                for name, lane in self.lanes.items()
            }
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Ledger:
        return cls({name: LaneLedger(**lane) for name, lane in document["lanes"].items()})

    def render(self) -> Table:
        """A table for people: sections by size, their parts under them, `unaccounted`, then the wall time they sum to.

        Lanes that did next to nothing but wait are only named."""
        table = Table(box=_RULES)
        table.add_column("where the time went", no_wrap=True, min_width=26)
        table.add_column("seconds", justify="right", no_wrap=True)
        table.add_column("share", justify="right", no_wrap=True)
        table.add_column("", width=_BAR_WIDTH, no_wrap=True)
        at_work = {name: lane for name, lane in self.lanes.items() if name == MAIN_LANE or not lane.only_waits}
        for name, lane in at_work.items():
            if len(at_work) > 1:
                table.add_row(Text(f"lane {name}"), style="italic", end_section=True)
            _add_lane(table, lane)
        if waiting := [name for name in self.lanes if name not in at_work]:
            table.caption = f"lanes that only waited: {', '.join(waiting)}"
        return table

    def render_short(self, most: int = 6) -> Table:
        """A table for people of the main lane alone: its largest rows, the others as one, `unaccounted`, and the total."""
        lane = self.lanes[MAIN_LANE]
        largest = sorted(lane.rows, key=lambda name: -lane.rows[name])
        exact = {name: lane.rows[name] for name in largest[:most]}
        if others := largest[most:]:
            exact[f"{len(others)} others"] = sum(lane.rows[name] for name in others)
        exact[UNACCOUNTED] = lane.unaccounted_ns
        table = Table(box=_RULES, pad_edge=False, show_edge=False)
        table.add_column("where the time went", no_wrap=True)
        for title in ("seconds", "share"):
            table.add_column(title, justify="right", no_wrap=True)
        milliseconds, permille = _apportion(exact, round(lane.wall_ns / 1e6)), _apportion(exact, 1000)
        for name in exact:
            table.add_row(Text(name), f"{milliseconds[name] / 1000:,.1f}", f"{permille[name] / 10:.1f}%")
        table.add_row("total", f"{lane.wall_ns / 1e9:,.1f}", "100.0%", style="bold")
        return table


def by_section(rows: Mapping[str, int]) -> dict[str, int]:
    """ns per section: `engine.prefill` and `engine.decode` become `engine`; `unaccounted` stays as it is."""
    sections: defaultdict[str, int] = defaultdict(int)
    for name, ns in rows.items():
        sections[name.partition(".")[0]] += ns
    return dict(sections)


def ledger_from_spans(spans: Iterable[Interval], windows: Mapping[str, tuple[int, int]] | None = None) -> Ledger:
    """The ledger of finished, properly nested intervals. `windows` says when lanes began and ended, as (start, end); without
    it a lane lasts from its first start to its last end."""
    lanes: defaultdict[str, list[Interval]] = defaultdict(list, {name: [] for name in windows or {}})
    for span in spans:
        lanes[span.lane].append(span)
    return Ledger({name: _lane_from_spans(group, (windows or {}).get(name)) for name, group in lanes.items()})


def _lane_from_spans(spans: Sequence[Interval], window: tuple[int, int] | None) -> LaneLedger:
    """A span owns its length less the union of the spans inside it."""
    rows: defaultdict[str, int] = defaultdict(int)
    union: list[tuple[int, int]] = []  # disjoint, in order: what the spans so far cover
    for span in sorted(spans, key=lambda s: (s.end_ns, -s.start_ns)):  # inner before outer
        covered = 0
        while union and union[-1][0] >= span.start_ns:
            start, end = union.pop()
            covered += end - start
        rows[span.name] += span.end_ns - span.start_ns - covered
        union.append((span.start_ns, span.end_ns))
    start, end = window or (union[0][0], union[-1][1])
    return LaneLedger(end - start, dict(rows), end - start - sum(end - start for start, end in union))


# ── the table ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _add_lane(table: Table, lane: LaneLedger) -> None:
    """Only parts are rounded; a subtotal adds up what is printed under it, so the printed columns sum too."""
    exact = {**lane.rows, UNACCOUNTED: lane.unaccounted_ns}
    milliseconds = _apportion(exact, round(lane.wall_ns / 1e6))
    permille = _apportion(exact, 1000)

    def add_row(label: str, names: Iterable[str], *, style: str = "", bar: bool = True, last: bool = False) -> None:
        ms, share = (sum(part[name] for name in names) for part in (milliseconds, permille))
        drawn = Text(_bar(share / 1000) if bar else "", style="cyan")
        table.add_row(Text(label), f"{ms / 1000:,.3f}", f"{share / 10:.1f}%", drawn, style=style, end_section=last)

    for section, names in _grouped(lane.rows).items():
        alone = len(names) == 1
        add_row(names[0] if alone else section, names, style="bold")
        for name in () if alone else names:
            add_row(f"  {name.partition('.')[2]}", [name], style="dim", bar=False)
    add_row(UNACCOUNTED, [UNACCOUNTED], style="yellow" if lane.unaccounted_fraction > 0.02 else "", last=True)
    add_row("total", list(exact), style="bold", bar=False, last=True)


def _grouped(rows: Mapping[str, int]) -> dict[str, list[str]]:
    """Section → its span names; both with the largest first."""
    sections = by_section(rows)
    largest_first = sorted(rows, key=lambda name: (-sections[name.partition(".")[0]], -rows[name]))
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in largest_first:
        groups[name.partition(".")[0]].append(name)
    return groups


def _apportion(exact: Mapping[str, int], total: int) -> dict[str, int]:
    """Scale to integers that sum to `total`: round down, then give what is missing to the largest remainders."""
    whole = sum(exact.values())
    if not whole:
        return dict.fromkeys(exact, 0)
    shares = {name: ns * total // whole for name, ns in exact.items()}
    by_remainder = sorted(exact, key=lambda name: -(exact[name] * total % whole))
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


def _bar(fraction: float) -> str:
    eighths = round(fraction * _BAR_WIDTH * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
