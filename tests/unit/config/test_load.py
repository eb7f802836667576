from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import BaseModel

from redline.config import Config, load_recipe, resolve, validate
from redline.config.changes import changes
from redline.config.elsewhere import ELSEWHERE
from redline.config.load import make_config, read_recorded
from redline.config.paths import named_alike
from redline.config.problems import locate
from redline.config.processor import bfloat16_flags
from redline.config.sections.tasks import FileTask, ImportTask
from redline.config.sections.telemetry import TelemetryConfig
from redline.errors import ConfigError
from redline.launch.resume.which_run import run_to_continue
from redline.telemetry import RunFolder, write_json

MINIMAL = """\
model:
  path: builtin:tiny
rollouts:
  task:
    kind: reasoning_gym
    dataset: chain_sum
"""
IMPORTED = {"kind": "import", "path": "letters:Letters"}
DRY_RUN = "--dry-run` checks again without loading anything"


def load(folder: Path, extra: str = "", *overrides: str, base: str = MINIMAL) -> Config:
    recipe = folder / "recipe.yaml"
    recipe.write_text(base + extra)
    return load_recipe(recipe, overrides)


def refusal(folder: Path, extra: str = "", *overrides: str, base: str = MINIMAL) -> tuple[str, str]:
    """Message, without the folder, and hint."""
    with pytest.raises(ConfigError) as caught:
        load(folder, extra, *overrides, base=base)
    assert str(caught.value).endswith(f"\n\nhint: {caught.value.hint}")
    return caught.value.message.replace(f"{folder}/", ""), caught.value.hint


# ── what is read ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_minimal_recipe_gets_every_default(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.run.steps == 100
    assert config.trainer.betas == (0.9, 0.999)
    assert config.sequences_per_step == 64


def test_an_unquoted_exponent_is_a_number_in_a_recipe_and_in_an_override(tmp_path: Path) -> None:
    config = load(tmp_path, "trainer:\n  learning_rate: 1e-5\n  weight_decay: '1e-2'\n", "trainer.eps=1e-9", "run.steps=1e3")
    assert config.trainer.learning_rate == 1e-5
    assert config.trainer.weight_decay == 1e-2
    assert config.trainer.eps == 1e-9
    assert config.run.steps == 1000


def test_on_and_off_are_words_where_a_key_has_such_values(tmp_path: Path) -> None:
    config = load(tmp_path, "engine: {speculation: off}\ntelemetry: {nvtx: on}\n")
    assert (config.engine.speculation, config.telemetry.nvtx) == ("off", "on")
    config = load(tmp_path, "engine: {speculation: always}\n", "engine.speculation=off", "telemetry.nvtx=off")
    assert (config.engine.speculation, config.telemetry.nvtx) == ("off", "off")


@pytest.mark.parametrize("override", ["run.steps=true", "buffer.max_lag=on", "run.num_threads=yes"])
def test_true_is_no_whole_number(override: str, tmp_path: Path) -> None:
    key = override.partition("=")[0]
    assert refusal(tmp_path, "", override)[0] == f"recipe.yaml: {key} = 'true': must be a whole number"


@pytest.mark.parametrize("override", ["temperature=1e-7", "temperature=0", "temperature=1e7", "evaluation.temperature=1e-30"])
def test_a_temperature_that_no_engine_takes_is_refused_before_anything_is_loaded(override: str, tmp_path: Path) -> None:
    assert f"rollouts.{override.partition('=')[0]} = " in refusal(tmp_path, "", f"rollouts.{override}")[0]


def test_the_coldest_temperatures_are_taken(tmp_path: Path) -> None:
    config = load(tmp_path, "", "rollouts.temperature=1e-6", "rollouts.evaluation.temperature=0")
    assert (config.rollouts.temperature, config.rollouts.evaluation.temperature) == (1e-6, 0)


def test_a_projection_that_is_named_twice_gets_one_adapter(tmp_path: Path) -> None:
    config = load(tmp_path, "", "trainer.lora.rank=2", "trainer.lora.targets=[q_proj,v_proj,q_proj]")
    assert config.trainer.lora.targets == ("q_proj", "v_proj")


def test_a_file_is_no_model_and_is_not_what_was_meant_instead(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("")
    with pytest.raises(ConfigError, match=r"r\.yaml': a file, and no \.gguf file"):
        resolve(load(tmp_path, "", f"model.path={recipe}"))
    assert named_alike(recipe) == ""


def test_true_is_no_number_and_stays_itself_where_it_is_meant(tmp_path: Path) -> None:
    assert (
        refusal(tmp_path, "", "rollouts.temperature=true")[0] == "recipe.yaml: rollouts.temperature = 'true': must be a number"
    )
    config = load(
        tmp_path, "", "trainer.recompute_old_logprobs=true", "trainer.lora.rslora=yes", "rollouts.evaluation.every=off"
    )
    assert config.trainer.recompute_old_logprobs is True
    assert config.trainer.lora.rslora is True
    assert config.rollouts.evaluation.every == 0


def test_an_exponent_is_a_number_also_where_the_schema_knows_no_type(tmp_path: Path) -> None:
    params = load(tmp_path, "    params: {rate: 1e-2, name: '1e-2'}\n").rollouts.task.params
    assert params == {"rate": 1e-2, "name": "1e-2"}


def test_a_section_with_nothing_in_it_is_all_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, "  evaluation:\ntrainer:\nengine:\n")
    assert config.trainer == type(config.trainer)()
    assert config.rollouts.evaluation == type(config.rollouts.evaluation)()


def test_overrides_are_applied_in_order(tmp_path: Path) -> None:
    assert load(tmp_path, "", "run.steps=3", "run.steps=7").run.steps == 7


def test_an_override_may_open_a_section_the_recipe_lacks(tmp_path: Path) -> None:
    assert load(tmp_path, "", "trainer.eps=1e-9").trainer.eps == 1e-9


def test_an_override_may_fill_a_section_that_is_empty_in_the_recipe(tmp_path: Path) -> None:
    assert load(tmp_path, "trainer:\n", "trainer.eps=1e-9").trainer.eps == 1e-9


def test_an_override_reaches_the_parameters_of_a_task(tmp_path: Path) -> None:
    assert load(tmp_path, "", "rollouts.task.params.min_terms=3").rollouts.task.params == {"min_terms": 3}


def test_an_override_of_an_environments_parameter_is_what_yaml_reads() -> None:
    given = ("largest=7", "rate=1e-2", "is_hard=true", "word=seven")
    overrides = [f"rollouts.environment.params.{one}" for one in given]
    config = make_config({"model": {"path": "x"}, "rollouts": {"environment": {"name": "guess_number"}}}, overrides)
    assert config.rollouts.environment.params == {"largest": 7, "rate": 0.01, "is_hard": True, "word": "seven"}


def test_an_override_of_a_text_key_stays_text_when_it_looks_like_a_number_or_a_date(tmp_path: Path) -> None:
    assert load(tmp_path, "", "model.path=123").model.path == "123"
    assert load(tmp_path, "", "run.name=2026-01-31").run.name == "2026-01-31"
    assert load(tmp_path, "", "model.path=1e5").model.path == "1e5"


def test_an_override_of_a_text_key_is_taken_as_it_stands(tmp_path: Path) -> None:
    for text in (" Think first.", "Say a number. #1 rule", "One line.\nAnother.", "Answer: 5", "[INST] go", "yes", "  "):
        assert load(tmp_path, "", f"rollouts.prompt_suffix={text}").rollouts.prompt_suffix == text
        assert load(tmp_path, "", f"rollouts.system_prompt={text}").rollouts.system_prompt == text
    assert load(tmp_path, "", "rollouts.prompt_suffix=").rollouts.prompt_suffix == ""
    assert load(tmp_path, "", r'rollouts.prompt_suffix="\nAnswer:"').rollouts.prompt_suffix == "\nAnswer:"
    assert load(tmp_path, "", "rollouts.system_prompt=''").rollouts.system_prompt == ""


def test_an_override_without_a_value_is_refused_where_it_could_mean_two_things(tmp_path: Path) -> None:
    message, hint = refusal(tmp_path, "", "rollouts.system_prompt=")
    assert message == "override 'rollouts.system_prompt=' has no value"
    assert hint == "rollouts.system_prompt=null leaves it out, rollouts.system_prompt='\"\"' is an empty text"


def test_an_override_of_an_optional_text_key_may_be_null(tmp_path: Path) -> None:
    assert load(tmp_path, "  system_prompt: hello\n", "rollouts.system_prompt=null").rollouts.system_prompt is None


def test_an_override_may_be_a_list(tmp_path: Path) -> None:
    assert load(tmp_path, "", "trainer.betas=[0.9, 0.95]").trainer.betas == (0.9, 0.95)


def test_a_section_may_be_shared_by_anchor_and_merged(tmp_path: Path) -> None:
    config = load(tmp_path, "  evaluation:\n    <<: {num_tasks: 3}\n    every: 2\n")
    assert (config.rollouts.evaluation.num_tasks, config.rollouts.evaluation.every) == (3, 2)


def test_reading_recipes_loads_no_torch() -> None:
    code = "import sys, redline.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ── what is refused, and how ───────────────────────────────────────────────────────────────────────────────────────────


def test_every_problem_is_reported_on_its_own_line_with_its_own_fix(tmp_path: Path) -> None:
    base = "run:\n  stepz: 3\nrollouts:\n  groups_per_step: 0\n  task: {kind: file, path: a.jsonl}\n"
    message, hint = refusal(tmp_path, base=base)
    first, *lines = message.splitlines()
    assert first == "recipe.yaml: 3 problems"
    assert "  run.stepz: unknown key; did you mean run.steps?" in lines
    assert "  rollouts.groups_per_step = 0: must be more than 0 (tasks per optimizer step)" in lines
    assert any(line.startswith("  model.path: required (a Hugging Face folder, ") for line in lines)
    assert hint == f"`redline train {tmp_path / 'recipe.yaml'} {DRY_RUN}"


def test_a_single_problem_is_the_message_and_its_fix_the_hint(tmp_path: Path) -> None:
    assert refusal(tmp_path, "run: {stepz: 3}") == ("recipe.yaml: run.stepz: unknown key", "did you mean run.steps?")


def test_a_key_in_the_wrong_section_is_pointed_to_the_right_one(tmp_path: Path) -> None:
    _, hint = refusal(tmp_path, "", "run.learning_rate=1e-5")
    assert hint == "did you mean trainer.learning_rate?"


def test_a_path_that_is_not_there_is_pointed_to_the_one_with_almost_its_name(tmp_path: Path) -> None:
    (tmp_path / "mymodel").mkdir()
    (tmp_path / "mymodel" / "config.json").write_text("{}")
    (tmp_path / "questions.jsonl").write_text("{}")
    (tmp_path / "runs" / "sums-001" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "sums-001" / "config.json").write_text("{}")
    hints = {
        f"model.path={tmp_path}/mymodle": f"did you mean {tmp_path}/mymodel?",
        f"model.path={tmp_path}/runs": f"it has runs; give one of them, such as {tmp_path}/runs/sums-001",
        f"model.path={tmp_path}/runs/sums-001/checkpoints": f"give the run's folder: {tmp_path}/runs/sums-001",
        f"rollouts.task={{kind: file, path: {tmp_path}/question.jsonl}}": f"did you mean {tmp_path}/questions.jsonl?",
    }
    for override, hint in hints.items():
        with pytest.raises(ConfigError) as caught:
            resolve(load(tmp_path, "", override))
        assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("trainer.lr=1e-5", "did you mean trainer.learning_rate?"),
        ("trainer.beta=0.1", "did you mean trainer.kl_coef?"),
        ("trainer.lora.r=8", "did you mean trainer.lora.rank?"),
        ("trainer.num_generations=8", "did you mean rollouts.group_size?"),
        ("lr=1e-5", "did you mean trainer.learning_rate=1e-5?"),
    ],
)
def test_a_key_of_another_program_is_pointed_to_ours(tmp_path: Path, override: str, hint: str) -> None:
    assert refusal(tmp_path, "", override)[1] == hint


def test_keys_of_other_programs_stand_for_keys_that_there_are() -> None:
    for theirs, ours in ELSEWHERE.items():
        assert locate(ours.split(".")).field is not None, ours
        assert theirs not in {name.rpartition(".")[2] for name in ELSEWHERE.values()}


def test_a_key_like_no_other_gets_the_list_of_known_keys(tmp_path: Path) -> None:
    _, hint = refusal(tmp_path, "", "telemetry.zzz=1")
    assert hint == f"known keys: {', '.join(sorted(TelemetryConfig.model_fields))}"


def test_a_mistyped_section_in_an_override_is_corrected(tmp_path: Path) -> None:
    assert refusal(tmp_path, "", "trainr.eps=1e-9") == ("recipe.yaml: trainr: unknown section", "did you mean trainer?")


def test_a_mistyped_section_below_the_first_is_corrected(tmp_path: Path) -> None:
    assert refusal(tmp_path, "", "rollouts.evaluaton.every=2") == (
        "recipe.yaml: rollouts.evaluaton: unknown key",
        "did you mean rollouts.evaluation?",
    )


def test_a_section_like_no_other_gets_the_list_of_sections(tmp_path: Path) -> None:
    message, hint = refusal(tmp_path, "zzz: 1\n")
    assert message == "recipe.yaml: zzz: unknown section"
    assert hint == "known sections: buffer, engine, model, placement, rollouts, run, telemetry, trainer"


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("{kind: reasoning_gym, dataset: chain_sum", "dataset, extract, held_out_fraction, kind, params"),
        (
            "{kind: file, path: a.jsonl",
            "answer_field, extract, held_out_fraction, held_out_split, kind, path, prompt_field, split",
        ),
        ("{kind: import, path: 'a:B'", "folder, kind, params, path"),
    ],
)
def test_an_unknown_key_of_a_task_gets_the_keys_of_its_kind(tmp_path: Path, kind: str, keys: str) -> None:
    base = f"model: {{path: builtin:tiny}}\nrollouts:\n  task: {kind}, zzz: 1}}\n"
    assert refusal(tmp_path, base=base) == ("recipe.yaml: rollouts.task.zzz: unknown key", f"known keys: {keys}")


def test_a_mistyped_key_of_a_task_is_corrected(tmp_path: Path) -> None:
    _, hint = refusal(tmp_path, "", "rollouts.task.datasett=x")
    assert hint == "did you mean rollouts.task.dataset?"


def test_a_mistyped_kind_of_task_is_corrected(tmp_path: Path) -> None:
    assert refusal(tmp_path, "", "rollouts.task.kind=fil") == (
        "recipe.yaml: rollouts.task.kind = 'fil': no such kind",
        "did you mean file?",
    )


def test_a_kind_of_an_earlier_version_is_refused_with_the_one_it_is_now(tmp_path: Path) -> None:
    assert refusal(tmp_path, "", "rollouts.task.kind=jsonl") == (
        "recipe.yaml: rollouts.task.kind = 'jsonl': it is 'file' now",
        "write kind: file",
    )


@pytest.mark.parametrize("task", ["", "  task:\n", "  task: {dataset: chain_sum}\n"])
def test_a_task_without_a_kind_is_told_the_kinds(tmp_path: Path, task: str) -> None:
    base = f"model: {{path: builtin:tiny}}\nrollouts:\n  groups_per_step: 2\n{task}"
    assert refusal(tmp_path, base=base) == (
        "recipe.yaml: rollouts.task.kind: required",
        "set rollouts.task.kind: one of reasoning_gym, file, import",
    )


def test_a_required_key_of_an_absent_section_is_named(tmp_path: Path) -> None:
    message, hint = refusal(tmp_path, base=MINIMAL.partition("rollouts")[1] + MINIMAL.partition("rollouts")[2])
    assert message == "recipe.yaml: model.path: required"
    assert hint.startswith("set model.path: a Hugging Face folder, ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=0", "run.steps = 0: must be more than 0"),
        ("run.steps=many", "run.steps = 'many': must be a whole number"),
        ("run.steps=1.5", "run.steps = 1.5: must be a whole number"),
        ("run.seed=2147483648", "run.seed = 2147483648: must be less than 2147483648"),
        ("buffer.max_lag=-1", "buffer.max_lag = -1: must be at least 0"),
        ("trainer.eps=null", "trainer.eps = null: must be a number"),
        ("trainer.learning_rate=.inf", "trainer.learning_rate = inf: must be a finite number"),
        ("trainer.betas=[0.9, 1]", "trainer.betas = [0.9, 1]: each beta must be in [0, 1)"),
        ("trainer.betas=[0.9, 0.9, 0.9]", "trainer.betas = [0.9, 0.9, 0.9]: must have 2 values"),
        ("trainer.betas=[0.9, x]", "trainer.betas[1] = 'x': must be a number"),
        ("engine.enable_prefix_caching=maybe", "engine.enable_prefix_caching = 'maybe': must be true or false"),
        ("run.device=gpu", "run.device = 'gpu': must be 'auto', 'cpu' or 'cuda'"),
        ("rollouts.reward_weights.correct=high", "rollouts.reward_weights.correct = 'high': must be a number"),
    ],
)
def test_a_wrong_value_is_refused_with_the_key_the_value_the_rule_and_the_meaning(
    tmp_path: Path, override: str, message: str
) -> None:
    key = message.partition(" = ")[0]
    found, hint = refusal(tmp_path, "", override)
    assert found == f"recipe.yaml: {message}"
    assert hint.startswith(f"change {key}: ")
    assert len(hint) > len(f"change {key}: ")


LORA_KEYS = "put its keys under it: rank, alpha, rslora, targets"


@pytest.mark.parametrize(
    ("extra", "message", "hint"),
    [
        ("run: {device: cud}", "run.device = 'cud': must be 'auto', 'cpu' or 'cuda'", "did you mean cuda?"),
        ("run: {name: 2026}", "run.name = 2026: must be text", "put it in quotes"),
        ("trainer: {lora: 8}", "trainer.lora = 8: must be a section", "write trainer.lora.rank=8"),
        ("trainer: {lora: true}", "trainer.lora = true: must be a section", LORA_KEYS),
        ("trainer: {lora: all}", "trainer.lora = 'all': must be a section", LORA_KEYS),
        ("trainer: {betas: 0.9}", "trainer.betas = 0.9: must be a list", "put its values in brackets: [a, b]"),
        ("telemetry: {sinks: wandb}", "telemetry.sinks = 'wandb': must be a list", "put its values in brackets: [a, b]"),
        ("    params:", "rollouts.task.params = null: must be a mapping", "write {} for an empty one"),
        (
            "  group_size: 512\nengine: {max_num_seqs: 256}",
            "rollouts.group_size = 512 is more than engine.max_num_seqs = 256",
            "raise engine.max_num_seqs",
        ),
        (
            "  group_size: 512\nengine: {kind: transformers}",
            "rollouts.group_size = 512 is more than engine.max_num_seqs = 256",
            "raise engine.max_num_seqs",
        ),
    ],
)
def test_a_wrong_value_with_one_right_fix_is_refused_with_that_fix(tmp_path: Path, extra: str, message: str, hint: str) -> None:
    assert refusal(tmp_path, extra) == (f"recipe.yaml: {message}", hint)


def test_a_number_for_a_text_key_is_refused_rather_than_guessed(tmp_path: Path) -> None:
    message, hint = refusal(tmp_path, base=MINIMAL.replace("builtin:tiny", "123"))
    assert (message, hint) == ("recipe.yaml: model.path = 123: must be text", "put it in quotes")


def test_a_long_value_is_cut_in_the_message(tmp_path: Path) -> None:
    message, _ = refusal(tmp_path, "", f"run.steps={'x' * 200}")
    assert len(message) < 120


@pytest.mark.parametrize("run", ["run:\n  steps: 1\n  seed: 2\n  steps: 3\n", "run: {steps: 1, steps: 1}\n"])
def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path, run: str) -> None:
    lines = (10, 8) if run.count("\n") > 1 else (7, 7)
    message, hint = refusal(tmp_path, run)
    assert message == f"recipe.yaml: line {lines[0]}: steps is already set on line {lines[1]}"
    assert hint == "keep one of them"


def test_a_section_given_twice_is_refused(tmp_path: Path) -> None:
    message, _ = refusal(tmp_path, "model: {path: other}\n")
    assert message == "recipe.yaml: line 7: model is already set on line 1"


def test_broken_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    message, hint = refusal(tmp_path, "run: {steps: [}\n")
    assert message.startswith("recipe.yaml: line 7: not valid YAML: ")
    assert hint == "fix it there, or quote the value"


@pytest.mark.parametrize("base", ["", "- a\n", "just words\n"])
def test_a_recipe_that_is_no_mapping_is_refused(tmp_path: Path, base: str) -> None:
    message, hint = refusal(tmp_path, base=base)
    assert message == "recipe.yaml: a recipe is a mapping of sections"
    assert hint == "start with `model:` and `rollouts:`"


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"(?s)not a text file.*hint: save the recipe as UTF-8"):
        load_recipe(tmp_path / "recipe.yaml")


def test_a_missing_recipe_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"(?s)dmeo.yaml: no such recipe.*hint: did you mean .*/demo.yaml\?"):
        load_recipe(tmp_path / "dmeo.yaml")


@pytest.mark.parametrize("path", ["vowels", "vowels.Vowels", "tasks/vowels.py:Vowels"])
def test_a_path_that_names_no_class_gets_the_way_to_write_it(tmp_path: Path, path: str) -> None:
    base = f"model: {{path: builtin:tiny}}\nrollouts: {{task: {{kind: import, path: {path!r}}}}}\n"
    assert refusal(tmp_path, base=base) == (
        f"recipe.yaml: rollouts.task.path = {path!r}: names no class of a module",
        "write module:Class, such as vowels:Vowels for vowels.py",
    )


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("steps=20", "did you mean run.steps=20?"),
        ("run.steps", "for example run.steps=20"),
        ("rollouts=4", "rollouts is a section; `redline keys rollouts` lists its keys"),
        ("run.=20", "for example run.steps=20"),
        ("=20", "for example run.steps=20"),
    ],
)
def test_an_override_of_another_form_is_refused(tmp_path: Path, override: str, hint: str) -> None:
    message, found = refusal(tmp_path, "", override)
    assert message == f"override {override!r} is not of the form section.key=value"
    assert found == hint


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    message, hint = refusal(tmp_path, "", "model.path.x=2")
    assert message == "override 'model.path.x=2': model.path is a value, not a section"
    assert hint == "set model.path itself"


def test_an_override_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    message, hint = refusal(tmp_path, "", "trainer.betas=[0.9")
    assert message.startswith("override 'trainer.betas=[0.9': line 1: not valid YAML: ")
    assert hint == "fix it there, or quote the value"


def test_a_mapping_from_code_is_validated_in_the_same_words() -> None:
    two = r"(?s)^recipe: 2 problems\n  model.path: required.*\n  rollouts.task.kind: required"
    with pytest.raises(ConfigError, match=two) as caught:
        validate({})
    assert "redline train" not in caught.value.hint  # there is no file to name


def test_a_config_cannot_be_changed() -> None:
    config = validate({"model": {"path": "builtin:tiny"}, "rollouts": {"task": {"kind": "import", "path": "a:B"}}})
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3  # type: ignore[misc]


# ── the schema itself ──────────────────────────────────────────────────────────────────────────────────────────────────


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections_in(field.annotation)
    for part in get_args(annotation):
        yield from sections_in(part)


def test_every_key_of_every_section_says_what_it_means() -> None:
    sections = set(sections_in(Config))
    assert len(sections) >= 12
    silent = [f"{s.__name__}.{name}" for s in sections for name, field in s.model_fields.items() if not field.description]
    assert silent == []


def test_a_learning_rate_that_reaches_zero_before_the_run_ends_is_refused(tmp_path: Path) -> None:
    overrides = ["run.steps=30", "trainer.schedule={kind: linear, warmup_steps: 5, decay_steps: 20}"]
    message, hint = refusal(tmp_path, "", *overrides)
    assert "the learning rate is zero from step 25 on" in message
    assert "raise trainer.schedule.decay_steps" in hint
    assert load(tmp_path, "", *overrides[1:], "run.steps=25").run.steps == 25


# ── the dtype of a CPU ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("flags\t\t: fpu sse2 avx512f avx512_bf16 amx_bf16 amx_tile", ["amx_bf16", "avx512_bf16"]),
        ("flags\t\t: fpu sse2 avx2", []),
        ("Features\t: fp asimd sve bf16 i8mm", ["bf16"]),
        ("Features\t: fp asimd asimddp", []),
    ],
    ids=["x86 with", "x86 without", "ARM with", "ARM without"],
)
def test_a_cpu_that_multiplies_bfloat16_is_known_by_its_flags(tmp_path: Path, line: str, found: list[str]) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n{line}\n")
    assert bfloat16_flags(cpuinfo) == found
    assert bfloat16_flags(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("asked", "flags", "dtype", "warns"),
    [
        ("auto", ["bf16"], "bfloat16", False),
        ("auto", [], "float32", False),
        ("bfloat16", ["bf16"], "bfloat16", False),
        ("bfloat16", [], "bfloat16", True),
        ("float32", [], "float32", False),
    ],
)
def test_bfloat16_on_a_cpu_without_it_is_never_chosen_and_warned_of_where_it_is_asked_for(
    asked: str, flags: list[str], dtype: str, warns: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules["redline.config.resolve"], "bfloat16_flags", lambda: flags)
    resolved = resolve(load(tmp_path, "", f"model.dtype={asked}", "run.device=cpu"))
    assert resolved.config.model.dtype == dtype
    assert [("model.dtype=auto" in warning) for warning in resolved.warnings] == [True] * warns


@pytest.mark.parametrize(("variable", "threads"), [("3", 3), (" 2 ,1", 2)])
def test_where_the_recipe_says_nothing_omp_num_threads_decides_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    found = resolve(load(tmp_path))
    assert (found.config.run.num_threads, found.reasons["run.num_threads"]) == (threads, "auto: OMP_NUM_THREADS")
    assert resolve(load(tmp_path, "run: {num_threads: 1}")).config.run.num_threads == 1


@pytest.mark.parametrize("variable", ["", "0", "-1", "many"])
def test_an_omp_num_threads_that_is_no_number_of_threads_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert resolve(load(tmp_path)).reasons["run.num_threads"] == "auto: cores this process may use"


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [
        (("rollouts.groups_per_step=8", "rollouts.group_size=8"), 256),
        (("rollouts.groups_per_step=64", "rollouts.group_size=8"), 512),
        (("rollouts.groups_per_step=64", "rollouts.group_size=8", "engine.max_num_seqs=300"), 300),
        (("rollouts.groups_per_step=64", "rollouts.group_size=8", "engine.max_num_seqs=256"), 256),
        (("rollouts.groups_per_step=64", "rollouts.group_size=8", "engine.kind=transformers"), 256),
        (("rollouts.groups_per_step=99", "rollouts.group_size=8", "placement.engines=2"), 396),
        (("rollouts.groups_per_step=999", "rollouts.group_size=8"), 1024),
        (("rollouts.groups_per_step=2", "rollouts.group_size=2000"), 2000),
    ],
)
def test_an_engine_has_a_row_for_each_attempt_of_a_step_where_the_recipe_does_not_say(
    tmp_path: Path, recipe: tuple[str, ...], rows: int
) -> None:
    resolved = resolve(load(tmp_path, "", *recipe))
    assert resolved.config.engine.max_num_seqs == rows
    is_ours = "engine.max_num_seqs" in resolved.reasons
    assert is_ours == (rows not in (256, 300))
    assert resolve(resolved.config).config == resolved.config
    assert changes(load(tmp_path, "", *recipe), resolved.config) == []


@pytest.mark.parametrize("asked", [5, 100_000])
def test_more_threads_than_the_machine_has_cores_become_as_many_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    """A hundred thousand would end the process without a word."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    found = resolve(load(tmp_path, "", f"run.num_threads={asked}", "model.dtype=float32"))
    assert found.config.run.num_threads == 4
    assert found.warnings == (f"run.num_threads = {asked}: this machine has 4 cores, and uses 4",)
    assert not resolve(load(tmp_path, "", "run.num_threads=4", "model.dtype=float32")).warnings


def test_relative_paths_are_resolved_where_redline_is_called_and_then_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "judge"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}")
    jsonl, imported = {"kind": "file", "path": "rows.jsonl"}, {"kind": "import", "path": "mine:Tasks"}
    for task in (jsonl, imported):
        recipe = {"model": {"path": "model"}, "rollouts": {"task": task, "reward_model": {"path": "judge"}}}
        here = resolve(validate(recipe)).config
        monkeypatch.chdir("/")
        assert resolve(validate(here.model_dump(mode="json"))).config == here
        monkeypatch.chdir(tmp_path)
        assert here.model.path == str(tmp_path / "model")
        assert here.rollouts.reward_model.path == str(tmp_path / "judge")
        assert here.run.folder == tmp_path / "runs"
        assert getattr(here.rollouts.task, "folder", here.rollouts.task.path) in (tmp_path, tmp_path / "rows.jsonl")


@pytest.mark.parametrize("path", ["builtin:tiny", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_names_of_models_that_are_no_paths_stay(tmp_path: Path, path: str) -> None:
    assert resolve(load(tmp_path, "", f"model.path={path}")).config.model.path == path


def test_a_path_that_begins_with_a_tilde_is_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    task = {"kind": "file", "path": "~/questions.jsonl"}
    config = validate({"run": {"folder": "~/runs"}, "model": {"path": "builtin:tiny"}, "rollouts": {"task": task}})
    assert config.run.folder == tmp_path / "runs"
    assert isinstance(config.rollouts.task, FileTask)
    assert config.rollouts.task.path == tmp_path / "questions.jsonl"


def test_what_a_recipe_says_otherwise_than_its_run_is_listed(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").touch()
    task = {"kind": "file", "path": str(tmp_path / "questions.jsonl")}
    values = {
        "run": {"steps": 10, "num_threads": 100_000, "device": "auto"},
        "model": {"path": "builtin:tiny"},
        "rollouts": {"task": task},
        "trainer": {"algorithm": "dapo"},
    }
    recipe = validate(values)
    run = validate(resolve(recipe).config.model_dump(mode="json"))
    assert changes(recipe, run) == []
    edited = validate({**values, "run": {"steps": 20}, "trainer": {"algorithm": "dapo", "learning_rate": 1e-4}})
    assert changes(edited, run) == ["run.steps = 20, the run has 10", "trainer.learning_rate = 0.0001, the run has 1e-06"]
    guessing = validate({**values, "engine": {"speculation": "auto"}})
    assert changes(guessing, run) == ["engine.speculation = 'auto', the run has 'off'"]
    assert changes(guessing, validate(resolve(guessing).config.model_dump(mode="json"))) == []


def test_a_run_folder_in_the_place_of_a_recipe_is_told_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path)
    assert caught.value.hint.startswith("to continue the run, add --resume; ")


def test_the_config_of_a_run_stands_for_that_run_and_not_for_the_newest_of_its_name(tmp_path: Path) -> None:
    task = {"kind": "import", "path": "tests:Fake"}
    values = {"run": {"folder": str(tmp_path), "name": "demo"}, "model": {"path": "builtin:tiny"}, "rollouts": {"task": task}}
    folders = [RunFolder.create(tmp_path, "demo") for _ in range(2)]
    for folder in folders:
        write_json(folder.config, validate(values).model_dump(mode="json"))
    assert run_to_continue(folders[0].config, [], pytest.fail)[0] == folders[0]
    recipe = tmp_path / "demo.json"
    write_json(recipe, values)
    assert run_to_continue(recipe, [], pytest.fail)[0] == folders[1]


@pytest.mark.parametrize(
    ("params", "what", "hint"),
    [
        ("{levels: {1: easy}}", "levels has the key 1, a int", "put the key in quotes"),
        ("{a: [{null: 1}]}", r"a\[0\] has the key None, a NoneType", "put the key in quotes"),
        ("{day: 2024-01-01}", r"day is datetime\.date\(2024, 1, 1\), a date", "put it in quotes"),
        ("{most: .inf}", "most is inf, no finite number", "leave it out"),
        ("{names: !!set {a}}", "names is {'a'}, a set", "write a list"),
        ("{raw: !!binary aGk=}", "raw is b'hi', a bytes", "put it in quotes"),
        (r'{half: "\ud800"}', "half a character", "give whole characters"),
        ("{itself: &x [*x]}", "holds itself", "make it flatter"),
    ],
)
@pytest.mark.parametrize("key", ["rollouts.task.params", "rollouts.environment.params", "engine.options"])
def test_params_that_a_resumed_run_would_not_have_are_refused(
    tmp_path: Path, key: str, params: str, what: str, hint: str
) -> None:
    message, fix = refusal(tmp_path, "", f"{key}={params}")
    assert re.search(f"{key} = .*: .*{what}", message), message
    assert hint in fix


def test_params_from_python_that_a_resumed_run_would_not_have_are_refused() -> None:
    for value, what in (((1, 2), "a tuple"), (Path("a"), "a PosixPath"), (10**5000, "bits"), (np.float64(0.5), "a float64")):
        with pytest.raises(ConfigError, match=what):
            validate({"model": {"path": "m"}, "rollouts": {"task": {**IMPORTED, "params": {"p": value}}}})


def test_a_run_that_goes_on_has_the_texts_that_it_began_with(tmp_path: Path) -> None:
    """YAML would read some line breaks inside a text as spaces, and take no unprintable letters."""
    odd = {"text": "a\u2028b\x85c\x7fd\U0001f600", "x" * 2000: [1e-5, 1e16, 2**70, None, True, "2024-01-01", {}]}
    config = validate({"model": {"path": "m"}, "rollouts": {"task": {**IMPORTED, "params": odd}}})
    write_json(tmp_path / "config.json", config.model_dump(mode="json"))
    task = read_recorded(tmp_path / "config.json").rollouts.task
    assert isinstance(task, ImportTask)
    assert (task.params, list(task.params)) == (odd, list(odd))


@pytest.mark.parametrize("text", ["2024-13-01", "2024-01-01 25:00:00", "1" * 5000, "!!bool maybe", "!!timestamp x"])
def test_what_looks_like_a_date_or_a_number_and_is_none_is_refused(tmp_path: Path, text: str) -> None:
    message, fix = refusal(tmp_path, "", f"rollouts.task.params={{a: {text}}}")
    assert "not valid YAML" in message
    assert fix == "put the value in quotes"
