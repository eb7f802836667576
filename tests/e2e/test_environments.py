"""`redline train` with an environment of several turns, of the user's own, named by import path."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes import digest, num_rows, only_run, rows, started, succeed, wait_for_run, wait_until, without_times

import redline
from redline.errors import TaskError
from redline.models.files.tiny import tiny_tokenizer
from redline.telemetry import RunFolder

LETTERS = '''
from redline.types import Task


class Letters:
    """In every round the policy is asked for more; the reward is the share of e in all that it wrote."""

    def __init__(self, seed, rounds=2, until=None):
        self.rounds, self.until = rounds, until

    def is_said(self, reply):
        return len(reply.text) >= self.until

    def train(self, index):
        return Task(f"letters/{index}", [{"role": "user", "content": f"word {index % 7}"}])

    def held_out(self, count):
        return [Task(f"letters/held_out/{i}", [{"role": "user", "content": f"test {i}"}]) for i in range(count)]

    async def play(self, task, policy):
        messages, text = list(task.messages), ""
        for _ in range(self.rounds):
            turn = await policy.say(messages, until=self.is_said if self.until else None)
            messages += [turn.message, {"role": "user", "content": "more"}]
            text += turn.text
        return {"letter": text.count("e") / max(1, len(text))}
'''
STEPS = 4


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process leaves the user's folder on the path, and later tests fork it."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def write_recipe(folder: Path, **sections: dict[str, Any]) -> Path:
    (folder / "rounds_of_letters.py").write_text(LETTERS)
    recipe: dict[str, dict[str, Any]] = {
        "run": {"name": "letters", "num_threads": 1, "steps": STEPS, "checkpoint_every": 2, "folder": str(folder / "runs")},
        "model": {"path": "builtin:tiny", "dtype": "float32"},
        "rollouts": {
            "environment": {"name": "rounds_of_letters:Letters", "folder": str(folder)},
            "groups_per_step": 2,
            "group_size": 4,
            "max_new_tokens": 12,
            "evaluation": {"num_tasks": 2},
        },
        "trainer": {"learning_rate": 3e-3},
    }
    for name, values in sections.items():
        recipe.setdefault(name, {}).update(values)
    path = folder / "letters.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def assert_same_run(found: RunFolder, expected: RunFolder) -> None:
    for file in (f"checkpoints/step-{STEPS:06d}/trainer.safetensors", "model/model.safetensors"):
        assert digest(found.path / file) == digest(expected.path / file), file
    assert list(map(learned, rows(found.metrics))) == list(map(learned, rows(expected.metrics)))


def learned(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in without_times(row).items() if key.split("/")[0] in ("step", "trainer", "weight_sync")}


def test_in_lockstep_a_run_of_several_turns_trains_and_repeats_itself(tmp_path: Path) -> None:
    folders = []
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        redline.train(write_recipe(tmp_path / name))
        folders.append(only_run(tmp_path / name))
    assert_same_run(*folders)
    written = rows(folders[0].metrics)
    assert [row["rollouts/turns_mean"] for row in written] == [2.0] * STEPS
    assert {row["rollouts/attempts"] for row in written} == {8}
    assert any(row["trainer/grad_norm"] > 0 for row in written)


def test_a_run_whose_attempts_all_fill_the_context_says_so_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, run={"steps": 1}, rollouts={"evaluation": {"num_tasks": 0}}, engine={"max_model_len": 200})
    (tmp_path / "rounds_of_letters.py").write_text(LETTERS.replace("for _ in range(self.rounds):", "while True:"))
    redline.train(recipe)
    told = capsys.readouterr().err
    assert "scored alike (mean reward 0.000), and all of them ended at a budget" in told
    assert "the budget: a conversation has at most 200 tokens, the model's context" in told
    assert "rollouts.environment.max_turns" in told


def test_replies_that_the_environment_ends_are_trained_on_up_to_there(tmp_path: Path) -> None:
    """Of the tiny model, whose tokens are bytes, six letters are some seven tokens."""
    environment = {"name": "rounds_of_letters:Letters", "folder": str(tmp_path), "params": {"until": 6}}
    run = redline.train(write_recipe(tmp_path, rollouts={"environment": environment, "max_new_tokens": 48}))
    turns = [(row, turn) for row in run.trajectories().to_pylist() for turn in row["turns"]]
    lengths = [turn["end"] - turn["start"] for _, turn in turns]
    texts = [tiny_tokenizer().decode(row["token_ids"][turn["start"] : turn["end"]]) for row, turn in turns]
    assert {turn["finish_reason"] for _, turn in turns} == {"stop"}
    assert all(len(text) >= 6 for text in texts)
    assert max(lengths) < 24
    written = rows(only_run(tmp_path).metrics)
    kept = sum(row["rollouts/completion_tokens_mean"] * row["rollouts/attempts"] for row in written)
    assert sum(lengths) == pytest.approx(kept), "the rows count what was kept"
    assert any(row["trainer/grad_norm"] > 0 for row in written)


def test_beside_the_trainer_attempts_of_several_turns_arrive_with_their_versions(tmp_path: Path) -> None:
    redline.train(write_recipe(tmp_path, buffer={"max_lag": 1}))
    written = rows(only_run(tmp_path).metrics)
    assert len(written) == STEPS
    assert sum(row["rollouts/failures"] for row in written) == 0
    assert max(row["buffer/policy_lag_max_steps"] for row in written) <= 1
    assert all(row["rollouts/turns_mean"] in (2.0, None) for row in written)


def test_what_is_wrong_with_an_environment_is_said_before_there_is_a_run_folder(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    for key, value, message in [
        ("rollouts.environment.name", "rounds_of_letters:Letter", "has no Letter"),
        ("rollouts.environment.name", "nothing_like_it", "no such environment"),
        ("rollouts.environment.params", {"round": 3}, "could not be made: TypeError"),
    ]:
        with pytest.raises(TaskError, match=message):
            redline.train(recipe, {key: value})
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_run_of_several_turns_that_is_killed_and_resumed_is_the_one_that_was_never_killed(tmp_path: Path) -> None:
    folders = [tmp_path / "straight", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
        write_recipe(folder)
    succeed("train", "letters.yaml", cwd=folders[0])
    with started("train", "letters.yaml", cwd=folders[1]) as process:
        run = wait_for_run(folders[1], process)
        assert wait_until(lambda: num_rows(run.metrics) >= 3, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    succeed("train", "letters.yaml", "--resume", cwd=folders[1])
    assert_same_run(only_run(folders[1]), only_run(folders[0]))
