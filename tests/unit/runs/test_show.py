from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.stored_groups import attempts, numbered
from typer.testing import CliRunner

from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.cli import app
from redline.errors import RunFolderError
from redline.runs.show import Wanted, show
from redline.runs.stored import StoredRun
from redline.types import TrajectoryGroup


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three groups trained at step 5, by version 4, one with a failure ready, one dropped, one in flight."""
    (tmp_path / "config.json").write_text("{}")
    store = TrajectoryStore(tmp_path / "trajectories")
    store.begin(range(6), 4)
    for number in range(3):
        store.add(numbered(number, version=4))
    store.add(TrajectoryGroup("sums/1", attempts(), np.array([0.5, -0.5, 0], dtype=np.float32), 3))
    store.lease(range(3), 4)
    store.trained(range(3), 4)
    store.add(numbered(4, [0.0, 0.0], version=3))
    store.drop([4], "stale")
    store.close()
    return tmp_path


def shown(run: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["show", str(run), *options], env={"COLUMNS": "140"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def document(run: Path, *options: str) -> dict:
    return json.loads(shown(run, *options, "--json"))


def test_a_run_is_listed_group_by_group(run: Path) -> None:
    lines = [line.split() for line in shown(run).splitlines() if line.strip()[:1].isdigit()]
    assert lines == [
        ["0", "trained", "v4", "5", "2", "9", "0.000", "yes"],
        ["1", "trained", "v4", "5", "2", "9", "0.000", "yes"],
        ["2", "trained", "v4", "5", "2", "9", "0.000", "yes"],
        ["3", "ready", "v5–v6", "3", "13", "0.625", "yes"],
        ["4", "dropped:", "stale", "v3", "2", "9", "0.000", "no"],
        ["5", "in_flight", "from", "4"],
    ]


def test_the_last_groups_are_shown_unless_more_are_wanted(run: Path) -> None:
    assert [group["index"] for group in document(run, "--limit", "2")["groups"]] == [4, 5]
    assert len(document(run, "--limit", "0")["groups"]) == 6


def test_a_group_is_printed_with_its_attempts(run: Path) -> None:
    text = shown(run, "--group", "3")
    for expected in (
        "group 3, attempt 0",
        "1.25  (correct 1  format 0.5)",
        "advantage 0.5",
        "ünïcode 🙂",
        "v5–v6  not trained on yet",
        "2–3 by v5–v6  4–5 by v5–v6",
        "reward: ValueError: no number",
        "1 2 3 4 5",
        "ended by length",
        "(no text)",
    ):
        assert expected in text


def test_a_machine_gets_every_token(run: Path) -> None:
    (group,) = document(run, "--group", "3")["groups"]
    assert (group["state"], group["newest_version"], group["num_attempts"]) == ("ready", 6, 3)
    first, _, failed = group["attempts"]
    assert first["token_ids"] == [1, 2, 3, 4, 5]
    assert first["loss_mask"] == [0, 0, 1, 1, 1]
    assert first["reward_parts"] == {"correct": 1.0, "format": 0.5}
    assert (first["task_id"], first["version"]) == ("sums/1", -1)
    assert failed["failure"] == "reward: ValueError: no number"


def test_a_step_is_the_groups_it_was_trained_on(run: Path) -> None:
    groups = document(run, "--step", "5")["groups"]
    assert [group["index"] for group in groups] == [0, 1, 2]
    assert all(attempt["version"] == 4 for group in groups for attempt in group["attempts"])
    assert {group["step"] for group in groups} == {5}
    assert "ready" not in shown(run, "--step", "5")


def test_failures_are_found_among_all_attempts(run: Path) -> None:
    (group,) = document(run, "--failures")["groups"]
    assert (group["index"], [attempt["attempt"] for attempt in group["attempts"]]) == (3, [2])
    text = shown(run, "--failures")
    assert "ValueError" in text
    assert "ünïcode" not in text


def test_what_a_model_wrote_is_neither_markup_nor_a_terminal_code(run: Path) -> None:
    store = TrajectoryStore(run / "trajectories")
    store.add(numbered(6, text="[bold]not bold[/bold]\x1b[31m\nsecond line [/"))
    text = shown(run, "--group", "6")
    assert "[bold]not bold[/bold]" in text
    assert "\x1b" not in text
    assert "second line [/" in text


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(run: Path) -> None:
    store = TrajectoryStore(run / "trajectories")
    store.add(numbered(6, version=5))
    store.add(numbered(7, version=5))
    (group,) = document(run, "--group", "6")["groups"]
    assert [attempt["token_ids"][3] for attempt in group["attempts"]] == [106, 106]
    store.close()


def test_a_segment_that_is_closed_while_somebody_reads_is_found_under_its_new_name(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "trajectories", segment_bytes=1)
    for number in range(4):
        store.add(numbered(number))
    stored = StoredRun(tmp_path)
    reading = stored.attempts(stored.groups())
    before = {path.name for path in (tmp_path / "trajectories").glob("*.arrow")}
    first = next(reading)
    store.close()
    assert {path.name for path in (tmp_path / "trajectories").glob("*.arrow")} != before
    assert [len(attempts or ()) for _, attempts in [first, *reading]] == [2] * 4


def test_a_group_that_was_deleted_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"buffer": {"max_bytes": 1000, "max_age_steps": null}}')
    store = TrajectoryStore(tmp_path / "trajectories", max_bytes=1)
    store.add(numbered(0))
    store.lease([0], 0)
    store.close()
    told: list[str] = []
    store = TrajectoryStore(tmp_path / "trajectories", max_bytes=1, tell=told.append)
    store.trained([0], 0)
    assert "its attempts were let go, as buffer.max_bytes = 1,000 asks for" in shown(tmp_path, "--group", "0")
    assert "the attempts of 1 older ones were let go, as buffer.max_bytes = 1,000 asks for" in shown(tmp_path)
    found = document(tmp_path, "--group", "0")
    assert found["groups"][0]["attempts"] is None
    assert found["let_go"] == {"groups": 1, "why": "as buffer.max_bytes = 1,000 asks for"}
    assert told == ["the oldest trajectories are deleted from now on, as buffer.max_bytes = 1 asks for; null keeps all"]


def test_looking_changes_nothing(run: Path) -> None:
    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (run / "trajectories").glob("*.*[ew]")}  # not SQLite's own

    before = contents()
    shown(run)
    shown(run, "--group", "3")
    assert contents() == before


@pytest.mark.parametrize(("step", "number", "message"), [(9, None, "nothing was trained at step 9"), (None, 77, "no group 77")])
def test_what_is_not_there_is_said(run: Path, step: int | None, number: int | None, message: str) -> None:
    with pytest.raises(RunFolderError, match=message):
        show(run, Wanted(step, number), Console(quiet=True))


def test_a_run_without_trajectories_is_told_apart_from_a_damaged_one(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty = tmp_path_factory.mktemp("run")
    (empty / "trajectories").mkdir()
    with pytest.raises(RunFolderError) as caught:
        show(empty, Wanted(limit=0), Console(quiet=True))
    assert "buffer.max_bytes: 0" in caught.value.hint
    (run / "trajectories" / "index.sqlite").write_bytes(b"gone")
    with pytest.raises(RunFolderError) as caught:
        show(run, Wanted(limit=0), Console(quiet=True))
    assert "redline repair" in caught.value.hint


def test_repairing_from_the_command_line(run: Path) -> None:
    (run / "trajectories" / "index.sqlite").write_bytes(b"gone" * 100)
    result = CliRunner().invoke(app, ["repair", str(run), "--json"], catch_exceptions=False)
    report = json.loads(result.stdout)
    assert (report["num_intact"], report["index_rebuilt"]) == (5, True)
    assert "the index was made again" in result.stderr
    again = CliRunner().invoke(app, ["repair", str(run)], catch_exceptions=False)
    assert "nothing to repair: 5 groups" in again.stderr


def shown_attempts(run: Path) -> list[list[Any]]:
    keys = ("text", "token_ids", "logprobs", "reward")
    groups = document(run, "--step", "5")["groups"]
    return [[attempt[key] for key in keys] for group in groups for attempt in group["attempts"]]


def test_damaged_attempts_are_not_shown_and_end_no_process(run: Path) -> None:
    """Wherever in the file the damage is: an offset leads anywhere then."""
    [segment] = (run / "trajectories").glob("segment-*.arrow")
    whole, expected = segment.read_bytes(), shown_attempts(run)
    refused = 0
    for start in range(0, len(whole), 160):
        segment.write_bytes(whole[:start] + b"\x7f" * 8 + whole[start + 8 :])
        try:
            assert shown_attempts(run) == expected
        except RunFolderError:
            refused += 1
    assert refused > 0


def test_a_run_without_the_folder_of_its_trajectories_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for options in ([], ["--json"], ["--step", "1"]):
        with pytest.raises(RunFolderError, match="no trajectories to show"):
            shown(tmp_path, *options)
