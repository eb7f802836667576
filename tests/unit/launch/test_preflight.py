"""What is wrong with a run is said before its weights are loaded, with the key or the call, the reason and the fix."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import DROPS_THINKING

from redline.config import Config, resolve, validate
from redline.errors import ConfigError, ModelError, RedlineError, TaskError
from redline.launch.preflight import Checked, check
from redline.models.files.tiny import write_tiny_model

GOOD = """
from redline.types import Task

def task(index):
    return Task(f"sum-{index}", [{"role": "user", "content": f"{index} + 1?"}], str(index + 1))

class Source:
    def __init__(self, seed):
        pass
    def train(self, index):
        return task(index)
    def held_out(self, count):
        return [task(index) for index in range(1000, 1000 + count)]
    def score(self, task, text):
        return {"correct": float(text == task.answer)}
"""

GAME = """
from redline.types import Reaction, Task

class Game:
    def __init__(self, seed):
        pass
    def train(self, index):
        return Task(f"game-{index}", [], data={"seen": {1, 2}})
    def held_out(self, count):
        return []
    def reset(self, task):
        return "go"
    def step(self, reply):
        return Reaction("over", 1.0, True)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


class Recipes:
    """Recipes with a task source of their own, in a folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self._count = folder, model, 0

    def recipe(self, source: str = GOOD, **sections: dict[str, Any]) -> Config:
        self._count += 1
        module = f"tasks_{self.folder.name.replace('-', '_')}_{self._count}"
        (self.folder / f"{module}.py").write_text(source)
        values: dict[str, Any] = {
            "run": {"folder": str(self.folder / "runs"), "device": "cpu"},
            "model": {"path": str(self.model)},
            "rollouts": {"task": {"kind": "import", "path": f"{module}:Source"}, "evaluation": {"num_tasks": 4}},
        }
        for section, keys in sections.items():
            values[section] = values.get(section, {}) | keys
        return resolve(validate(values)).config

    def check(self, source: str = GOOD, **sections: dict[str, Any]) -> Checked:
        return check(self.recipe(source, **sections))

    def refusal(self, source: str = GOOD, **sections: dict[str, Any]) -> RedlineError:
        with pytest.raises(RedlineError) as caught:
            self.check(source, **sections)
        assert caught.value.hint
        assert not (self.folder / "runs").exists()
        return caught.value


@pytest.fixture
def recipes(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Recipes:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Recipes(tmp_path, tiny)


def without(text: str, new: str) -> str:
    assert text in GOOD
    return GOOD.replace(text, new)


def test_a_good_run_is_let_through_and_leaves_nothing(recipes: Recipes) -> None:
    found = recipes.check()
    assert [task.id for task in found.tasks.held_out] == ["sum-1000", "sum-1001", "sum-1002", "sum-1003"]
    assert found.notes == ("20 prompts looked at: 25 to 28 tokens, of 1024 with the answer",)
    assert not (recipes.folder / "runs").exists()


# ── the task source ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ("raise KeyError('question')", "train(0) raised KeyError: 'question'"),
        ("return {'id': 'a'}", "train(0) gave a dict, not a Task"),
        ("return Task('a', 'a question')", "train(0) gave a Task whose messages are a str, not a list of messages"),
        ("return Task(5, [{'role': 'user', 'content': 'a'}])", "train(0) gave a Task whose id is 5, a int, not a str"),
        ("return Task('a', [])", "train(0) gave a Task without messages"),
        ("return Task('a', ['a question'])", "train(0) gave a Task with the message 'a question', which is no mapping"),
        ("return Task('a', [{'role': 'user', 'content': 7}])", "which is no mapping of role and content to texts"),
        ("return Task('a', [{'role': 'user', 'content': 'a'}], 7)", "train(0) gave a Task whose answer is 7, a int, not a str"),
    ],
)
def test_a_training_task_that_cannot_be_used_is_refused(recipes: Recipes, train: str, said: str) -> None:
    error = recipes.refusal(without("return task(index)\n    def held_out", f"{train}\n    def held_out"))
    assert isinstance(error, TaskError)
    assert error.message.startswith("rollouts.task: ")
    assert said in error.message


def test_a_task_that_worker_processes_would_not_get_as_it_is_is_refused_where_they_score(recipes: Recipes) -> None:
    with_a_set = without("str(index + 1))", "str(index + 1), {'seen': {1, 2}})")
    recipes.check(with_a_set)
    error = recipes.refusal(with_a_set, rollouts={"reward_run_in": "processes"})
    assert "rollouts.reward_run_in = processes: task 'sum-0': a set cannot travel" in error.message


def test_a_value_in_a_task_that_processes_would_not_get_is_named_with_its_key(recipes: Recipes) -> None:
    a_counter = without("str(index + 1))", "str(index + 1), {'seen': [__import__('collections').Counter('aab')]})")
    error = recipes.refusal(a_counter, rollouts={"reward_run_in": "processes"})
    assert error.message.endswith("a Counter cannot travel between a run and a worker process: it is data['seen'][0]")


def test_params_that_processes_would_not_get_are_refused_with_the_recipe(recipes: Recipes) -> None:
    task = {"kind": "import", "path": "tasks:Source", "params": {"levels": {1: "easy"}}}
    with pytest.raises(ConfigError, match=r"rollouts\.task\.params = .*: levels has the key 1"):
        recipes.recipe(rollouts={"task": task, "reward_run_in": "processes"})


def test_a_task_that_the_processes_of_a_game_would_not_get_is_refused(recipes: Recipes) -> None:
    (recipes.folder / "stepped_game.py").write_text(GAME)
    environment = {"name": "stepped_game:Game", "folder": str(recipes.folder)}
    keys: dict[str, Any] = {"task": None, "environment": environment}
    recipes.check(rollouts=keys)
    environment["run_in"] = "processes"
    said = "rollouts.environment.run_in = processes: task 'game-0': a set cannot travel"
    assert said in recipes.refusal(rollouts=keys).message


def test_what_raises_is_named_with_its_file_and_line(recipes: Recipes) -> None:
    error = recipes.refusal(without("return task(index)\n    def held_out", "return 1 / 0\n    def held_out"))
    assert "tasks_" in error.hint
    assert error.hint.endswith(":11, in train: return 1 / 0")


def test_a_training_task_that_does_not_come_in_time_is_noted_and_the_others_are_looked_at(recipes: Recipes) -> None:
    hangs = "import time\n        time.sleep(600 * (index == 3))\n        return task(index)\n    def held_out"
    found = recipes.check(without("return task(index)\n    def held_out", hangs), rollouts={"task_timeout_s": 1.0})
    assert found.notes[0] == "1 of 16 training tasks cannot be made: `train` did not return within 1 s"


@pytest.mark.parametrize(
    ("held_out", "said"),
    [
        ("raise OSError('no such data')", "held_out(4) raised OSError: no such data"),
        ("return None", "held_out(4) raised TypeError: 'NoneType' object is not iterable"),
        ("return {'a': 1}", "held_out(4) gave a dict, not a list of tasks"),
        ("return ['a']", "held_out(4)[0] gave a str, not a Task"),
    ],
)
def test_held_out_tasks_that_cannot_be_used_are_refused(recipes: Recipes, held_out: str, said: str) -> None:
    source = without("return [task(index) for index in range(1000, 1000 + count)]", held_out)
    assert said in recipes.refusal(source).message


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("def score(self, task, text)", "def score(self, text)", "Source.score(text) cannot be called: too many positional"),
        ("def train(self, index)", "def train(self)", "Source.train() cannot be called: too many positional"),
        (
            "def held_out(self, count)",
            "def held_out(self, count, split)",
            "missing a required argument: 'split'",
        ),
        ("def score(", "def grade(", "gives a Source without score"),
        ("def __init__(self, seed)", "def __init__(self)", "could not be made: TypeError"),
    ],
)
def test_methods_that_cannot_be_called_as_they_will_be_are_refused(
    recipes: Recipes, before: str, after: str, said: str
) -> None:
    assert said in recipes.refusal(without(before, after)).message


def test_some_tasks_that_fail_are_told_and_end_nothing(recipes: Recipes) -> None:
    source = without("return task(index)\n    def held_out", "return task(index if index % 8 else 1 / 0)\n    def held_out")
    notes = recipes.check(source).notes
    assert (
        notes[0] == "2 of 16 training tasks cannot be made: rollouts.task: train(0) raised ZeroDivisionError: division by zero"
    )


def test_a_source_without_held_out_tasks_is_told_that_nothing_is_evaluated(recipes: Recipes) -> None:
    notes = recipes.check(without("return [task(index) for index in range(1000, 1000 + count)]", "return []")).notes
    assert notes[0] == "the task source has no held-out tasks; nothing will be evaluated"


def test_held_out_tasks_that_are_training_tasks_are_told(recipes: Recipes) -> None:
    notes = recipes.check(without("range(1000, 1000 + count)", "range(count)")).notes
    assert notes[0] == (
        "4 of 4 held-out tasks that were looked at are training tasks as well: their score says nothing about new questions;"
        " let held_out(count) give tasks that train(index) never gives"
    )


def test_a_held_out_task_that_asks_the_same_under_another_id_is_told(recipes: Recipes) -> None:
    source = without("return [task(index) for index in range(1000, 1000 + count)]", "return [again(0), *map(task, [50, 51])]")
    source += "\ndef again(index):\n    return Task('another', task(index).messages, 'x', {'row': 7})\n"
    assert recipes.check(source).notes[0].startswith("1 of 3 held-out tasks that were looked at are training tasks as well")


def test_what_is_wrong_with_a_file_of_tasks_is_found(recipes: Recipes) -> None:
    rows = recipes.folder / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1?", "answer": "2"}\n{"question": "1 + 2?", "answer": "3"}\n')
    error = recipes.refusal(rollouts={"task": {"kind": "file", "path": str(rows)}})
    assert error.message == f"{rows}:2: no field 'prompt'"


def test_a_data_set_and_parameters_that_are_not_there_are_found(recipes: Recipes) -> None:
    pytest.importorskip("reasoning_gym")
    task = {"kind": "reasoning_gym", "dataset": "chain_some"}
    assert recipes.refusal(rollouts={"task": task}).hint.startswith("did you mean chain_sum")
    task = {"kind": "reasoning_gym", "dataset": "chain_sum", "params": {"min_term": 2}}
    assert "did you mean min_terms?" in recipes.refusal(rollouts={"task": task}).hint


# ── prompts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_prompts_that_leave_no_room_for_the_answer_are_refused(recipes: Recipes) -> None:
    task = recipes.recipe().rollouts.task.model_dump()
    error = recipes.refusal(rollouts={"task": task, "max_new_tokens": 1000})
    assert "a prompt of 25 tokens, but rollouts.max_new_tokens = 1000 leaves room for 24" in error.message
    assert "rollouts.max_new_tokens" in error.hint


PLAYED = GOOD.replace("def score(self, task, text):", "async def play(self, task, policy):").replace(
    """return {"correct": float(text == task.answer)}""", "return 1.0"
)


@pytest.mark.parametrize(
    ("size", "said"),
    [(1, "a KV cache of 1 bytes does not hold one block of"), (1 << 16, "a prompt of 28 tokens and 256 new ones exceed")],
)
def test_a_kv_cache_that_does_not_hold_an_answer_is_refused(recipes: Recipes, size: int, said: str) -> None:
    error = recipes.refusal(engine={"kv_cache_memory_bytes": size}, rollouts={"max_new_tokens": 256})
    assert said in error.message
    assert "engine.kv_cache_memory_bytes" in error.hint
    recipes.check(engine={"kv_cache_memory_bytes": 1 << 20}, rollouts={"max_new_tokens": 256})


def played(recipes: Recipes, source: str, **keys: Any) -> tuple[str, ...]:
    (recipes.folder / "played.py").write_text(source)
    environment = {"name": "played:Source", "folder": str(recipes.folder)}
    return recipes.check(rollouts={"task": None, "environment": environment, "evaluation": {"num_tasks": 4}, **keys}).notes


def test_the_tasks_of_an_environment_are_looked_at_where_they_have_messages(recipes: Recipes) -> None:
    assert any(note.startswith("20 prompts looked at: 25 to 28 tokens") for note in played(recipes, PLAYED))


def test_tasks_of_an_environment_that_do_not_fit_the_model_are_a_note(recipes: Recipes) -> None:
    [note] = [note for note in played(recipes, PLAYED, max_new_tokens=1000) if "none of 20 tasks" in note]
    assert "a prompt of 25 tokens, but rollouts.max_new_tokens = 1000 leaves room for 24" in note


def test_tasks_of_an_environment_without_messages_are_not_looked_at(recipes: Recipes) -> None:
    bare = PLAYED.replace('[{"role": "user", "content": f"{index} + 1?"}]', "[]")
    assert not any("prompts" in note or "tasks" in note for note in played(recipes, bare))


def test_held_out_tasks_of_an_environment_are_told_apart_by_their_data(recipes: Recipes) -> None:
    data = PLAYED.replace('[{"role": "user", "content": f"{index} + 1?"}], str(index + 1)', '[], data={"number": index}')
    assert data != PLAYED
    assert not any("training tasks as well" in note for note in played(recipes, data))
    same = data.replace("range(1000, 1000 + count)", "range(count)")
    assert any(note.startswith("4 of 4 held-out tasks") for note in played(recipes, same))


def test_a_shorter_limit_of_the_engine_counts(recipes: Recipes) -> None:
    message = recipes.refusal(engine={"max_model_len": 200}).message
    assert message == "rollouts.max_new_tokens = 256: the engine takes 200 tokens, prompt included"


def test_a_model_without_a_chat_template_is_refused(recipes: Recipes) -> None:
    model = recipes.folder / "model"
    shutil.copytree(recipes.model, model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    assert "no chat template" in recipes.refusal(model={"path": str(model)}).message


ONLY_USERS = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}Say:"


def test_a_template_that_shows_nothing_of_the_questions_is_refused(recipes: Recipes) -> None:
    model = recipes.folder / "model"
    shutil.copytree(recipes.model, model)
    (model / "chat_template.jinja").write_text(ONLY_USERS)
    recipes.check(model={"path": str(model)})
    misspelt = recipes.refusal(without('"role": "user"', '"role": "usr"'), model={"path": str(model)})
    assert "20 different questions become the same prompt" in misspelt.message
    assert "the roles of the messages" in misspelt.hint


# ── files of models ────────────────────────────────────────────────────────────────────────────────────────────────────


def changed(recipes: Recipes, **values: Any) -> str:
    """The path of a copy of the model with other values in its config.json."""
    model = recipes.folder / "changed"
    shutil.copytree(recipes.model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | values))
    return str(model)


def test_weights_that_are_missing_or_belong_to_another_config_are_refused_unread(recipes: Recipes) -> None:
    model = changed(recipes, num_hidden_layers=3)
    error = recipes.refusal(model={"path": model})
    assert isinstance(error, ModelError)
    assert "the weights lack model.layers.2." in error.message
    (Path(model) / "model.safetensors").unlink()
    assert "no *.safetensors file" in recipes.refusal(model={"path": model}).message


def test_a_model_of_a_family_that_samples_no_text_is_refused(recipes: Recipes) -> None:
    error = recipes.refusal(model={"path": changed(recipes, model_type="vit", architectures=["ViTModel"])})
    assert "'vit' is no causal language model" in error.message


def test_a_reward_model_that_is_not_there_is_refused_with_its_key(recipes: Recipes) -> None:
    task = recipes.recipe().rollouts.task.model_dump()
    error = recipes.refusal(rollouts={"task": task, "reward_model": {"path": "/nowhere/judge"}})
    assert isinstance(error, ConfigError)
    assert error.message == "rollouts.reward_model.path = '/nowhere/judge': no such model folder"


def test_what_the_chat_template_does_to_earlier_turns_is_said_where_there_are_several(recipes: Recipes, tmp_path: Path) -> None:
    folder = tmp_path / "thinks"
    shutil.copytree(recipes.model, folder)
    (folder / "chat_template.jinja").write_text(DROPS_THINKING)
    recipes.model = folder
    said = "chat template, thinking: earlier turns are written differently"
    environment = {"environment": {"name": "guess_number"}, "task": None}
    assert any(said in note for note in recipes.check(rollouts=environment).notes)
    environment["environment"]["keep_replies"] = False
    assert not any(said in note for note in recipes.check(rollouts=environment).notes)
    assert not any(said in note for note in recipes.check().notes)


@pytest.mark.parametrize("path", ["builtin:tiny", "judge.gguf", __file__])
def test_a_reward_model_that_is_no_folder_is_refused(recipes: Recipes, path: str) -> None:
    task = recipes.recipe().rollouts.task.model_dump()
    error = recipes.refusal(rollouts={"task": task, "reward_model": {"path": path}})
    assert error.message == f"rollouts.reward_model.path = {path!r}: no such model folder"
    assert error.hint.endswith("of a sequence classifier with one label")


def test_a_reward_model_that_is_no_classifier_with_one_label_is_refused(recipes: Recipes) -> None:
    task = recipes.recipe().rollouts.task.model_dump()
    error = recipes.refusal(rollouts={"task": task, "reward_model": {"path": str(recipes.model)}})
    assert "not a reward model: it is made for LlamaForCausalLM" in error.message


# ── folders and processes ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("below", ["", "/runs"])
def test_a_run_folder_that_is_a_file_is_refused(recipes: Recipes, below: str) -> None:
    file = recipes.folder / "notes.txt"
    file.touch()
    error = recipes.refusal(run={"folder": f"{file}{below}"})
    assert error.message == f"run.folder = '{file}{below}': {file} is a file, not a folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(recipes: Recipes) -> None:
    closed = recipes.folder / "closed"
    closed.mkdir(mode=0o500)
    assert "nothing can be written to" in recipes.refusal(run={"folder": str(closed / "runs")}).message


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_disk_that_takes_no_files_is_refused(recipes: Recipes) -> None:
    """/proc is one, for root too."""
    error = recipes.refusal(run={"folder": "/proc/runs"})
    assert error.message.startswith("run.folder = '/proc/runs': nothing can be written to /proc: ")


def test_what_needs_another_device_is_refused(recipes: Recipes) -> None:
    assert recipes.refusal(trainer={"offload_optimizer": True}).message.startswith("trainer.offload_optimizer: on the CPU")


def test_processes_that_cannot_divide_the_work_are_refused(recipes: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    refusal = recipes.refusal(trainer={"sequence_parallel_size": 2})
    assert "sequence_parallel_size = 2 does not divide the trainer's 3 processes" in refusal.message


def test_more_stages_than_the_model_has_layers_are_refused(recipes: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64")
    refusal = recipes.refusal(trainer={"pipeline_parallel_size": 64})
    assert "trainer.pipeline_parallel_size = 64: the model has" in refusal.message
    assert "or less" in refusal.hint


def test_restarts_that_each_node_would_count_for_itself_are_refused(recipes: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(name, value)
    assert "--max-restarts on several nodes" in recipes.refusal().message


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_a_cluster_without_its_package_is_refused_with_the_command_that_brings_it(recipes: Recipes) -> None:
    with pytest.raises(ConfigError, match="the package ray is not installed") as refused:
        recipes.check(placement={"cluster": "ray"})
    assert "[ray]" in refused.value.hint


def test_a_machine_that_cannot_sample_in_fewer_bits_is_refused_before_a_model_is_converted(
    recipes: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redline.models.files.sources.small_files", lambda path, seed: None)
    config = recipes.recipe(engine={"quantization": "int16"})
    with_gpu = config.model_copy(update={"engine": config.engine.model_copy(update={"quantization": "fp8"})})
    with pytest.raises(ConfigError, match="it is for GPUs"):
        check(with_gpu)
