"""What the words of `redline eval` ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redline.config import load_recipe, resolve
from redline.errors import ConfigError, RunFolderError, TaskError
from redline.lab.evaluate.asked import Asked, asked_of, divide
from redline.lab.evaluate.policy import Policy, find_policy
from redline.launch.export import choose

RUN: dict[str, Any] = {
    "run": {"device": "cpu", "seed": 5},
    "model": {"path": "builtin:tiny", "dtype": "float32"},
    "rollouts": {
        "environment": {"name": "guess_number"},
        "system_prompt": "Be short.",
        "max_new_tokens": 17,
        "group_size": 2,
        "evaluation": {"num_tasks": 7, "temperature": 0.5, "every": 3, "stop_at": 0.9},
    },
    "buffer": {"max_lag": 2},
    "trainer": {"sharding": "full", "learning_rate": 1e-3},
    "engine": {"kind": "vllm", "max_num_seqs": 4},
    "placement": {"engines": 2},
}


@pytest.fixture
def run(tmp_path: Path) -> Policy:
    """A run that has left its model."""
    folder = tmp_path / "runs" / "game-001"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(RUN | {"engine": {}}))
    config = resolve(load_recipe(recipe)).config.model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps(config | {"engine": RUN["engine"]}))
    return find_policy(str(folder))


def asked(policy: Policy, *words: str) -> list[Asked]:
    return asked_of(policy, *divide(words), trained=policy)


def test_a_run_asks_what_it_held_out_in_one_process_of_ours(run: Policy) -> None:
    [own] = asked(run)
    config = own.config
    assert config.rollouts.evaluation.model_dump() == {
        "num_tasks": 7,
        "samples_per_task": 1,
        "temperature": 0.5,
        "every": 0,
        "stop_at": None,
    }
    assert (config.rollouts.environment.name, config.rollouts.system_prompt) == ("guess_number", "Be short.")
    assert (config.run.seed, config.model.dtype) == (5, "float32")
    assert (config.placement.engines, config.buffer.max_lag, config.trainer.sharding) == (0, 0, "none")
    assert config.engine.kind == "native"
    assert "engine.kind = vllm" in own.notes[0]


def test_other_tasks_are_asked_as_the_run_asked_its_own(run: Policy, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n')
    of_rows, of_game = asked(run, str(rows), "calculator", "samples_per_task=4")
    for other in (of_rows, of_game):
        rollouts = other.config.rollouts
        assert (rollouts.system_prompt, rollouts.max_new_tokens, other.config.run.seed) == ("Be short.", 17, 5)
        assert (rollouts.evaluation.samples_per_task, rollouts.evaluation.temperature) == (4, 1.0)
    assert of_rows.config.rollouts.task.held_out_fraction == 1
    assert of_rows.config.rollouts.environment.name is None
    assert of_game.config.rollouts.environment.name == "calculator"
    assert of_game.config.rollouts.task is None


def test_a_name_that_is_nothing_else_is_a_data_set_of_reasoning_gym() -> None:
    [own] = asked(Policy("builtin:tiny", "builtin:tiny"), "chain_sum", "rollouts.task.params.max_terms=2", "run.device=cpu")
    task = own.config.rollouts.task
    assert (task.kind, task.dataset, task.params) == ("reasoning_gym", "chain_sum", {"max_terms": 2})


def test_of_a_folder_with_splits_the_test_split_is_asked(tmp_path: Path) -> None:
    model = Policy("builtin:tiny", "builtin:tiny")
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    assert asked(model, str(tmp_path))[0].config.rollouts.task.split == "test"
    assert asked(model, str(tmp_path), "rollouts.task.split=validation")[0].config.rollouts.task.split == "validation"
    (tmp_path / "test.jsonl").unlink()
    from redline.launch.environments import task_source

    with pytest.raises(TaskError, match=r"(?s)no such split.*set rollouts.task.split to one of: train, validation"):
        task_source(asked(model, str(tmp_path))[0].config, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"is no run, and no task is named.*redline eval builtin:tiny recipes/demo.yaml"),
        (["none.jsonl"], r"none.jsonl.*no such file"),
        (["none.yaml"], r"none.yaml: no such recipe"),
        (["chain_sum", "temprature=0"], r"temprature=0: no such key.*did you mean temperature"),
        (["chain_sum", "temperature=-1"], r"rollouts.evaluation.temperature = -1"),
        (["chain_sum", "rollouts.temperature=0"], r"nothing is trained.*set temperature"),
        (["chain_sum", "every=2"], r"nothing is trained"),
        (["chain_sum", "trainer.learning_rate=1"], r"nothing is trained"),
        (["chain_sum", "model.path=x"], r"it is MODEL"),
        (["chain_sum", "num_tasks=0"], r"asks nothing.*num_tasks=64"),
        (["chain_sum", "engine.kind=vllm"], r"engine.kind = vllm: not for redline eval.*leave engine.kind out"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_fix(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        asked(Policy("builtin:tiny", "builtin:tiny"), *words)


def test_a_checkpoint_is_found_from_inside_its_folder_and_is_no_model_of_a_recipe(
    run: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.run is not None
    (run.run.checkpoints / "step-000004").mkdir()
    monkeypatch.chdir(run.run.checkpoints)
    found = find_policy("step-000004").run
    assert found is not None
    assert found.path == run.run.path
    with pytest.raises(ConfigError, match=r"(?s)step-000009: the run has no such checkpoint.*step-000004"):
        find_policy("step-000009")
    with pytest.raises(ConfigError, match=r"(?s)no config.json.*make a model of it: redline export .*step-000004"):
        asked(Policy("x", str(run.run.checkpoints / "step-000004")), "calculator")


def test_a_checkpoint_and_a_model_inside_a_run_belong_to_it(run: Policy) -> None:
    assert run.run is not None
    checkpoint = run.run.checkpoints / "step-000004"
    checkpoint.mkdir()
    found = find_policy(str(checkpoint))
    assert (found.checkpoint, found.path) == (checkpoint, "builtin:tiny")
    assert found.run == run.run
    assert find_policy(str(run.run.model)).run == run.run
    (run.run.model / "redline.json").write_text('{"step": 2}')
    newest = find_policy(str(run.run.path))
    assert newest.checkpoint == checkpoint, "the run has gone on after its model"
    assert newest.name.endswith("checkpoints/step-000004")


def test_the_dtype_is_that_of_the_run_of_the_model_whatever_the_recipe_of_the_task_says(run: Policy, tmp_path: Path) -> None:
    recipe = tmp_path / "task.yaml"
    recipe.write_text(json.dumps(RUN | {"engine": {}, "model": {"path": "builtin:small", "dtype": "bfloat16"}}))
    assert asked(run, str(recipe))[0].config.model.dtype == "float32"
    assert asked(run, str(recipe), "model.dtype=bfloat16")[0].config.model.dtype == "bfloat16"
    [alone], [by_name] = (asked(Policy("x", "builtin:tiny"), task, "run.device=cpu") for task in (str(recipe), "calculator"))
    assert alone.config.model.dtype == by_name.config.model.dtype, "the machine's"


LONG = "Be short. " * 30


def test_an_override_longer_than_a_name_of_a_file_is_an_override(run: Policy) -> None:
    [own] = asked(run, f"rollouts.system_prompt={LONG}")
    assert own.config.rollouts.system_prompt == LONG


@pytest.mark.parametrize(("task", "message"), [(f"{LONG}/a", "no such file"), (f"{LONG}.yaml", "no such recipe")])
def test_a_task_longer_than_a_name_of_a_file_is_told_as_any_other_that_is_not_there(task: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asked(Policy("builtin:tiny", "builtin:tiny"), task)


@pytest.mark.parametrize("name", [LONG, f"{LONG}/a/b", f"a/b/{LONG}", "a/" * 3000])
def test_a_model_or_a_run_with_a_name_longer_than_a_file_can_have_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        asked(find_policy(name), "calculator")
    with pytest.raises(RunFolderError, match="no such run folder"):
        choose(Path(name), None, None, merge=False)
