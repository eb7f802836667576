"""`redline report RUN`: a run as one HTML file, to keep, to send, to open without a network."""

from __future__ import annotations

from pathlib import Path

from redline.errors import RunFolderError
from redline.runs import Run
from redline.runs.reader import Explain, RunReader
from redline.runs.trajectories import Trajectories
from redline.telemetry.files.durable import replace_file
from redline.web.page import page_bytes, report_page


def write_report(run: Run | Path, target: Path, explain: Explain | None = None) -> None:
    """Write the page of a run that has ended, or of one as far as it has come."""
    reader = RunReader(run, explain)
    document = reader.document()
    document["trajectories"] = Trajectories(reader.run).chosen()
    try:
        replace_file(target, page_bytes(report_page(document["head"]["name"], document)))
    except (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError) as error:
        raise RunFolderError(f"{target}: cannot be written: {error.strerror}", "choose another file with -o FILE") from error
