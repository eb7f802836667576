"""What guesses would have saved a run: attempts of its store are replayed, and what does not pay is not proposed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fakes import trajectory
from support.run_folders import append, write_run

from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.lab.doctor import guesses
from redline.lab.doctor.doctor import diagnose, facts_of
from redline.lab.doctor.facts import Facts
from redline.lab.doctor.finding import Abstention, Finding
from redline.lab.doctor.rules.speculation import speculation_off
from redline.runs import Run
from redline.types import TrajectoryGroup

STEPS, GROUPS, SIZE, LENGTH, PROMPT = 10, 2, 4, 64, 60
SLOW_S, ROW_S = 0.02, 1e-4
"""Of a step of the engine, and of each of its rows."""

Text = Callable[[int, int, int], list[int]]
"""Step, group and attempt → the tokens that it sampled."""


def song(step: int, group: int, attempt: int) -> list[int]:
    return [20 + place % 10 for place in range(LENGTH - attempt)]


def noise(step: int, group: int, attempt: int) -> list[int]:
    return np.random.default_rng((step, group, attempt)).integers(0, 40_000, LENGTH - attempt).tolist()


def learnt(step: int, group: int, attempt: int) -> list[int]:
    """Noise, but the same in every step."""
    return noise(0, group, attempt)


def run_of(path: Path, text: Text, *, stored: bool = True, new_tasks: bool = True, training_s: float = 0.2, **keys: Any) -> Run:
    """A run in lockstep whose steps of the engine take as long as its rows say."""
    folder = write_run(path, 1, max_lag=0)
    config = json.loads(folder.config.read_text())
    config["rollouts"] |= {"groups_per_step": GROUPS, "group_size": SIZE}
    config["engine"] |= keys
    folder.config.write_text(json.dumps(config))
    folder.metrics.write_text("")
    append(folder.metrics, (row(step, training_s) for step in range(1, STEPS + 1)))
    if stored:
        store_attempts(folder.trajectories, text, new_tasks=new_tasks)
    return Run.open(folder.path)


def row(step: int, training_s: float) -> dict[str, Any]:
    steps, tokens = LENGTH - 1, SIZE * GROUPS * (LENGTH - 1) - 12
    prefill = SLOW_S + PROMPT * GROUPS * ROW_S
    generation = prefill + (steps * SLOW_S + tokens * ROW_S) * (1 + 0.01 * (step % 3))
    return {
        "step": step,
        "run/step_s": generation + training_s,
        "timeline/generation_s": generation,
        "timeline/training_s": training_s,
        "engine/steps": steps,
        "engine/generated_tokens": tokens,
        "engine/batch_size_mean": tokens / steps,
        "engine/prompt_tokens": PROMPT * GROUPS,
        "engine/prefill_s": prefill,
        "trainer/tokens": tokens,
    }


def store_attempts(folder: Path, text: Text, *, new_tasks: bool, is_trained: bool = True) -> None:
    store = TrajectoryStore(folder)
    for step in range(1, STEPS + 1):
        indices = range(step * GROUPS, (step + 1) * GROUPS)
        store.begin(indices, step - 1)
        for index in indices:
            group = index % GROUPS
            attempts = [trajectory(range(100, 100 + PROMPT), text(step, group, n), version=step - 1) for n in range(SIZE)]
            task = f"task/{index if new_tasks else group}"
            store.add(TrajectoryGroup(task, attempts, np.zeros(SIZE, np.float32), index))
        if is_trained:
            store.lease(indices, step - 1)
            store.trained(indices, step - 1)
        else:
            store.drop(indices, "no_signal")
    store.close()


def with_lag(run: Run, lag: int, **waits: float) -> Run:
    """The same run, with rollouts beside a trainer that waits for them."""
    rows = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    for each in rows if lag else ():
        generation = each.pop("timeline/generation_s")
        each |= {"timeline_rollouts/generation_s": generation, "timeline/wait_for_rollouts_s": generation, **waits}
    run.folder.metrics.write_text("")
    append(run.folder.metrics, rows)
    return configured(run, "buffer", max_lag=lag)


def configured(run: Run, section: str, **keys: Any) -> Run:
    config = json.loads(run.folder.config.read_text())
    config[section] |= keys
    run.folder.config.write_text(json.dumps(config))
    return Run.open(run.folder.path)


def found_in(run: Run) -> Finding | Abstention | None:
    return speculation_off(facts_of(run))


def test_texts_that_repeat_are_a_finding_with_the_key_to_set(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", song)
    diagnosis = diagnose(run)
    [found] = [finding for finding in diagnosis.findings if finding.cause == "speculation_off"]
    assert found.change == {"engine.speculation": "auto"}
    assert found.proof("run") == "redline compare run run --b engine.speculation=auto"
    decoding = Facts.of(run).total("timeline/generation_s")
    assert 0.4 * decoding < found.gain.low_s <= found.gain.likely_s <= found.gain.high_s < 0.95 * decoding
    figures = {evidence.name: evidence.value for evidence in found.evidence if isinstance(evidence.value, float)}
    assert figures["guesses"] > 0.8
    assert figures["tokens a step"] > 2
    assert figures["plain step"] == pytest.approx(SLOW_S + 8 * ROW_S, rel=0.05)


def test_groups_that_nothing_was_trained_on_are_replayed_too(tmp_path: Path) -> None:
    """A policy that has learnt its tasks says the same again and again, and its groups have no signal."""
    run = run_of(tmp_path / "run", song, stored=False)
    store_attempts(run.folder.trajectories, song, new_tasks=True, is_trained=False)
    assert isinstance(found_in(run), Finding)


def test_the_same_run_gets_the_same_answer(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", song)
    assert facts_of(run).guesses == facts_of(run).guesses


def test_texts_that_do_not_repeat_are_none_unless_the_task_comes_again(tmp_path: Path) -> None:
    assert found_in(run_of(tmp_path / "noise", noise)) is None
    assert found_in(run_of(tmp_path / "learnt", learnt)) is None
    assert isinstance(found_in(run_of(tmp_path / "again", learnt, new_tasks=False)), Finding)


@pytest.mark.parametrize("keys", [{"speculation": "auto"}, {"kind": "vllm"}, {"tensor_parallel_size": 2}])
def test_nothing_is_said_of_an_engine_that_guesses_already_or_cannot(tmp_path: Path, keys: dict[str, Any]) -> None:
    run = run_of(tmp_path / "run", song, **keys)
    assert facts_of(run).guesses is None
    assert found_in(run) is None


def test_nothing_is_said_where_rollouts_are_a_small_part_of_a_step(tmp_path: Path) -> None:
    assert facts_of(run_of(tmp_path / "run", song, training_s=40.0)).guesses is None


def test_nothing_is_said_where_the_trainer_bounds_a_run_with_a_lag(tmp_path: Path) -> None:
    run = with_lag(run_of(tmp_path / "run", song), 1, **{"timeline_rollouts/wait_for_budget_s": 3.0})
    assert facts_of(run).guesses is None


def test_with_a_lag_attempts_take_the_rows_of_those_that_end(tmp_path: Path) -> None:
    found = found_in(with_lag(run_of(tmp_path / "run", song), 1))
    assert isinstance(found, Finding)
    assert found.gain.of == "waits for rollouts"


def test_attempts_that_are_too_few_or_not_stored_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unstored = found_in(run_of(tmp_path / "unstored", song, stored=False))
    assert isinstance(unstored, Abstention)
    assert "buffer.max_bytes" in unstored.why
    run = run_of(tmp_path / "few", song)
    monkeypatch.setattr(guesses, "FEWEST_ATTEMPTS", 1000)
    few = found_in(run)
    assert isinstance(few, Abstention)
    assert "24 stored attempts are too few" in few.why


def test_a_damaged_store_is_said_and_leaves_the_other_findings(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", song)
    for segment in run.folder.trajectories.glob("segment-*.arrow"):
        segment.write_bytes(segment.read_bytes()[:-4000])
    damaged = [each for each in diagnose(run).abstentions if each.cause == "speculation_off"]
    assert "redline repair" in damaged[0].why


def test_of_a_gpu_only_the_reach_of_guesses_is_said(tmp_path: Path) -> None:
    """Its recording has launches of several steps, and no single one."""
    repeats, differs = (
        found_in(configured(run_of(tmp_path / text.__name__, text), "run", device="cuda")) for text in (song, noise)
    )
    assert isinstance(repeats, Abstention)
    assert "tokens a step" in repeats.why
    assert differs is None


def test_of_long_attempts_a_part_is_replayed_that_stands_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path / "run", song)
    whole = facts_of(run).guesses
    assert whole is not None
    assert whole.num_attempts == GROUPS * SIZE * guesses.STEPS
    for most in (300, 100):  # one group of two, and the first half of each of its attempts
        monkeypatch.setattr(guesses, "MOST_TOKENS", most)
        part = facts_of(run).guesses
        assert part is not None
        assert part.num_attempts == SIZE * guesses.STEPS
        assert all(pair.plain.tokens <= most for pair in part.likely)
        assert 0.2 < part.likely[0].saved < whole.likely[0].saved + 0.05  # in their first tokens songs repeat less


@pytest.mark.parametrize("lag", [0, 1])
def test_attempts_of_one_token_have_nothing_to_guess(tmp_path: Path, lag: int) -> None:
    run = with_lag(run_of(tmp_path / "run", lambda step, group, attempt: [7]), lag)
    assert not isinstance(found_in(run), Finding)


def test_of_a_group_that_is_too_large_some_attempts_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "MOST_ATTEMPTS", 3)
    monkeypatch.setattr(guesses, "FEWEST_ATTEMPTS", 1)
    found = facts_of(run_of(tmp_path / "run", song)).guesses
    assert found is not None
    assert found.num_attempts == 3 * guesses.STEPS
    assert all(pair.plain.tokens == sum(LENGTH - n - 1 for n in range(3)) for pair in found.likely)


def test_guesses_that_hardly_pay_are_not_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose steps cost next to nothing beside what the host takes for guesses."""
    monkeypatch.setitem(globals(), "SLOW_S", 0.0005)
    monkeypatch.setitem(globals(), "ROW_S", 1e-5)
    run = run_of(tmp_path / "run", song, training_s=0.01)
    found = facts_of(run).guesses
    assert found is not None
    assert found_in(run) is None
