"""A disk that takes no more: telemetry gives way, training goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.processes import only_run, redline, rows, succeed, write_letters

STEPS = 3


@pytest.mark.slow
def test_a_run_whose_telemetry_cannot_be_written_takes_its_steps_and_says_so_once(tmp_path: Path) -> None:
    """`/dev/full` refuses every write with ENOSPC; a folder in the place of a file refuses to be replaced."""
    recipe = write_letters(tmp_path, run={"name": "letters", "num_threads": 1, "steps": STEPS, "checkpoint_every": 1})
    succeed("train", recipe, cwd=tmp_path)
    folder = only_run(tmp_path)
    folder.trace.unlink()
    folder.trace.symlink_to("/dev/full")
    folder.ledger.unlink()
    (folder.ledger / "in-the-way").mkdir(parents=True)
    done = redline("train", folder.path, "--resume", f"run.steps={2 * STEPS}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(folder.metrics)] == list(range(1, 2 * STEPS + 1))
    assert (folder.model / "model.safetensors").exists()
    said = " ".join(done.stderr.split())
    assert said.count("trace.json is written no longer: No space left on device; the run goes on") == 1
    assert said.count("ledger.json is not written") == 1


@pytest.mark.slow
def test_a_run_with_a_small_bound_on_its_trace_ends_with_one_that_opens(tmp_path: Path) -> None:
    recipe = write_letters(
        tmp_path, run={"name": "letters", "num_threads": 1, "steps": 150}, telemetry={"trace_max_bytes": 1 << 20}
    )
    succeed("train", recipe, cwd=tmp_path)
    folder = only_run(tmp_path)
    assert folder.trace.stat().st_size <= 1 << 20
    events = json.loads(folder.trace.read_text())
    [bar] = [event for event in events if event["ph"] == "X" and event["name"] == "left out"]
    assert bar["args"]["spans"] > 0
    versions = [event["args"]["version"] for event in events if event["name"] == "telemetry.metrics"]
    assert (versions[0], versions[-1]) == (1, 150)
