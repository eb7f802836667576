"""Killed at any point and resumed: no group is lost, none is trained on twice, and in lockstep all ends as if never killed."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support.crashing_runs import (
    Point,
    calls,
    deeds,
    forked,
    is_begun,
    newest_run,
    output,
    resume_to_end,
    run_to_end,
)
from support.processes import TIMEOUT_S, digest, rows, write_letters
from support.stored_groups import without_seconds

from redline.buffer.store.group_store import GroupState
from redline.buffer.store.index import GroupIndex, GroupRow
from redline.telemetry import RunFolder

STEPS = 8
GROUPS = 2
ATTEMPTS = 4
MAX_LAG = 2
SECTIONS = {"buffer": 5, "loop": 3, "trainer": 2, "telemetry": 2, "rollouts": 2, "engine": 1, "weight_sync": 1}
"""Where kills come from within, and how often: most where files are written."""
TWICE = 0.3
"""Of the kills are followed by another, in the run that was to make up for the first."""


def prepare(cwd: Path, max_lag: int) -> None:
    write_letters(
        cwd,
        run={"steps": STEPS, "checkpoint_every": 3, "keep_checkpoints": 1},
        rollouts={
            "groups_per_step": GROUPS,
            "group_size": ATTEMPTS,
            "max_new_tokens": 8,
            "evaluation": {"num_tasks": 2, "every": 4},
        },
        trainer={"schedule": {"warmup_steps": 4}, "weight_decay": 0.01},
        buffer={"max_lag": max_lag},
    )


# ── kills ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class Straight:
    """A run that nobody killed."""

    cwd: Path
    seconds: float
    calls: Counter[str]

    @property
    def folder(self) -> RunFolder:
        return newest_run(self.cwd)

    def point(self, chance: random.Random) -> Point:
        [section] = chance.choices(list(SECTIONS), list(SECTIONS.values()))
        return Point(section, chance.randint(1, self.calls[section]))


def run_straight(cwd: Path, max_lag: int) -> Straight:
    prepare(cwd, max_lag)
    started = time.monotonic()
    assert run_to_end(cwd, "train", "letters.yaml") == 0, output(cwd)
    return Straight(cwd, time.monotonic() - started, calls(cwd))


@pytest.fixture(scope="module")
def lockstep(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    return run_straight(tmp_path_factory.mktemp("lockstep"), 0)


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    return run_straight(tmp_path_factory.mktemp("beside"), MAX_LAG)


def kill_once(cwd: Path, straight: Straight, chance: random.Random, *, is_timed: bool) -> bool:
    """Start, or continue; False where the run came to its end before the kill."""
    if not is_timed:
        code = resume_to_end(cwd, straight.point(chance))
    else:
        with forked(cwd, "train", "letters.yaml", *(["--resume"] if is_begun(cwd) else [])) as process:
            process.join(chance.uniform(0, straight.seconds))
            process.kill()
            process.join(TIMEOUT_S)
            code = process.exitcode
    assert code in (0, -9), output(cwd)
    return code == -9


def kills(cwd: Path, straight: Straight, chance: random.Random, *, is_timed: bool) -> Iterator[None]:
    """One kill, or two; yields while the run lies there."""
    for _ in range(1 + (chance.random() < TWICE)):
        if not kill_once(cwd, straight, chance, is_timed=is_timed):
            return
        yield


# ── what is left ───────────────────────────────────────────────────────────────────────────────────────────────────────


def index_of(folder: RunFolder, scratch: Path) -> list[GroupRow]:
    """From a copy: to open an index means to tidy it up."""
    shutil.copytree(folder.trajectories, scratch)
    index = GroupIndex(scratch)
    found = list(index.rows())
    index.close()
    shutil.rmtree(scratch)
    return found


def trained_attempts(folder: RunFolder) -> list[dict[str, Any]]:
    """Every attempt in the segments that a step was trained on, by number, without the seconds it took."""
    paths = sorted(folder.trajectories.glob("segment-*.arrow"))
    table = pa.concat_tables(pa.ipc.open_file(path).read_all() for path in paths)
    table = table.filter(pc.field("version") >= 0)
    return list(map(without_seconds, table.sort_by([("group", "ascending"), ("attempt", "ascending")]).to_pylist()))


def trained_versions(folder: RunFolder) -> dict[int, list[int]]:
    """Number → the step that each of its attempts was trained on in, as the segments have it."""
    found: dict[int, list[int]] = {}
    for attempt in trained_attempts(folder):
        found.setdefault(attempt["group"], []).append(attempt["version"])
    return found


def lineage(cwd: Path) -> dict[int, tuple[int, ...]]:
    """Version → the batch that the weights at the end have learnt from: whoever took a step last took it for good."""
    final: dict[int, tuple[int, ...]] = {}
    for process in deeds(cwd):
        final |= process.trained
    return final


def assert_whole(cwd: Path) -> None:
    """Index, segments and trainer tell the same story, in which every group has one place."""
    folder, found = newest_run(cwd), index_of(newest_run(cwd), cwd / "scratch")
    assert [row.index for row in found] == list(range(len(found)))
    assert not [row.index for row in found if row.state is GroupState.LEASED]
    assert not [row.index for row in found if (row.state is GroupState.DROPPED) != (row.reason is not None)]
    trained = {row.index: row.trained_version for row in found if row.state is GroupState.TRAINED}
    assert trained_versions(folder) == {number: [version] * ATTEMPTS for number, version in trained.items()}
    learnt = lineage(cwd)
    assert {version: len(numbers) for version, numbers in learnt.items()} == dict.fromkeys(range(STEPS), GROUPS)
    assert trained == {number: version for version, numbers in learnt.items() for number in numbers}
    assert [row["step"] for row in rows(folder.metrics)] == list(range(1, STEPS + 1))
    assert sum(row["rollouts/groups"] for row in rows(folder.metrics)) == sum(row.is_stored for row in found), "all are counted"
    assert [row["step"] for row in rows(folder.evaluations)] == [0, 4, STEPS]
    starts = sorted({event["pid"] for event in json.loads(folder.trace.read_text())})
    assert starts == list(range(1, len(starts) + 1)), "one process for each start that came as far"
    assert len(starts) >= len([process for process in deeds(cwd) if process.trained])


def assert_same(cwd: Path, straight: Straight) -> None:
    """Bit for bit."""
    folder = newest_run(cwd)
    for file in (f"checkpoints/step-{STEPS:06d}/trainer.safetensors", "model/model.safetensors"):
        assert digest(folder.path / file) == digest(straight.folder.path / file), file
    assert lineage(cwd) == lineage(straight.cwd)
    assert trained_attempts(folder) == trained_attempts(straight.folder)
    for found, expected in zip(rows(folder.metrics), rows(straight.folder.metrics), strict=True):
        kept = [key for key in expected if key.startswith("trainer/") and not key.endswith(("_s", "mfu"))]
        assert {key: found[key] for key in kept} == {key: expected[key] for key in kept}
        counted = [key for key in expected if key.startswith("rollouts/") and not key.endswith("_s")] + ["engine/new_tokens"]
        assert {key: found[key] for key in counted} == pytest.approx({key: expected[key] for key in counted}, nan_ok=True)


def still_there(cwd: Path, max_lag: int) -> set[int]:
    """Groups that a run which continues from here has no reason to attempt again."""
    if not is_begun(cwd):
        return set()
    folder = newest_run(cwd)
    checkpoint = max((int(path.name[5:]) for path in folder.checkpoints.glob("step-*")), default=0)
    found = index_of(folder, cwd / "scratch") if (folder.trajectories / "index.sqlite").exists() else []
    kept = {row.index for row in found if row.newest_version is not None and row.newest_version <= checkpoint}
    if max_lag == 0 and len(kept) % GROUPS:  # part of a batch is computed again as a whole
        kept -= set(range(checkpoint * GROUPS, (checkpoint + 1) * GROUPS))
    return kept


# ── lockstep ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def crash(cwd: Path, straight: Straight, max_lag: int, number: int) -> bool:
    """Kill, and let run to the end; True where a kill came in time. The number decides where it comes."""
    cwd.mkdir()
    prepare(cwd, max_lag)
    chance, is_timed = random.Random(number), number % 5 == 4
    left = [(len(deeds(cwd)), still_there(cwd, max_lag)) for _ in kills(cwd, straight, chance, is_timed=is_timed)]
    assert resume_to_end(cwd) == 0, output(cwd)
    for num_before, kept in left:
        for process in deeds(cwd)[num_before:]:
            assert not kept & set(process.attempted), "what was there was attempted again"
    assert_whole(cwd)
    return bool(left)


def crash_in_lockstep(cwd: Path, straight: Straight, number: int) -> bool:
    came = crash(cwd, straight, 0, number)
    assert_same(cwd, straight)
    return came


def crash_beside(cwd: Path, straight: Straight, number: int) -> bool:
    came = crash(cwd, straight, MAX_LAG, number)
    assert all(lag <= MAX_LAG for process in deeds(cwd) for lag in process.lags)
    assert all(row["buffer/policy_lag_steps"] <= MAX_LAG for row in rows(newest_run(cwd).metrics))
    return came


def killed(crash_one: Callable[[Path, Straight, int], bool], straight: Straight, cwd: Path, first: int, count: int) -> None:
    """So many runs that a kill came to in time, numbered from `first`; ten times as many may be tried. How many calls a thread
    makes that looks at the clock, and how long a run takes, is another matter every time."""
    came = 0
    for number in range(first, first + 10 * count):
        came += crash_one(cwd / str(number), straight, number)
        if came == count:
            return
    raise AssertionError(f"{came} of {10 * count} kills came in time")


def test_a_run_killed_anywhere_ends_as_if_it_had_not_been(lockstep: Straight, tmp_path: Path) -> None:
    assert_whole(lockstep.cwd)
    killed(crash_in_lockstep, lockstep, tmp_path, 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ten", range(5))
def test_fifty_kills_anywhere_and_every_run_ends_as_if_it_had_not_been(ten: int, lockstep: Straight, tmp_path: Path) -> None:
    killed(crash_in_lockstep, lockstep, tmp_path, 100 + 20 * ten, 10)


def test_a_run_beside_its_rollouts_killed_anywhere_loses_nothing(beside: Straight, tmp_path: Path) -> None:
    assert_whole(beside.cwd)
    killed(crash_beside, beside, tmp_path, 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ten", range(5))
def test_fifty_kills_of_runs_beside_their_rollouts_and_none_loses_anything(ten: int, beside: Straight, tmp_path: Path) -> None:
    killed(crash_beside, beside, tmp_path, 100 + 20 * ten, 10)
