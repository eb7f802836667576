"""A document as a person reads it."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from redline.lab.evidence.document import Document, PeerFigure, Result

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def render(document: Document) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"{document.case} on {document.identity['device']}", title_justify="left")
    table.add_column("", no_wrap=True)
    for title in ("redline", "bound", "of bound", "peer", "", "ratio, 95% interval"):
        table.add_column(title, justify="right", no_wrap=True)
    for result in document.results:
        table.add_row(*_cells(result))
        for row in _parts(result):
            table.add_row(*row, style="dim")
        if note := result.details.get("beside"):
            table.add_row(f"  {note}", style="dim")
    return table


def _cells(result: Result) -> list[Text | str]:
    value, bound = (quantity(number, result.unit) for number in (result.value, result.bound.value))
    own = Text(value, style="bold") + Text(_interval(result.details.get("interval_95")), style="dim")
    cells: list[Text | str] = [result.name, own, bound, f"{result.fraction_of_bound:.1%}"]
    if result.peer is None:
        return cells
    return [*cells, result.peer.name, quantity(result.peer.value, result.unit), _ratio(result.peer)]


def _parts(result: Result) -> list[list[str]]:
    """What a value is made of, ours beside the peer's."""
    parts, theirs = result.details.get("parts", {}), result.details.get("peer_parts", {})
    rows = []
    for name in dict.fromkeys([*parts, *theirs]):
        own, peer = (quantity(figures[name], result.unit) if name in figures else "" for figures in (parts, theirs))
        rows.append([f"  {name}", own, "", "", "", peer])
    return rows


def _ratio(peer: PeerFigure) -> Text:
    comparison = peer.comparison
    ratio = Text(f"{peer.ratio:.2f}×")
    if comparison is None:
        return ratio
    if comparison.is_significant:
        ratio.stylize("bold green" if peer.ratio > 1 else "bold red")
    return ratio + Text(_interval(comparison.interval) or " (too few pairs)", style="dim")


def _interval(interval: list[float] | tuple[float, float] | None) -> str:
    return f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else ""


def quantity(value: float, unit: str) -> str:
    """`1.23 GB`, `12.3 ms`, `1,234 tok/s`."""
    if unit == "bytes":
        size, prefix = next(((s, p) for s, p in PREFIXES if value >= s), (1e3, "k"))
        return f"{value / size:.3g} {prefix}B"
    if unit == "s" and value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
