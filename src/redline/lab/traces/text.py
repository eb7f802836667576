"""What the doctor says of a capture for people, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from redline.lab.traces.causes import ON_DEVICE, UNRECORDED, Cause
from redline.lab.traces.diagnosis import ADVICE, Diagnosis, EngineFindings, seconds
from redline.lab.traces.names import short
from redline.lab.traces.stalls import RankTime


def lines_of(diagnosis: Diagnosis) -> Iterator[str]:
    """Give the lines: the verdict, each engine with its ranks and causes, and what the capture lacks.

    Names come from the capture: a character that a terminal would obey is shown as its escape.
    """
    yield from map(_printable, _lines(diagnosis))


def _printable(line: str) -> str:
    return (
        line
        if line.isprintable()
        else "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)
    )


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield diagnosis.verdict
    for found in diagnosis.engines:
        yield ""
        yield from _engine(diagnosis, found)
    if diagnosis.lacks:
        yield ""
        yield "What the capture lacks:"
        yield from (f"  {sentence}" for sentence in diagnosis.lacks)


def _engine(diagnosis: Diagnosis, found: EngineFindings) -> Iterator[str]:
    lost = found.lost
    longest = max((stall.length for stall in lost.stalls), default=0)
    stalls = f"{len(lost.stalls):,} stalls (the longest {seconds(longest)}), {seconds(lost.short)} in short pauses"
    yield f"{diagnosis.engine_name(found)}: {seconds(lost.window)} recorded, {seconds(lost.total)} lost in {stalls}"
    yield from (f"  {_rank(diagnosis, rank, lost.window)}" for rank in lost.ranks)
    for place, cause in enumerate(found.causes, 1):
        yield from _cause(diagnosis, place, cause, lost.window)
    if found.causes and found.rest > 0:
        yield f"  {seconds(found.rest)} more in causes below 1% each"


def _rank(diagnosis: Diagnosis, rank: RankTime, window: int) -> str:
    name = diagnosis.rank_label(rank)
    if rank.device < 0:
        return f"{name}: waited {seconds(rank.waiting)} for others in collectives"
    words = f"{name}: device idle {rank.idle / max(1, window):.0%}, waiting for other ranks {rank.waiting / max(1, window):.0%}"
    if rank.replays:
        words += f"; {rank.replays:,} graph launches, {rank.late:,} late"
        words += f" (by {seconds(rank.late_by)})" if rank.late else ""
    return words


def title_of(diagnosis: Diagnosis, cause: Cause) -> str:
    """Return a cause in one sentence."""
    where = diagnosis.label(cause.process)
    if cause.kind == UNRECORDED:
        return f"{where} recorded nothing while the device waited"
    if cause.kind == ON_DEVICE:
        return f"work of {where} was launched, and began late on the device"
    return f"`{short(cause.call)}` in {where}"


def _cause(diagnosis: Diagnosis, place: int, cause: Cause, window: int) -> Iterator[str]:
    yield f"  {place}. {title_of(diagnosis, cause)}  [{cause.kind}]"
    yield f"     lost: {seconds(cause.lost)}, {cause.lost / max(1, window):.1%} of the time, in {len(cause.stalls):,} stalls"
    yield f"     walk: {walk_of(diagnosis, cause)}"
    if cause.growth:
        yield f"     grows: {growth_of(cause)}"
    if cause.basis:
        yield f"     class: {cause.basis}"
    yield f"     {ADVICE[cause.kind]}"


def walk_of(diagnosis: Diagnosis, cause: Cause) -> str:
    """Return the way from the late launch to the call."""
    late, count = cause.late.most_common(1)[0]
    steps = [f"late: {diagnosis.label(late)} ({count:,} of {len(cause.stalls):,} stalls)"]
    if cause.process != late:
        steps.append(f"waits for {diagnosis.label(cause.process)}")
    calls = [*cause.path[-3:], *([cause.call] if cause.call else [])]
    return " → ".join([*steps, *map(short, calls)])


def growth_of(cause: Cause) -> str:
    """Return how a call grows, in words."""
    growth = cause.growth
    assert growth is not None
    by = "with the size that the capture records" if growth.by == "size" else "as the capture goes on (it carries no sizes)"
    first, last = (seconds(value * 1e9) for value in (growth.first_s, growth.last_s))
    return f"from {first} to {last} a stall {by}; a line explains {growth.explained:.0%}"
