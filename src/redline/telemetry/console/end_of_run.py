"""The last screen of a run: whether it learned, where the model is, then where the time went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from redline.telemetry.console.progress import SampleAnswer, sample_table
from redline.telemetry.console.tables import Fitted
from redline.telemetry.ledger import Ledger
from redline.telemetry.summary.held_out import Evaluation, HeldOut, shown, shown_change
from redline.telemetry.summary.targets import Verdict, summary_line


@dataclass(slots=True, frozen=True)
class EndOfRun:
    """What a person wants to know when a run has ended."""

    run: str
    """The run folder, as the person calls it."""
    steps: int
    finished: bool
    held_out: HeldOut | None
    """None where nothing was evaluated."""
    samples: tuple[Sequence[SampleAnswer], Sequence[SampleAnswer]] | None
    """Answers to the same prompts, before and after."""
    remarks: Sequence[str]
    """What went wrong: attempts that failed, nothing learned, and why."""
    model: str | None
    """The folder of the trained model; None where the weights never moved or the run was stopped."""
    targets: Sequence[Verdict]
    ledger: Ledger


def end_of_run(end: EndOfRun) -> Iterator[RenderableType]:
    """Yield the parts of the last screen, in the order in which they are printed. A `Text` is one line."""
    if end.samples:
        yield sample_table(*end.samples)
    yield from _held_out(end.held_out) if end.held_out else ()
    for remark in end.remarks:
        yield Text(remark)
    if not end.finished:
        yield Text(f"stopped after step {end.steps}; continue with: redline train {end.run} --resume")
    elif end.model:
        yield Text.assemble("trained model: ", (end.model, "bold"))
        yield Text(f"serve it with: redline serve {end.run}")
    yield Text()
    yield Fitted(end.ledger.render_short())
    yield Text(f"the whole ledger: redline show {end.run} --ledger; with charts: redline report {end.run}", style="dim")
    yield Text(summary_line(end.targets))


def _held_out(found: HeldOut) -> Iterator[Text]:
    """A line for the first evaluation and one for the last, with the change and its interval."""
    sides = zip((found.before, found.after), found.values, strict=True)
    first, last = (_evaluation(side, value, found.measure) for side, value in sides)
    yield first
    if found.word == "once":
        return
    colour = {"rose": "bold green", "fell": "bold red"}.get(found.word, "bold")
    interval = found.interval and [shown_change(end, found.measure, unit=False) for end in found.interval]
    sure = f" (95% interval {interval[0]} to {interval[1]})" if interval else ""
    yield Text.assemble(last, "  ", (shown_change(found.change, found.measure), colour), sure)
    if found.left_out:
        yield Text(found.left_out_words)


def _evaluation(found: Evaluation, value: float, measure: str) -> Text:
    title = f"held-out, step {found.step}" if found.step else "held-out, before"
    return Text.assemble(f"{title:<18} {measure} ", (shown(value, measure), "bold"), f"  {found.answers:,} answers")
