"""Recorded attempts that are drawn again: with guesses and without, token by token what was recorded."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.fakes import trajectory

from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.errors import ConfigError, RunFolderError
from redline.lab.bench.cases import generate
from redline.lab.bench.settings import make_settings
from redline.lab.material.attempts import Attempts, read_attempts, save_attempts
from redline.telemetry import RunFolder
from redline.types import TrajectoryGroup

COMMON = ["model=builtin:tiny", "device=cpu", "dtype=float32", "num_threads=1", "prompt_tokens=6", "pairs=1"]


def write_run(path: Path, num_visits: int) -> Path:
    """Two tasks, each attempted twice in every visit; attempts at one task differ in a token here and there."""
    path.mkdir()
    store = TrajectoryStore(RunFolder(path).trajectories)
    for index in range(2 * num_visits):
        task, visit = index % 2, index // 2
        texts = [[20 + task, *range(5, 17), 30 + visit + attempt, *range(5, 12)] for attempt in range(2)]
        attempts = [trajectory([5, 6, 7], text, version=visit) for text in texts]
        store.begin([index], visit)
        store.add(TrajectoryGroup(f"letters/{task}", attempts, np.zeros(2, np.float32), index))
        store.lease([index], visit)
        store.trained([index], visit)
    store.close()
    return path


def test_attempts_of_a_run_are_read_by_task_and_visit_and_come_back_from_a_file(tmp_path: Path) -> None:
    attempts = read_attempts(write_run(tmp_path / "run", 3))
    assert (len(attempts.visits), attempts.num_visits, attempts.group_size) == (2, 3, 2)
    assert attempts.visits[1][2][1].tolist() == [21, *range(5, 17), 33, *range(5, 12)], "what the policy said, no prompt"
    save_attempts(attempts, tmp_path / "attempts.npz")
    again = read_attempts(tmp_path / "attempts.npz")
    flat = [[tokens.tolist() for visits in each.visits for visit in visits for tokens in visit] for each in (attempts, again)]
    assert flat[0] == flat[1]


def test_tasks_that_came_once_repeat_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no task was attempted twice"):
        read_attempts(write_run(tmp_path / "run", 1))


def test_siblings_go_through_the_same_tasks_each_with_its_own_attempts() -> None:
    attempts = Attempts(
        [[[np.full(3, 100 * task + 10 * visit + a) for a in range(2)] for visit in range(2)] for task in range(3)]
    )
    one, other = (attempts.text(group=4, visit=1, sibling=sibling, length=8).tolist() for sibling in range(2))
    assert [a + 1 for a in one] == other
    assert len({token // 100 for token in one}) == 3
    assert all(token // 10 % 10 == 1 for token in one)
    assert attempts.text(4, 1, 0, 11).tolist() == [*one, one[-1], other[0], other[1]], "where tasks run out, siblings follow"


def test_recorded_texts_are_drawn_with_guesses_and_without(tmp_path: Path) -> None:
    run, console = write_run(tmp_path / "run", 2), Console(file=io.StringIO(), width=200)
    settings = make_settings("generate", [*COMMON, f"replay={run}", "prompts=4", "new_tokens=30"])
    repeated, random = generate.measure(settings, console).results
    assert (repeated.name, random.name) == ("throughput, recorded texts", "throughput, texts that do not repeat")
    assert repeated.peer is not None
    assert repeated.peer.name == "speculation off"
    assert repeated.samples[0]["auto"].keys() >= {"tokens_per_s", "drafted_tokens", "accepted_tokens"}
    assert repeated.samples[0]["off"]["drafted_tokens"] == 0
    assert "however many guesses are right" in repeated.bound.why
    assert repeated.bound.value > random.bound.value, "of random tokens a step brings one"
    assert "120 tokens as given" in console.file.getvalue()


def test_texts_of_a_larger_vocabulary_are_refused(tmp_path: Path) -> None:
    save_attempts(Attempts([[[np.array([5, 60_000])]] * 2]), tmp_path / "attempts.npz")
    settings = make_settings("generate", [*COMMON, f"replay={tmp_path / 'attempts.npz'}", "prompts=2", "new_tokens=2"])
    with pytest.raises(ConfigError, match="vocabulary of 60,001 or more"):
        generate.measure(settings, Console(file=io.StringIO()))


@pytest.mark.parametrize("more", ["n=2", "peers=transformers", "engine.speculation=auto"])
def test_what_a_replay_cannot_do_is_refused(more: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="replay"):
        make_settings("generate", [*COMMON, f"replay={tmp_path}", more])
