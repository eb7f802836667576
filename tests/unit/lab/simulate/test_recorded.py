"""What a simulation reads of a run: steps that say how long they took, and attempts of the newest steady ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fakes import trajectory
from support.run_folders import append, write_run

from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.errors import RunFolderError
from redline.lab.simulate import recorded
from redline.lab.simulate.costs import EngineCost, Range
from redline.lab.simulate.events import Loop, Simulator
from redline.lab.simulate.recorded import Group, Recording
from redline.runs import Run
from redline.types import TrajectoryGroup


def run_of(path: Path, step_s: list[Any], prompt_tokens: int = 3, group_size: int = 2) -> Run:
    """A run with one group of two attempts a step, which sampled as many tokens as the step's number and twice that; or of one
    attempt, the first."""
    folder = write_run(path, 1, max_lag=0)
    folder.metrics.write_text("")
    append(folder.metrics, ({**_row(step, s), "engine/prompt_tokens": prompt_tokens} for step, s in enumerate(step_s, 1)))
    store = TrajectoryStore(folder.trajectories)
    for step in range(1, len(step_s) + 1):
        attempts = [trajectory([1, 2, 3], [4] * tokens, version=step - 1) for tokens in (step, 2 * step)][:group_size]
        store.begin([step], step - 1)
        store.add(TrajectoryGroup("task", attempts, np.zeros(group_size, np.float32), step))
        store.lease([step], step - 1)
        store.trained([step], step - 1)
    store.close()
    return Run.open(folder.path)


def _row(step: int, seconds: Any) -> dict[str, Any]:
    tokens = {"engine/generated_tokens": 3 * step, "engine/prompt_tokens": 3, "trainer/tokens": 3 * step}
    phases = {"timeline/generation_s": 0.5, "timeline/training_s": 0.3}
    return {"step": step, "run/step_s": seconds, "engine/steps": 2 * step, **phases, **tokens}


def test_groups_are_those_of_the_newest_steady_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path / "run", [1.0] * 10)
    assert [group.tokens for group in Recording.of(run).groups] == [(step, 2 * step) for step in range(3, 11)]
    monkeypatch.setattr(recorded, "MOST_STORED", 3)
    assert [group.tokens for group in Recording.of(run).groups] == [(9, 18), (10, 20)]


def test_a_step_that_does_not_say_how_long_it_took_is_none_of_no_length(tmp_path: Path) -> None:
    found = Recording.of(run_of(tmp_path / "run", [1.0] * 6 + [None] + [1.0] * 4))
    assert found.step_s.tolist() == [1.0] * 8
    with pytest.raises(RunFolderError, match="how long they took"):
        Recording.of(run_of(tmp_path / "zero", [0.0] * 10))


def test_what_a_step_waits_for_environments_beyond_what_they_took_is_the_host_s_for_each_attempt() -> None:
    """The reply that ends last (1.0 s) plays for 0.1 s, an earlier one (0.9 s) for 0.3 s: 0.2 s after the last token."""
    waited = np.array([0.26, 0.3, 0.0])
    facts: Any = SimpleNamespace(
        is_lockstep=True,
        num_steps=3,
        steps={"step": np.array([3.0, 4.0, 5.0])},
        setting=lambda key, default: {"rollouts.groups_per_step": 1, "rollouts.group_size": 2}.get(key, default),
        phase=lambda name: waited,
    )
    turns = ({"decode_s": 1.0, "environment_s": 0.1}, {"decode_s": 0.9, "environment_s": 0.2})
    rows = [
        {"step": step, "score_s": score_s, "turns": [{"start": 4, "end": 9, "queue_s": 0.0, **turn}]}
        for step in (3, 4, 5)
        for turn, score_s in zip(turns, (0.0, 0.1), strict=True)
    ]
    assert recorded._begin_s(rows, facts) == pytest.approx((0.06 + 0.1) / 2 / 2)
    assert recorded._begin_s(rows[1:2], facts) == 0.0, "a step that the store does not have whole tells nothing"
    waited[:] = 0.1
    assert recorded._begin_s(rows, facts) == 0.0, "never negative"
    facts.is_lockstep = False
    assert recorded._begin_s(rows, facts) == 0.0


@pytest.mark.parametrize(("computed", "first", "again"), [(3, 3, 0.0), (2, 2, 0.0), (9, 3, 6.0)])
def test_all_tokens_of_prompts_that_were_computed_are_of_some_attempt(
    tmp_path: Path, computed: int, first: int, again: float
) -> None:
    """Prompts of 3 tokens, groups of 2: what goes beyond a prompt for each group is of further attempts, or turns."""
    run = run_of(tmp_path / "run", [1.0] * 10, computed)
    config = json.loads(run.folder.config.read_text())
    run.folder.config.write_text(json.dumps({**config, "rollouts": {**config["rollouts"], "groups_per_step": 1}}))
    assert {(group.prompt_tokens, group.again_tokens) for group in Recording.of(run).groups} == {(first, again)}


def test_a_group_of_one_computes_all_that_was_computed_of_its_prompts(tmp_path: Path) -> None:
    """Turns that begin anew each time: nobody else could have computed these tokens."""
    run = run_of(tmp_path / "run", [1.0] * 10, 9, group_size=1)
    config = json.loads(run.folder.config.read_text())
    alone = {**config["rollouts"], "groups_per_step": 1, "group_size": 1}
    run.folder.config.write_text(json.dumps({**config, "rollouts": alone}))
    assert {(group.prompt_tokens, group.again_tokens) for group in Recording.of(run).groups} == {(9, 0.0)}


@pytest.mark.parametrize(("tokens", "rows", "fills"), [([5] * 8, 8, 1), ([5] * 8, 4, 2), ([1, 2, 3, 4, 9, 9], 2, 5)])
def test_rows_are_filled_as_often_as_in_the_simulation(tokens: list[int], rows: int, fills: int) -> None:
    assert recorded._fills(tokens, rows) == fills
    cost = EngineCost(0.0, 0.0, 1.0, 0.0, Range(1.0, 8.0), 0.0)
    group = Group(tuple(tokens), (0.0,) * len(tokens), 0)
    [step_s] = Simulator(Loop((group,), replace(cost, step_s=1e-9), 1, rows, 1, 0, 0.0, 0.0, 0.0, 1)).run().step_s
    assert step_s == pytest.approx(fills), "a second for each pass, and none for anything else"
