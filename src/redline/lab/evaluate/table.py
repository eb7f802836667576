"""What `redline eval` found, for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from redline.lab.evaluate.figures import Difference, Document, Score
from redline.telemetry.console.tables import Fitted
from redline.telemetry.summary.held_out import shown, shown_change


def render(document: Document) -> Group:
    """A table of scores, and a sentence for each difference."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("task", "model"):
        table.add_column(title)
    for title in ("score", "95% interval", "questions", "answers", "failed", "tokens", "cut off"):
        table.add_column(title, justify="right", no_wrap=True)
    for score in document.scores:
        table.add_row(*_cells(score))
    return Group(Fitted(table), *(Text(sentence(difference)) for difference in document.differences))


def _cells(score: Score) -> Iterator[Text]:
    row = score.answers.row
    value = f"{score.unit} {shown(score.value, score.unit)}"
    ends = [shown(end, score.unit) for end in score.interval or ()]
    yield from map(Text, (score.answers.task, score.answers.model, value, " to ".join(ends)))
    yield Text(f"{len(score.answers.tasks):,}")
    yield Text(f"{row['evaluation/num_answers']:,}")
    yield Text(f"{row['evaluation/failures']:,}")
    yield Text(f"{row['evaluation/completion_tokens_mean']:,.1f}")
    yield Text(f"{row['evaluation/truncated_fraction']:.1%}")


def sentence(difference: Difference) -> str:
    """`chain_sum: A less B is +8.5 points (95% interval +1.2 to +15.8, 64 questions)`."""
    unit, interval = difference.score.unit, difference.interval
    ends = [shown_change(end, unit, unit=False) for end in interval or ()]
    sure = f"95% interval {' to '.join(ends)}, " if ends else ""
    chance = ", which may be chance" if interval and interval[0] <= 0 <= interval[1] else ""
    names = f"{difference.score.answers.model} less {difference.against.answers.model}"
    change = shown_change(difference.value, unit)
    return f"{difference.score.answers.task}: {names} is {change}{chance} ({sure}{len(difference.pairs):,} questions)"
