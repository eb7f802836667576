"""What the page of a run opens with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import append, write_run

from redline.runs.reader import RunReader
from redline.telemetry import RunFolder

TASKS = 40


def evaluation(step: int, right: int) -> dict[str, Any]:
    scores = [1.0] * right + [0.0] * (TASKS - right)
    counts = {"evaluation/num_tasks": TASKS, "evaluation/num_answers": TASKS, "evaluation/failures": 0}
    return {"step": step, "evaluation/reward_mean": right / TASKS, "evaluation/task_scores": scores} | counts


def run_with(path: Path, *evaluations: dict[str, Any], stop_at: float | None = None) -> RunFolder:
    folder = write_run(path / "run-001", 20)
    folder.evaluations.unlink()
    append(folder.evaluations, evaluations)
    config = json.loads(folder.config.read_text())
    config["rollouts"]["evaluation"]["stop_at"] = stop_at
    folder.config.write_text(json.dumps(config))
    return folder


def learned(folder: RunFolder) -> dict[str, Any]:
    found = RunReader(folder.path).document()["head"]
    assert isinstance(found, dict)
    return found["learned"]


def test_a_rise_is_the_headline_with_its_interval_and_the_step_that_reached_the_target(tmp_path: Path) -> None:
    folder = run_with(tmp_path, evaluation(0, 4), evaluation(10, 32), evaluation(20, 36), stop_at=0.75)
    found = learned(folder)
    assert found["word"] == "rose"
    assert found["headline"].startswith("It learned: held-out reward rose from 0.100 to 0.900, by 0.800 (95% interval 0.6")
    assert found["target"] == {"reward": 0.75, "reached_at": 10}
    assert (found["held_out"]["before"]["step"], found["held_out"]["after"]["step"]) == (0, 20)
    assert "scores" not in json.dumps(found)


@pytest.mark.parametrize(
    ("rights", "opening"),
    [((20, 21), "It is not clear that it learned: "), ((30, 4), "It got worse: "), ((7,), "Not known yet: ")],
)
def test_the_headline_claims_no_more_than_the_evaluations_show(tmp_path: Path, rights: tuple[int, ...], opening: str) -> None:
    folder = run_with(tmp_path, *(evaluation(10 * index, right) for index, right in enumerate(rights)), stop_at=0.9)
    found = learned(folder)
    assert found["headline"].startswith(opening)
    assert found["target"] == {"reward": 0.9, "reached_at": None}


def test_without_held_out_tasks_the_sampled_reward_is_told_for_what_it_is(tmp_path: Path) -> None:
    found = learned(run_with(tmp_path))
    assert found["word"] == "not held out"
    assert found["headline"].startswith("Nothing was held out; the reward of sampled attempts went from 0.0")
    assert (found["held_out"], found["target"]) == (None, None)


def test_a_run_whose_weights_never_moved_learned_nothing_whatever_its_evaluations_say(tmp_path: Path) -> None:
    folder = run_with(tmp_path, evaluation(0, 4), evaluation(20, 36))
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    folder.metrics.unlink()
    append(folder.metrics, (row | {"trainer/learning_rate": 1e-5, "trainer/grad_norm": 0.0} for row in rows))
    assert learned(folder)["headline"] == "Nothing was learned: no step had a gradient."


def test_damaged_rows_are_passed_over(tmp_path: Path) -> None:
    broken = {"step": 5, "evaluation/reward_mean": 0.5, "evaluation/accuracy": "x", "evaluation/num_answers": [1]}
    folder = run_with(tmp_path, {"step": 1}, {"step": "x", "evaluation/reward_mean": 1.0}, broken)
    append(folder.metrics, [{"step": 21, "rollouts/groups": "eight", "trainer/learning_rate": None}])
    assert learned(folder)["headline"] == "Not known yet: held-out reward is 0.500 (an unknown number of answers at step 5)."


def test_the_headline_follows_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = run_with(tmp_path, evaluation(0, 4))
    reader = RunReader(folder.path)
    first = reader.document()
    append(folder.evaluations, [evaluation(20, 36)])
    second = reader.document(str(first["cursor"]))
    assert second["head"]["learned"]["word"] == "rose"  # type: ignore[index,call-overload]
