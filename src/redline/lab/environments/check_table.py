"""What `redline env check` prints."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from redline.lab.environments.check import Report
from redline.runs.told import printable
from redline.telemetry.console.tables import Fitted


def render(report: Report) -> Iterator[RenderableType]:
    """Sentences first, then figures."""
    yield from (Text(printable(f"ok     {text}")) for text in report.passed)
    yield from (Text(printable(f"not checked: {text}; no attempt got that far")) for text in report.not_checked)
    yield from (Text(printable(f"note   {text}")) for text in report.notes)
    yield from (Text(printable(f"WRONG  {text}")) for text in report.problems)
    if report.times_s:
        yield _table(
            "time of each part", ("p50", "p90", "p99"), {k: [_time(s) for s in v.values()] for k, v in report.times_s.items()}
        )
    if report.rewards:
        rows = {name: [f"{value:.4g}" for value in values.values()] for name, values in report.rewards.items()}
        yield _table("reward", ("least", "mean", "most"), rows)
    yield Text(_counts(report))


def _table(title: str, columns: tuple[str, ...], rows: dict[str, list[str]]) -> RenderableType:
    table = Table(title=title, title_justify="left", show_edge=False)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, values in rows.items():
        table.add_row(Text(printable(name)), *values)
    return Fitted(table)


def _counts(report: Report) -> str:
    counts = report.counts
    if "attempts" not in counts:
        return "nothing could be played"
    return (
        f"{counts['attempts']:.0f} attempts, {counts['turns_least']:.0f} to {counts['turns_most']:.0f} turns each"
        f" (mean {counts['turns_mean']:.1f}), {counts['roles']:.0f} role(s); {counts['turns_that_go_on']:.0f} turns go on from"
        f" an earlier one, {counts['turns_that_begin_anew']:.0f} begin anew; prompts of about"
        f" {counts['prompt_tokens_mean']:.0f} tokens, {counts['prompt_tokens_most']:.0f} at most (4 characters each)"
    )


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
