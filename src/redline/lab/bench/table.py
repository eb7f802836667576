"""The document of a bench as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich import box
from rich.table import Table
from rich.text import Text

from redline.telemetry.console.tables import Fitted

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


class Documented(Protocol):
    """What a bench ends with: of one case, or of all."""

    def as_json(self) -> dict[str, Any]: ...


def render(document: Documented) -> Fitted:
    """Return the results as a table: each beside its bound and its peer, then the parts that it is made of."""
    found = document.as_json()
    device = found["identity"].get("device")
    table = Table(box=box.SIMPLE_HEAD, title=f"{found['case']} on {device}" if device else found["case"], title_justify="left")
    table.add_column("", no_wrap=True)
    for title in ("redline", "bound", "of bound", "peer", "", "ratio, 95% interval"):
        table.add_column(title, justify="right", no_wrap=True)
    for result in found["results"]:
        table.add_row(*_cells(result))
        for row in _parts(result):
            table.add_row(*row, style="dim")
        if note := result.get("beside"):
            table.add_row(Text(f"  {note}"), style="dim")
    return Fitted(table)


def _cells(result: Mapping[str, Any]) -> list[Text | str]:
    value, bound = (quantity(number, result["unit"]) for number in (result["value"], result["bound"]["value"]))
    own = Text(value, style="bold") + Text(_interval(result.get("interval_95")), style="dim")
    name = f"{result['case']}: {result['name']}" if "case" in result else result["name"]
    of_bound = [bound, f"{result['fraction_of_bound']:.1%}"] if result["bound"]["value"] else ["", ""]
    cells: list[Text | str] = [Text(name), own, *of_bound]
    peer = result["peer"]
    return cells if peer is None else [*cells, peer["name"], quantity(peer["value"], result["unit"]), _ratio(peer)]


def _parts(result: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each part of a value: ours beside the peer's."""
    parts, theirs = result.get("parts", {}), result.get("peer_parts", {})
    rows = []
    for name in dict.fromkeys([*parts, *theirs]):
        own, peer = (quantity(figures[name], result["unit"]) if name in figures else "" for figures in (parts, theirs))
        rows.append([f"  {name}", own, "", "", "", peer])
    return rows


def _ratio(peer: Mapping[str, Any]) -> Text:
    """Return the ratio to a peer, coloured where its interval leaves out 1, and which sides had not settled."""
    ratio, unsettled = Text(f"{peer['ratio']:.2f}×"), peer.get("not_settled")
    note = Text(f", not settled: {', '.join(unsettled)}", style="dim") if unsettled else Text()
    if "pairs" not in peer:  # not measured in pairs
        return ratio + note
    interval = peer["interval_95"]
    if interval and not interval[0] <= 1 <= interval[1]:
        ratio.stylize("bold green" if peer["ratio"] > 1 else "bold red")
    return ratio + Text(_interval(interval) or " (too few pairs)", style="dim") + note


def _interval(interval: Sequence[float] | None) -> str:
    return f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else ""


def quantity(value: float, unit: str) -> str:
    """`1.23 GB`, `12.3 ms`, `1,234 tok/s`."""
    if unit == "bytes":
        size, prefix = next(((s, p) for s, p in PREFIXES if value >= s), (1e3, "k"))
        return f"{value / size:.3g} {prefix}B"
    if unit == "s" and value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
