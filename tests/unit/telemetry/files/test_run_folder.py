from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from redline.errors import RunFolderError
from redline.telemetry import RunFolder, write_json
from redline.telemetry.files.failure import read_failure, recording_at_once, recording_failure

HOLD_THE_LOCK = """
import sys, pathlib
from redline.telemetry import RunFolder
with RunFolder(pathlib.Path(sys.argv[1])).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""


def finished_run(parent: Path, name: str) -> RunFolder:
    folder = RunFolder.create(parent, name)
    write_json(folder.config, {})
    return folder


def test_run_folders_count_up(tmp_path: Path) -> None:
    names = [RunFolder.create(tmp_path / "runs", "demo").path.name for _ in range(3)]
    assert names == ["demo-001", "demo-002", "demo-003"]


def test_a_name_that_begins_like_another_has_its_own_numbers(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "demo-large")
    assert RunFolder.create(tmp_path, "demo").path.name == "demo-001"


def test_numbers_go_on_after_the_highest_even_past_three_digits(tmp_path: Path) -> None:
    (tmp_path / "demo-999").mkdir()
    assert RunFolder.create(tmp_path, "demo").path.name == "demo-1000"
    assert RunFolder.create(tmp_path, "demo").path.name == "demo-1001"


def test_runs_started_together_get_different_folders(tmp_path: Path) -> None:
    made: list[str] = []
    threads = [threading.Thread(target=lambda: made.append(RunFolder.create(tmp_path, "demo").path.name)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [f"demo-00{number}" for number in range(1, 9)]


def test_the_newest_run_is_the_highest_number_that_got_started(tmp_path: Path) -> None:
    finished_run(tmp_path, "demo")
    newest = finished_run(tmp_path, "demo")
    RunFolder.create(tmp_path, "demo")  # died before it wrote its config
    finished_run(tmp_path, "other")
    assert RunFolder.newest(tmp_path, "demo") == newest


def test_a_run_that_failed_before_its_first_step_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    before, failed, told = finished_run(tmp_path, "demo"), finished_run(tmp_path, "demo"), list[str]()
    failed.failure.write_text("{}")
    assert RunFolder.newest(tmp_path, "demo", tell=told.append) == before
    assert told == ["demo-002 failed before its first step and is passed over"]
    failed.metrics.write_text('{"step": 1}\n')
    assert RunFolder.newest(tmp_path, "demo") == failed


def test_a_folder_is_gone_when_the_run_is_refused_before_it_has_a_config(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo")
    with pytest.raises(KeyboardInterrupt), folder.locked(), recording_failure(folder):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_the_newest_of_no_runs_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run called demo") as caught:
        RunFolder.newest(tmp_path / "runs", "demo")
    assert "without --resume" in caught.value.hint


def test_opening_a_run_folder_finds_its_files(tmp_path: Path) -> None:
    made = finished_run(tmp_path, "demo")
    assert RunFolder.open(made.path) == made
    assert made.trajectories.is_dir()
    assert made.checkpoints.is_dir()


def test_opening_what_is_not_a_run_folder_names_the_newest_run_nearby(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "demo")
    for wrong in (tmp_path, tmp_path / "demo-007"):
        with pytest.raises(RunFolderError) as caught:
            RunFolder.open(wrong)
        assert str(run.path) in caught.value.hint


def test_two_processes_cannot_run_in_one_folder_and_a_kill_frees_it(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, "demo")
    command = [sys.executable, "-c", HOLD_THE_LOCK, str(folder.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            with pytest.raises(RunFolderError, match=f"process {holder.pid} is running"), folder.locked():
                pass
        finally:
            holder.kill()
    with folder.locked():
        pass


def test_the_lock_is_free_again_after_use(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo")
    for _ in range(2):
        with folder.locked():
            pass


def test_a_failed_write_leaves_the_old_document_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_json(path, {"steps": 1})
    for unwritable in ({"steps": object()}, {"steps": math.nan}):
        with pytest.raises((TypeError, ValueError)):
            write_json(path, unwritable)
    assert json.loads(path.read_text()) == {"steps": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_half_a_document(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    write_json(path, ["old"] * 1000)
    before = path.open()  # a reader that was there first keeps its file
    write_json(path, ["new"] * 2000)
    with before:
        assert json.load(before) == ["old"] * 1000
    assert json.loads(path.read_text()) == ["new"] * 2000


def test_a_task_that_changes_the_working_folder_moves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    made = RunFolder.create(Path("runs"), "demo")
    write_json(made.config, {})
    found = [RunFolder.open(Path("runs/demo-001")), RunFolder.newest(Path("runs"), "demo")]
    monkeypatch.chdir(elsewhere)
    for folder in (made, *found):
        assert folder.checkpoints == tmp_path / "runs" / "demo-001" / "checkpoints"
        assert folder.shown == Path("runs/demo-001")


def test_a_run_that_has_lost_its_config_keeps_its_steps(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, "demo")
    folder.metrics.write_text('{"step": 1}\n')
    folder.config.unlink()
    with pytest.raises(RuntimeError), recording_failure(folder):
        raise RuntimeError
    assert folder.metrics.exists()


def test_what_ends_the_steps_of_a_run_is_written_before_anything_is_closed(tmp_path: Path) -> None:
    """A launcher may end the process while it closes what it has."""
    folder = RunFolder.create(tmp_path, "run")
    folder.config.write_text("{}")
    seen: list[str] = []

    @contextmanager
    def closing() -> Iterator[None]:
        try:
            yield
        finally:
            found = read_failure(folder)
            seen.append(found.message if found else "nothing")

    with pytest.raises(RuntimeError), recording_failure(folder), closing(), recording_at_once(folder):
        raise RuntimeError("no more")
    assert seen == ["no more"]
