"""Keys that nobody would read are refused, whichever they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from support.paths import ROOT

from redline.config import Config, load_recipe, refuse_without_effect, resolve, validate
from redline.config.algorithms import fill_algorithm
from redline.config.effects import TABLE, keys_of
from redline.config.problems import locate
from redline.config.sections.alerts import AlertKind, AlertsConfig
from redline.config.sections.trainer import Algorithm
from redline.errors import ConfigError

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
JSONL = {"kind": "file", "path": __file__}  # any file that is there
IMPORT = {"kind": "import", "path": "tests:Fake"}


def config(task: dict[str, Any] | None = None, **keys: Any) -> Config:
    """From `section__section__key` names."""
    values: dict[str, Any] = {"model": {"path": "builtin:tiny"}, "rollouts": {"task": task or IMPORT}}
    for name, value in keys.items():
        *sections, key = name.split("__")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return resolve(validate(values)).config


def refusal(task: dict[str, Any] | None = None, **keys: Any) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        refuse_without_effect(config(task, **keys))
    return caught.value.message, caught.value.hint


def test_the_table_names_keys_that_exist() -> None:
    for readers in TABLE:
        for key in keys_of(readers):
            assert locate(key.split(".")).field is not None, key


def test_every_kind_of_alert_is_an_entry_of_its_key() -> None:
    assert tuple(AlertsConfig.model_fields) == get_args(AlertKind)


A_MISMATCH = "trainer.mismatch.kind to token_truncate; over a recipe that sets it, trainer.mismatch=null leaves it out"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_our_own_recipes_set_nothing_in_vain(recipe: Path) -> None:
    refuse_without_effect(resolve(load_recipe(recipe, ["run.device=cpu"])).config)


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_what_an_algorithm_fills_in_is_nobodys_mistake(algorithm: str) -> None:
    """PPO says where a KL would go, and asks for none. So does the config.json that its run leaves behind."""
    found = config(trainer__algorithm=algorithm)
    refuse_without_effect(found)
    refuse_without_effect(resolve(validate(found.model_dump(mode="json"))).config)


@pytest.mark.parametrize(
    ("keys", "message", "setting"),
    [
        ({"trainer__kl_in": "reward"}, "trainer.kl_in = 'reward'", "trainer.kl_coef to more than 0"),
        ({"trainer__kl_estimator": "k2"}, "trainer.kl_estimator = 'k2'", "trainer.kl_coef to more than 0"),
        ({"trainer__reference_offload": True}, "trainer.reference_offload = true", "trainer.kl_coef to more than 0"),
        ({"trainer__dual_clip": 3.0, "trainer__loss": "cispo"}, "trainer.dual_clip = 3.0", "trainer.loss to clip"),
        ({"trainer__mismatch__low": 0.5}, "trainer.mismatch.low = 0.5", A_MISMATCH),
        ({"trainer__mismatch__high": 3.0}, "trainer.mismatch.high = 3.0", A_MISMATCH),
        ({"trainer__gae_gamma": 0.9}, "trainer.gae_gamma = 0.9", "rollouts.advantages to gae"),
        ({"trainer__gae_lambda": 1.0}, "trainer.gae_lambda = 1.0", "rollouts.advantages to gae"),
        ({"trainer__critic__learning_rate": 1e-4}, "trainer.critic.learning_rate = 0.0001", "rollouts.advantages to gae"),
        ({"trainer__lora__alpha": 64.0}, "trainer.lora.alpha = 64.0", "trainer.lora.rank to 16"),
        ({"trainer__schedule__min_ratio": 0.1}, "trainer.schedule.min_ratio = 0.1", "trainer.schedule.kind to linear"),
        ({"trainer__schedule__decay_steps": 5}, "trainer.schedule.decay_steps = 5", "trainer.schedule.kind to linear"),
        ({"trainer__prefetch_layers": 3}, "trainer.prefetch_layers = 3", "trainer.sharding to full"),
        ({"buffer__max_reuses": 2}, "buffer.max_reuses = 2", "buffer.max_lag to 1 or more"),
        ({"buffer__order": "signal_first"}, "buffer.order = 'signal_first'", "buffer.max_lag to 1 or more"),
        (
            {"buffer__max_bytes": 0, "buffer__max_age_steps": 5},
            "buffer.max_age_steps = 5",
            "buffer.max_bytes to more than 0",
        ),
        ({"buffer__group_timeout_s": 60.0}, "buffer.group_timeout_s = 60.0", "buffer.max_lag to 1 or more"),
        ({"telemetry__profile__steps": (4,)}, "telemetry.profile.steps = (4,)", "telemetry.profile to e2e"),
        (
            {"rollouts__evaluation__num_tasks": 0, "rollouts__evaluation__every": 5},
            "rollouts.evaluation.every = 5",
            "rollouts.evaluation.num_tasks to 64",
        ),
        (
            {"rollouts__reward_model__max_tokens_per_batch": 5},
            "rollouts.reward_model.max_tokens_per_batch = 5",
            "rollouts.reward_model.path",
        ),
        ({"telemetry__wandb__project": "mine"}, "telemetry.wandb.project = 'mine'", "telemetry.sinks to [wandb]"),
    ],
)
def test_a_value_that_nobody_reads_is_refused(keys: dict[str, Any], message: str, setting: str) -> None:
    assert refusal(**keys) == (f"{message}: without effect here", f"leave it out, or set {setting}")


ONE_UPDATE = "trainer.mini_batches or trainer.epochs to 2 or more"


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"buffer__max_lag": 1},
        {"buffer__max_lag": 1, "trainer__mismatch__correct_lag": False, "trainer__recompute_old_logprobs": True},
        {"trainer__mismatch": "token_mask"},
        {"trainer__algorithm": "gspo", "trainer__mini_batches": 1},
    ],
)
@pytest.mark.parametrize(("key", "value"), [("clip_low", 0.1), ("clip_high", 0.3)])
def test_a_clip_is_refused_where_every_ratio_is_1(keys: dict[str, Any], key: str, value: float) -> None:
    message, hint = refusal(**keys, **{f"trainer__{key}": value})
    assert message == f"trainer.{key} = {value}: without effect here: with one update per step every ratio is 1"
    assert hint == f"leave it out, or set {ONE_UPDATE}"


def test_a_dual_clip_is_refused_where_every_ratio_is_1() -> None:
    message, _ = refusal(trainer__dual_clip=3.0)
    assert message == "trainer.dual_clip = 3.0: without effect here: with one update per step every ratio is 1"
    refuse_without_effect(config(trainer__dual_clip=3.0, trainer__epochs=2))


@pytest.mark.parametrize(
    "keys",
    [
        {"trainer__mini_batches": 2},
        {"trainer__epochs": 2},
        {"trainer__algorithm": "ppo"},
        {"trainer__algorithm": "dapo", "buffer__max_lag": 1},
        {"buffer__max_lag": 1, "trainer__mismatch__correct_lag": False},
        {"buffer__max_lag": 1, "trainer__loss": "cispo"},
    ],
)
def test_a_clip_is_taken_where_ratios_differ_from_1(keys: dict[str, Any]) -> None:
    refuse_without_effect(config(**keys, trainer__clip_low=0.1, trainer__clip_high=0.3))


def test_a_clip_is_refused_where_the_loss_has_no_ratio() -> None:
    message, hint = refusal(trainer__algorithm="rloo", trainer__epochs=2, trainer__clip_high=0.3)
    assert (message, hint) == ("trainer.clip_high = 0.3: without effect here", "leave it out, or set trainer.loss to clip")


def test_several_are_refused_together() -> None:
    message, _ = refusal(trainer__kl_in="reward", buffer__max_reuses=2)
    assert message.startswith("2 keys without effect\n  buffer.max_reuses = 2: without effect here; leave it out")
    assert "\n  trainer.kl_in = 'reward': without effect here; leave it out" in message


def test_a_key_with_a_reader_is_taken() -> None:
    refuse_without_effect(config(buffer__max_lag=1, buffer__max_reuses=2, trainer__mismatch__high=3.0))
    refuse_without_effect(config(trainer__kl_coef=0.1, trainer__kl_estimator="k2"))
    refuse_without_effect(config(rollouts__evaluation__num_tasks=0))


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    message, hint = refusal(run__steps=10, trainer__schedule__warmup_steps=11)
    assert message == "trainer.schedule.warmup_steps = 11: the run ends after step 10, before its learning rate is reached"
    assert hint == "lower trainer.schedule.warmup_steps, or raise run.steps to more than 11"
    refuse_without_effect(config(run__steps=10, trainer__schedule__warmup_steps=10))


def test_a_reward_of_which_every_part_weighs_nothing_is_refused() -> None:
    message, hint = refusal(JSONL, rollouts__reward_weights={"correct": 0})
    assert message == "rollouts.reward_weights: every part (correct) weighs 0, so every attempt has the same reward"
    assert hint == "give at least one part a weight other than 0"


def test_a_weight_of_a_part_that_a_known_source_does_not_have_is_refused() -> None:
    message, hint = refusal(JSONL, rollouts__reward_weights={"style": 2})
    assert message == "rollouts.reward_weights.style = 2: the reward has no such part"
    assert hint == "leave it out; its parts: correct"
    refuse_without_effect(config(IMPORT, rollouts__reward_weights={"style": 2}))


def test_a_plan_takes_what_the_run_takes() -> None:
    """A plan is made for another device, so that its config is not resolved."""
    values = {"model": {"path": "builtin:tiny"}, "rollouts": {"task": IMPORT}}
    several = {"trainer": {"mini_batches": 2, "max_tokens_per_forward": 4096}}
    lagging = {"trainer": {"clip_low": 0.1, "mismatch": {"correct_lag": False}}, "buffer": {"max_lag": 1}}
    for keys in (several, lagging):
        refuse_without_effect(resolve(validate(values | keys)).config)
        refuse_without_effect(fill_algorithm(validate(values | keys))[0])


def test_rows_without_answers_need_somebody_who_scores() -> None:
    rows = JSONL | {"answer_field": None}
    with pytest.raises(ConfigError, match="nothing says what a reply is worth"):
        config(rows)
    refuse_without_effect(config(rows, rollouts__environment__name="code_rows"))


def test_what_of_a_reply_is_compared_is_refused_where_nothing_is() -> None:
    message, hint = refusal(JSONL | {"extract": "last_number"}, rollouts__environment__name="code_rows")
    assert message == "rollouts.task.extract = 'last_number': without effect here: no reply is compared with a reference"
    assert hint == "leave it out"
    refuse_without_effect(config(JSONL | {"extract": "last_number"}))


def test_a_reward_without_references_has_the_judges_part_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    rows, judge = JSONL | {"answer_field": None}, str(tmp_path)
    message, _ = refusal(rows, rollouts__reward_model__path=judge, rollouts__reward_weights={"correct": 1.0})
    assert message == "rollouts.reward_weights.correct = 1: the reward has no such part"
