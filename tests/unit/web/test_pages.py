"""The report and the dashboard: what they hold, and requests that nobody should have sent."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.run_folders import append, step_row, write_run

from redline.errors import RunFolderError
from redline.runs.listing import Runs
from redline.web.dash import make_app
from redline.web.guard import COOKIE
from redline.web.page import report_page, script
from redline.web.report import write_report

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"

# ── the report ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_in_a_document_can_end_the_script_that_holds_it() -> None:
    page = report_page(EVIL, {"text": EVIL, "comment": "<!--"})
    [enclosed] = re.findall(r'<script id="document" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert json.loads(enclosed) == {"text": EVIL, "comment": "<!--"}
    assert "<" not in enclosed
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page


def test_the_policy_of_a_report_allows_its_own_script_alone() -> None:
    page = report_page("run", {})
    [policy] = re.findall(r'Content-Security-Policy" content="(.*?)">', page)
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}'; ")
    assert "unsafe" not in policy
    assert "http" not in policy


def test_scripts_never_make_markup_of_data() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?://", script())


def test_a_report_of_a_run_whose_last_steps_trained_nothing_has_the_speed_of_those_that_did(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 3, total=9)
    append(folder.metrics, ({**step_row(step, 9), "trainer/tokens_per_s": 0.0} for step in range(4, 10)))
    write_report(folder.path, tmp_path / "report.html")
    [enclosed] = re.findall(r'type="application/json">(.*?)</script>', (tmp_path / "report.html").read_text(), re.DOTALL)
    [training] = [target for target in json.loads(enclosed)["head"]["targets"] if target["name"] == "training"]
    assert training["value"] == sorted(step_row(step, 9)["trainer/tokens_per_s"] for step in (1, 2, 3))[1]
    assert training["why"] == "median of trainer/tokens_per_s in the 3 of 9 steps that trained"


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 3)
    with pytest.raises(RunFolderError, match="cannot be written"):
        write_report(folder.path, tmp_path / "no" / "such" / "report.html")
    with pytest.raises(RunFolderError, match="no such run folder"):
        write_report(tmp_path / "run-002", tmp_path / "report.html")


# ── the dashboard ──────────────────────────────────────────────────────────────────────────────────────────────────────


def ask(runs: Runs, path: str, *, token: str | None = None, method: str = "GET", **headers: str) -> httpx2.Response:
    async def send() -> httpx2.Response:
        transport = httpx2.ASGITransport(make_app(runs, token=token))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "one-001", 20)
    write_run(tmp_path / "runs" / "deeper" / "one-001", 10, total=20)
    (tmp_path / "runs" / "not-a-run").mkdir()
    (tmp_path / "config.json").write_text('{"secret": true}')
    return tmp_path / "runs"


def test_runs_are_found_in_folders_and_have_names_of_their_own(two_runs: Path) -> None:
    runs = Runs([two_runs])
    assert sorted(runs.names()) == ["one-001", "one-001~2"]
    write_run(two_runs / "late-001", 1)
    assert "late-001" in runs.names()
    with pytest.raises(RunFolderError, match="no such folder"):
        Runs([two_runs / "nowhere"])


def test_the_list_sends_only_the_lines_that_have_changed(two_runs: Path) -> None:
    runs = Runs([two_runs])
    first = ask(runs, "/data/runs").json()
    assert {run["id"]: run["steps_done"] for run in first["runs"]} == {"one-001": 10, "one-001~2": 20}
    assert ask(runs, f"/data/runs?after={first['cursor']}").json()["runs"] == []
    append(two_runs / "deeper" / "one-001" / "metrics.jsonl", [step_row(11, 20)])
    [changed] = ask(runs, f"/data/runs?after={first['cursor']}").json()["runs"]
    assert (changed["id"], changed["steps_done"]) == ("one-001", 11)
    assert changed["bottleneck"]["words"] in ("training", "waiting for rollouts")


@pytest.mark.parametrize(
    "path",
    [
        "/run/..%2f..",
        "/data/run/../../config.json",
        "/data/run/%2e%2e%2f%2e%2e%2fconfig.json",
        "/data/run/not-a-run",
        "/data/run/..%5c",
        "/data/run/one-001%00",
        "/assets/..%2f..%2fpage.py",
        "/assets/page.js",
        "/data/run/one-001/../../config.json",
    ],
)
def test_no_path_leads_out_of_the_runs(two_runs: Path, path: str) -> None:
    answer = ask(Runs([two_runs]), path)
    assert answer.status_code == 404
    assert "secret" not in answer.text


def test_every_answer_forbids_what_a_page_has_no_use_for(two_runs: Path) -> None:
    runs = Runs([two_runs])
    for path in ("/", "/run/one-001", "/assets/script.js", "/data/runs", "/data/run/one-001", "/nowhere"):
        headers = ask(runs, path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_the_dashboard_only_reads(two_runs: Path) -> None:
    runs = Runs([two_runs])
    before = {path: path.stat().st_mtime_ns for path in two_runs.rglob("*")}
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert ask(runs, "/data/run/one-001", method=method).status_code == 405
    for path in ("/data/runs", "/data/run/one-001", "/data/run/one-001/trajectories?step=1"):
        assert ask(runs, path).status_code == 200
    assert {path: path.stat().st_mtime_ns for path in two_runs.rglob("*")} == before


@pytest.mark.parametrize("step", ["", "x", "-1", "1.5", "²", "9" * 40])
def test_a_step_that_is_no_number_is_refused(two_runs: Path, step: str) -> None:
    assert ask(Runs([two_runs]), f"/data/run/one-001/trajectories?step={step}").status_code == 400


def test_a_foreign_name_for_this_machine_is_not_answered(two_runs: Path) -> None:
    """A site may let its own name resolve to 127.0.0.1, and its script would then read what we serve there."""
    runs = Runs([two_runs])
    assert ask(runs, "/data/runs", host="evil.example").status_code == 421
    assert ask(runs, "/data/runs", host="localhost:8000").status_code == 200
    assert ask(runs, "/data/runs", host="[::1]:8000").status_code == 200


def test_where_others_can_reach_it_a_token_is_needed(two_runs: Path) -> None:
    runs = Runs([two_runs])
    for path in ("/", "/?token=wrong", "/data/runs", "/assets/script.js"):
        assert ask(runs, path, token="right").status_code == 403
    answer = ask(runs, "/?token=right", token="right")
    assert answer.status_code == 303
    cookie: dict[str, Any] = {"cookie": answer.headers["set-cookie"].partition(";")[0]}
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert ask(runs, "/data/runs", token="right", **cookie).status_code == 200
    assert ask(runs, "/data/runs", token="right", cookie=f"{COOKIE}=wrong").status_code == 403


def test_a_run_whose_name_is_no_text_has_a_page_and_takes_no_other_from_the_list(two_runs: Path, tmp_path: Path) -> None:
    odd = write_run(two_runs / os.fsdecode(b"caf\xe9-001"), 3)
    append(odd.path / "alerts.jsonl", [{"step": 1, "kind": "odd", "seen": "half of a letter: \ud83d"}])
    runs = Runs([two_runs])
    listed = {run["id"] for run in ask(runs, "/data/runs").json()["runs"]}
    assert listed == {"one-001", "one-001~2", "caf?-001"}
    assert ask(runs, "/run/caf%3F-001").status_code == 200
    assert ask(runs, "/data/run/caf%3F-001").json()["alerts"][0]["seen"] == "half of a letter: ?"
    write_report(odd.path, tmp_path / "report.html")
    assert "caf?-001" in (tmp_path / "report.html").read_text()
