"""The page of `redline doctor TRACE` in a real browser, and the verb as it is typed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support import kineto_files, nsys_files
from support.browser import Watched, chromium
from support.late_launches import Scenario
from support.processes import redline, succeed

EVIL = "</script><img src=x onerror=alert(1)>"
PICTURES = os.environ.get("REDLINE_PICTURES")


@pytest.mark.slow
def test_the_page_shows_the_timeline_of_each_cause_and_runs_nothing_of_the_trace(tmp_path: Path) -> None:
    recorded = Scenario().record()
    recorded.calls = [replace(call, name=EVIL) if call.name == "schedule" else call for call in recorded.calls]
    nsys_files.write(recorded, tmp_path / "report.sqlite", graphs="node")
    text = succeed("doctor", "report.sqlite", "-o", "doctor.html", cwd=tmp_path)
    assert "lost" in text
    with chromium() as browser:
        page = Watched(browser)
        page.open((tmp_path / "doctor.html").as_uri())
        shown = page.page.inner_text("main")
        assert "to serialisation, most of all" in shown
        pictures = page.page.query_selector_all("figure.cut svg.lanes")
        assert len(pictures) >= 3
        assert "pickle.dumps" in pictures[0].text_content()
        assert page.page.query_selector_all("rect.t-cause")
        assert page.requests == [(tmp_path / "doctor.html").as_uri()]
        assert page.errors == []
        assert page.dialogs == []
        page.context.close()


@pytest.mark.slow
def test_the_verb_prints_one_document_and_refuses_what_is_no_trace(tmp_path: Path) -> None:
    paths = kineto_files.write_ranks(Scenario(engines=1).record(), tmp_path)
    document = json.loads(succeed("doctor", *paths, "--json", cwd=tmp_path))
    assert document["engines"][0]["causes"][0]["class"] == "serialisation"
    (tmp_path / "notes.txt").write_text("nothing")
    refused = redline("doctor", "notes.txt", cwd=tmp_path)
    assert refused.returncode == 2
    assert "hint:" in refused.stderr


@pytest.mark.slow
@pytest.mark.skipif(not PICTURES, reason="writes a picture of the documentation, with REDLINE_PICTURES")
def test_the_picture_of_the_documentation(tmp_path: Path) -> None:
    (tmp_path / "decode-tp4").mkdir()
    kineto_files.write_ranks(Scenario(engines=1).record(), tmp_path / "decode-tp4")
    succeed("doctor", "decode-tp4", "-o", "doctor.html", cwd=tmp_path)
    with chromium() as browser:
        page = Watched(browser)
        page.open((tmp_path / "doctor.html").as_uri())
        page.picture(Path(str(PICTURES)) / "traces.png", height=1190)
        page.context.close()
