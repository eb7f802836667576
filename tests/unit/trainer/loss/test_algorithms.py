"""Algorithms by name, what they fill in, and which combinations are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from support.paths import ROOT

from redline.config import Config, load_recipe, resolve, validate
from redline.config.algorithms import PRESETS, check_algorithm, fill_algorithm
from redline.config.sections.trainer import Algorithm
from redline.errors import ConfigError

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TASK = {"kind": "import", "path": "tests:Fake"}
every_algorithm = pytest.mark.parametrize("algorithm", get_args(Algorithm))


def recipe(**keys: Any) -> Config:
    """From `section__key` names."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": "builtin:tiny"},
        "rollouts": {"task": TASK},
        "buffer": {},
        "trainer": {},
    }
    for name, value in keys.items():
        section, _, key = name.partition("__")
        values[section][key] = value
    return validate(values)


def chosen(config: Config) -> dict[str, Any]:
    """The keys any algorithm may fill."""
    found = {}
    for key in sorted({key for preset in PRESETS.values() for key in preset}):
        section, _, field = key.partition(".")
        found[key] = getattr(getattr(config, section), field)
    return found


def refusal(**keys: Any) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        resolve(recipe(**keys))
    return caught.value.message, caught.value.hint


# ── what a name fills in ───────────────────────────────────────────────────────────────────────────────────────────────

GRPO = {
    "rollouts.advantages": "group",
    "rollouts.max_extra_rounds": 0,
    "rollouts.overlong_fraction": 0.0,
    "trainer.aggregation": "sequence_mean",
    "trainer.clip_high": 0.2,
    "trainer.clip_low": 0.2,
    "trainer.kl_estimator": "k3",
    "trainer.kl_in": "loss",
    "trainer.loss": "clip",
    "trainer.mini_batches": 1,
}


def test_a_recipe_that_says_nothing_is_grpo_without_kl() -> None:
    config = resolve(recipe()).config
    assert config.trainer.algorithm == "grpo"
    assert chosen(config) == GRPO
    assert (config.trainer.kl_coef, config.trainer.entropy_coef, config.trainer.mismatch.kind) == (0, 0, "none")
    assert (config.needs_reference, config.needs_critic, config.trains_on_every_attempt) == (False, False, False)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes_of_ours_are_grpo(path: Path) -> None:
    assert chosen(resolve(load_recipe(path, ["run.device=cpu"])).config) == GRPO


@every_algorithm
def test_a_name_fills_its_keys_with_the_reason_and_nothing_else(algorithm: str) -> None:
    resolved = resolve(recipe(trainer__algorithm=algorithm, rollouts__groups_per_step=32))
    assert chosen(resolved.config) == GRPO | PRESETS[algorithm]
    for key in PRESETS[algorithm]:
        assert resolved.reasons[key] == f"algorithm: {algorithm}"


@every_algorithm
def test_what_a_name_fills_in_is_a_valid_recipe_that_resolves_to_itself(algorithm: str) -> None:
    """A run folder keeps the filled recipe, and a resumed run reads it."""
    first = resolve(recipe(trainer__algorithm=algorithm)).config
    again = resolve(validate(first.model_dump(mode="json")))
    assert again.config == first
    assert not set(again.reasons) & set(PRESETS[algorithm])


def test_the_recipes_own_words_stand_even_where_they_are_the_default() -> None:
    resolved = resolve(recipe(trainer__algorithm="dapo", trainer__clip_high=0.2, rollouts__max_extra_rounds=1))
    assert (resolved.config.trainer.clip_high, resolved.config.rollouts.max_extra_rounds) == (0.2, 1)
    assert resolved.config.trainer.aggregation == "token_mean"
    assert "trainer.clip_high" not in resolved.reasons


def test_a_batch_with_fewer_groups_than_the_paper_has_mini_batches_is_divided_into_its_groups() -> None:
    resolved = resolve(recipe(trainer__algorithm="dapo", rollouts__groups_per_step=6))
    assert resolved.config.trainer.mini_batches == 6
    why = "algorithm: dapo has 16, but the step only rollouts.groups_per_step = 6 groups"
    assert resolved.reasons["trainer.mini_batches"] == why


def test_more_mini_batches_than_groups_are_refused() -> None:
    message, hint = refusal(trainer__mini_batches=5, rollouts__groups_per_step=4)
    assert message == "trainer.mini_batches = 5: a step has rollouts.groups_per_step = 4 groups to divide"
    assert hint == "set trainer.mini_batches to 4 or less, and trainer.epochs for more updates"


@pytest.mark.parametrize(
    ("keys", "recomputes", "reason"),
    [
        ({}, False, "one update per step"),
        ({"trainer__mini_batches": 4}, True, "4 updates per step"),
        ({"trainer__epochs": 2}, True, "2 updates per step"),
        ({"trainer__algorithm": "gspo", "trainer__mini_batches": 1}, False, "one update per step"),
        ({"trainer__algorithm": "gspo", "trainer__mini_batches": 1, "model__dtype": "bfloat16"}, True, "bfloat16's rounding"),
        ({"trainer__algorithm": "cispo"}, False, "cispo has no clip around the policy of the step's beginning"),
    ],
)
def test_the_old_policy_is_chosen_with_the_reason(keys: dict[str, Any], recomputes: bool, reason: str) -> None:
    resolved = resolve(recipe(**{"model__dtype": "float32", **keys}))
    assert resolved.config.trainer.recompute_old_logprobs is recomputes
    assert reason in resolved.reasons["trainer.recompute_old_logprobs"]
    assert resolve(recipe(**keys, trainer__recompute_old_logprobs=True)).config.trainer.recompute_old_logprobs is True


@pytest.mark.parametrize("keys", [{"buffer__max_lag": 1}, {"trainer__mismatch": "token_mask"}])
def test_a_correction_over_several_updates_needs_the_logprobs_of_the_beginning(keys: dict[str, Any]) -> None:
    message, hint = refusal(trainer__recompute_old_logprobs=False, trainer__epochs=2, **keys)
    assert message.startswith("trainer.recompute_old_logprobs = false: ")
    assert "gone after the first of 2 updates" in message
    assert hint == "set trainer.recompute_old_logprobs to auto, or trainer.mini_batches and trainer.epochs to 1"
    resolve(recipe(trainer__recompute_old_logprobs=False, **keys))


def test_cispo_with_lag_takes_the_sampler_for_the_old_policy() -> None:
    message, hint = refusal(trainer__algorithm="cispo", trainer__recompute_old_logprobs=True, buffer__max_lag=1)
    assert message.startswith("trainer.recompute_old_logprobs = true: ")
    assert hint == "set trainer.recompute_old_logprobs to auto"


def test_filling_leaves_the_recipe_as_it_was() -> None:
    config = recipe(trainer__algorithm="gspo")
    fill_algorithm(config)
    assert config.trainer.loss == "clip"


@every_algorithm
def test_no_name_switches_on_a_kl_that_needs_a_reference_policy(algorithm: str) -> None:
    assert not resolve(recipe(trainer__algorithm=algorithm)).config.needs_reference


def test_only_ppo_has_a_critic() -> None:
    with_critic = [name for name in get_args(Algorithm) if resolve(recipe(trainer__algorithm=name)).config.needs_critic]
    assert with_critic == ["ppo"]


@pytest.mark.parametrize(
    ("keys", "every"),
    [
        ({}, False),
        ({"rollouts__advantages": "leave_one_out"}, False),
        ({"rollouts__advantages": "batch"}, True),
        ({"rollouts__advantages": "batch_baseline"}, True),
        ({"rollouts__advantages": "gae"}, True),
        ({"trainer__kl_coef": 0.1}, True),
        ({"trainer__entropy_coef": 0.1}, True),
    ],
)
def test_attempts_without_advantage_are_trained_on_where_something_else_moves_them(keys: dict[str, Any], every: bool) -> None:
    assert resolve(recipe(**keys)).config.trains_on_every_attempt == every


# ── what is refused ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("advantages", ["group", "group_centred", "leave_one_out", "batch_baseline"])
def test_a_group_of_one_has_nobody_to_be_compared_with(advantages: str) -> None:
    message, hint = refusal(rollouts__group_size=1, rollouts__advantages=advantages)
    assert message == f"rollouts.group_size = 1: rollouts.advantages = '{advantages}' compares attempts at the same task"
    assert hint == "set rollouts.group_size to 2 or more, or rollouts.advantages to batch or gae"


@pytest.mark.parametrize("algorithm", ["reinforce_pp", "ppo"])
def test_a_group_of_one_is_enough_where_the_group_is_no_baseline(algorithm: str) -> None:
    assert resolve(recipe(rollouts__group_size=1, trainer__algorithm=algorithm)).config.rollouts.group_size == 1


@pytest.mark.parametrize("advantages", ["batch", "gae"])
def test_dynamic_sampling_is_refused_where_every_group_teaches(advantages: str) -> None:
    message, hint = refusal(rollouts__max_extra_rounds=2, rollouts__advantages=advantages)
    assert message.startswith("rollouts.max_extra_rounds = 2: ")
    assert hint == "set rollouts.max_extra_rounds to 0, or rollouts.advantages to group"


@pytest.mark.parametrize("advantages", ["group", "group_centred", "leave_one_out"])
def test_a_kl_in_the_reward_is_refused_where_advantages_are_made_before_it_is_known(advantages: str) -> None:
    keys = {"trainer__kl_coef": 0.1, "trainer__kl_in": "reward", "rollouts__advantages": advantages}
    message, hint = refusal(**keys)
    assert message.startswith("trainer.kl_in = 'reward': ")
    assert "before any KL is known" in message
    assert hint == "set trainer.kl_in to loss, or rollouts.advantages to batch_baseline, batch or gae"
    resolve(recipe(**keys | {"rollouts__advantages": "batch_baseline"}))
    resolve(recipe(**keys | {"trainer__kl_coef": 0.0}))


def test_k1_in_the_loss_is_refused_because_it_holds_nothing_back() -> None:
    message, hint = refusal(trainer__kl_coef=0.1, trainer__kl_estimator="k1")
    assert "its gradient is zero on average" in message
    assert hint == "set trainer.kl_estimator to k3 or k2, or trainer.kl_in to reward"


@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_gspo_with_a_correction_of_single_tokens_is_refused(kind: str) -> None:
    message, hint = refusal(trainer__algorithm="gspo", trainer__mismatch=f"token_{kind}")
    assert message == f"trainer.mismatch = 'token_{kind}': trainer.loss = 'gspo' weighs whole sequences, not tokens"
    assert hint == f"set trainer.mismatch to geometric_{kind}"
    resolve(recipe(trainer__algorithm="gspo", trainer__mismatch=f"geometric_{kind}"))
    resolve(recipe(trainer__algorithm="gspo", trainer__mismatch=f"sequence_{kind}"))


def test_a_dual_clip_inside_the_clip_range_is_refused() -> None:
    message, hint = refusal(trainer__dual_clip=1.1)
    assert message == "trainer.dual_clip = 1.1: must be more than 1 + trainer.clip_high = 1.2"
    assert hint == "set trainer.dual_clip to 3, or to null for no bound"


def test_every_loss_goes_with_every_mean_and_every_group_estimator() -> None:
    for loss in ("clip", "gspo", "cispo", "reinforce"):
        for aggregation in ("sequence_mean", "token_mean", "constant"):
            for advantages in ("group", "group_centred", "leave_one_out", "batch", "batch_baseline", "gae"):
                keys = {"trainer__loss": loss, "trainer__aggregation": aggregation, "rollouts__advantages": advantages}
                check_algorithm(recipe(**keys))


def test_the_key_of_earlier_versions_is_refused_with_what_to_write_instead() -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(rollouts__normalize_advantages=False)
    assert caught.value.message == "recipe: rollouts.normalize_advantages: no longer a key"
    assert caught.value.hint == "write rollouts.advantages: group for true, group_centred for false"


def test_a_mistyped_algorithm_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(trainer__algorithm="drgrpo")
    assert caught.value.hint == "did you mean dr_grpo?"
