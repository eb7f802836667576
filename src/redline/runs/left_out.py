"""What the files of a run no longer hold, in sentences for people."""

from __future__ import annotations

from pathlib import Path

from redline.buffer.store.segments import segment_files
from redline.errors import RunFolderError
from redline.runs.status import is_closed
from redline.runs.stored import StoredRun
from redline.telemetry import RunFolder
from redline.telemetry.files.metrics import first_row_where, rows_from_the_last
from redline.telemetry.files.trace import left_out_of


class LeftOut:
    """Can be asked with every look at a run: what takes long to find is remembered until it changes."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._let_go: tuple[int, str | None] = (0, None)
        """The oldest segment that was there, and what was let go by then."""

    def sentences(self, num_samples: int) -> list[str]:
        """Return one for each file that has let something go. `num_samples` is how many samples were let go."""
        return [text for text in (self.ledger(), self._trace(), _samples(num_samples), self._trajectories()) if text]

    def ledger(self) -> str | None:
        """Return which steps the ledger is of, where earlier processes have taken some; None where it is of all, or not
        there."""
        metrics = self._folder.metrics
        newest = next(rows_from_the_last(metrics), None)
        if newest is None or not is_closed(self._folder):
            return None
        began = newest.get("run/began_s")
        found = (
            first_row_where(metrics, lambda row: row.get("run/began_s") == began),
            first_row_where(metrics, lambda _: True),
        )
        own, first = ((row or newest).get("step") for row in found)
        if own == first:
            return None
        return (
            f"ledger.json is of the last process alone, which took the steps {own} to {newest.get('step')};"
            " metrics.jsonl has the time of all steps (timeline/PHASE_s)."
        )

    def _trace(self) -> str | None:
        found = left_out_of(self._folder.trace)
        if found is None:
            return None
        start, end = (f"{us / 60e6:,.0f}" for us in (found.start_us, found.end_us))
        return (
            f"trace.json holds the beginning and the newest stretch; {found.spans:,} spans of the minutes {start} to {end} were"
            " let go (telemetry.trace_max_bytes)."
        )

    def _trajectories(self) -> str | None:
        folder = self._folder.trajectories
        oldest = _oldest_segment(folder)
        if oldest != self._let_go[0]:
            try:
                found = StoredRun(self._folder.path).let_go()
            except RunFolderError:
                return None
            self._let_go = (oldest, found.sentence if found else None)
        return self._let_go[1]


def _samples(count: int) -> str | None:
    return f"samples.jsonl is thinner the older it is; {count:,} samples were let go." if count else None


def _oldest_segment(folder: Path) -> int:
    try:
        return min((file.number for file in segment_files(folder)), default=0)
    except OSError:
        return 0
