"""The page of `redline doctor TRACE`: one HTML file with the timeline cut to the evidence, in the looks of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redline.errors import TraceError
from redline.telemetry.files.durable import replace_file
from redline.web.page import page_bytes, report_page


def write_trace_page(document: dict[str, Any], target: Path) -> None:
    """Write the page. Raises `TraceError` where the file cannot be written."""
    name = Path(document["traces"][0]).name
    try:
        replace_file(target, page_bytes(report_page(name, document)))
    except (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError) as error:
        raise TraceError(f"{target}: cannot be written: {error.strerror}", "choose another file with -o FILE") from error
