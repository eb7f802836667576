"""Runs with a fault in them: the alert and the file that it should leave, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.processes import only_run, redline, rows, started, succeed, wait_for_run, wait_until, write_letters

FAULTS = '''
import time
from pathlib import Path

from letters import Letters


class Faulty(Letters):
    """Something is wrong with the reward from the 400th answer on."""

    scored = 0

    def score(self, task, text):
        Faulty.scored += 1
        return self.fault(text) if Faulty.scored >= 400 else self.share(text)

    def share(self, text):
        return {"letter": text.count("e") / max(1, len(text))}


class Hanging(Faulty):
    def fault(self, text):
        self.wait_for_a_sandbox_that_is_down()
        return self.share(text)

    def wait_for_a_sandbox_that_is_down(self):
        while not list(Path("runs").glob("*/stalls/stall-001.txt")):
            time.sleep(0.01)


class Huge(Faulty):
    def fault(self, text):
        return {"letter": 3e38} if Faulty.scored < 420 and "e" in text else self.share(text)


class Exiting(Faulty):
    def fault(self, text):
        raise SystemExit("a library that thinks it is a program")
'''


def recipe(folder: Path, fault: str | None, max_lag: int, **telemetry: Any) -> Path:
    (folder / "faults.py").write_text(FAULTS)
    path = write_letters(
        folder,
        run={"steps": 30, "checkpoint_every": 10},
        buffer={"max_lag": max_lag},
        telemetry={"trace_max_bytes": 0} | telemetry,
    )
    if fault:
        path.write_text(path.read_text().replace("letters:Letters", f"faults:{fault}"))
    return path


def kinds(folder: Path) -> list[str]:
    return [row["kind"] for row in rows(folder / "alerts.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_healthy_run_raises_no_alert_and_no_stall(max_lag: int, tmp_path: Path) -> None:
    succeed("train", recipe(tmp_path, None, max_lag), cwd=tmp_path)
    folder = only_run(tmp_path)
    assert kinds(folder.path) == []
    assert not folder.stalls.exists()


@pytest.mark.parametrize("max_lag", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_reward_that_hangs_yields_the_file_that_names_it_and_one_alert(max_lag: int, tmp_path: Path) -> None:
    """It hangs until the file is there: the run could not end without it."""
    succeed("train", recipe(tmp_path, "Hanging", max_lag, stall_after_s=1.5), "run.steps=18", cwd=tmp_path)
    folder = only_run(tmp_path)
    document = json.loads((folder.stalls / "stall-001.json").read_text())
    assert document["summary"].startswith("`score` has not returned for ")
    assert "in rollouts.reward" in document["summary"]
    assert "in wait_for_a_sandbox_that_is_down" in document["summary"]
    if max_lag:
        assert any(line.startswith("main has waited for rollouts") for line in document["who_waits_for_whom"])
    assert document["queues"]["buffer: groups under way"] > 0
    text = (folder.stalls / "stall-001.txt").read_text()
    assert "in wait_for_a_sandbox_that_is_down: time.sleep(0.01)" in text
    assert "It moved again after " in text
    assert kinds(folder.path) == ["stalled_rollouts"]
    assert rows(folder.metrics)[-1]["step"] == 18


@pytest.mark.slow
def test_numbers_that_are_none_raise_one_alert(tmp_path: Path) -> None:
    path = recipe(tmp_path, "Huge", 0)
    succeed("train", path, "rollouts.advantages=group_centred", "trainer.max_bad_steps=10", cwd=tmp_path)
    folder = only_run(tmp_path)
    assert any(row["trainer/skipped"] for row in rows(folder.metrics)), "no step was bad, so that nothing was shown"
    assert kinds(folder.path) == ["not_finite"]


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_reward_that_begins_to_fail_raises_an_alert_with_the_reason_and_the_run_stops_with_it(
    max_lag: int, tmp_path: Path
) -> None:
    done = redline("train", recipe(tmp_path, "Exiting", max_lag), cwd=tmp_path)
    assert done.returncode == 2
    folder = only_run(tmp_path)
    assert "abort_storm" in kinds(folder.path)
    [alert] = [row for row in rows(folder.alerts) if row["kind"] == "abort_storm"]
    assert "reward: SystemExit: a library that thinks it is a program, at faults.py:" in alert["seen"]
    assert "error: every attempt of step " in done.stderr
    assert "SystemExit: a library that thinks it is a program, at faults.py:" in done.stderr
    assert "Traceback" not in done.stderr
    last = rows(folder.metrics)[-1]["step"]
    assert (folder.checkpoints / f"step-{last:06d}").is_dir(), "nothing is lost"


# ── profiles ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_steps_that_a_recipe_names_are_profiled(tmp_path: Path) -> None:
    path = recipe(tmp_path, None, 2, trace_max_bytes=None, profile={"what": "e2e", "steps": [3, 4]})
    succeed("train", path, "run.steps=6", cwd=tmp_path)
    folder = only_run(tmp_path)
    assert sorted(p.name for p in folder.profiles.iterdir()) == ["step-000003", "step-000004"]
    for profile in folder.profiles.iterdir():
        summary = json.loads((profile / "summary.json").read_text())
        assert {"torch.json", "timeline.json"} <= set(summary["files"])
        assert ("flame.svg" in summary["files"]) != any(note.startswith("no flame graph") for note in summary["notes"])
        assert {"engine", "trainer"} <= summary["by_stage"].keys(), "of all threads"
        assert summary["operators"][0]["self_s"] > 0
        assert summary["clock_error_us"] < 1000
        events = json.loads((profile / "timeline.json").read_text())["traceEvents"]
        lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name" and str(e["pid"]).startswith("redline")}
        assert {"main", "rollouts"} <= lanes
        assert_on_one_clock(events)


def assert_on_one_clock(events: list[dict[str, Any]]) -> None:
    """What torch computes in the main thread, beside which rollouts run, lies in the spans of the trainer in the main lane."""
    [(pid, tid)] = {
        (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"] == {"name": "main"}
    }  # torch's threads have other names
    in_trainer = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid) and e["name"].startswith("trainer.")
    ]
    middles = [e["ts"] + e["dur"] / 2 for e in events if e.get("cat") == "cpu_op" and e["pid"] == e["tid"]]
    covered = sum(any(start <= middle <= end for start, end in in_trainer) for middle in middles)
    assert len(middles) > 100
    assert covered > 0.95 * len(middles)


@pytest.mark.slow
def test_a_running_job_is_profiled_without_a_restart(tmp_path: Path) -> None:
    path = recipe(tmp_path, None, 0, trace_max_bytes=None)
    with started("train", path, "run.steps=100000", "rollouts.evaluation.num_tasks=0", cwd=tmp_path) as process:
        folder = wait_for_run(tmp_path, process)
        assert wait_until(lambda: len(rows(folder.metrics)) > 2, process)
        printed = succeed("profile", folder.path, "--what", "trainer", "--steps", "2", cwd=tmp_path)
        profiles = [Path(line) for line in printed.splitlines()]
        assert len(profiles) == 2
        for profile in profiles:
            summary = json.loads((profile / "summary.json").read_text())
            assert summary["what"] == "trainer"
            assert list(summary["by_stage"]) == ["trainer"]
        assert process.poll() is None
    refused = redline("profile", folder.path, cwd=tmp_path)
    assert refused.returncode == 2
    assert "no run goes on in this folder" in refused.stderr
