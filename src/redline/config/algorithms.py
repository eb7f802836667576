"""Algorithms by name: what each fills in, and which combinations of keys are refused. Loads no torch.

An algorithm is nothing but values for ordinary keys; whatever the recipe says itself stands. docs/algorithms.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from redline.config.schema import Algorithm, Config
from redline.errors import ConfigError

PRESETS: Mapping[Algorithm, Mapping[str, Any]] = {
    "grpo": {},  # what the schema says
    "dr_grpo": {"rollouts.advantages": "group_centred", "trainer.aggregation": "constant"},
    # The numbers are those of the paper's run: 4096 of 20480 tokens, and at most ten rounds of sampling in all.
    "dapo": {
        "trainer.clip_high": 0.28,
        "trainer.aggregation": "token_mean",
        "rollouts.max_extra_rounds": 9,
        "rollouts.overlong_fraction": 0.2,
    },
    "rloo": {"rollouts.advantages": "leave_one_out", "trainer.loss": "reinforce", "trainer.aggregation": "constant"},
    "reinforce_pp": {"rollouts.advantages": "batch", "trainer.kl_in": "reward", "trainer.kl_estimator": "k1"},
    "gspo": {"trainer.loss": "gspo", "trainer.clip_low": 3e-4, "trainer.clip_high": 4e-4},
    "cispo": {
        "trainer.loss": "cispo",
        "trainer.aggregation": "token_mean",
        "trainer.clip_low": 1.0,
        "trainer.clip_high": 4.0,
    },
    "ppo": {
        "rollouts.advantages": "gae",
        "trainer.aggregation": "token_mean",
        "trainer.kl_in": "reward",
        "trainer.kl_estimator": "k1",
    },
}
"""No algorithm switches a KL term on: it costs a reference policy, and `trainer.kl_coef` asks for it."""

_GROUP_BASELINES = ("group", "group_centred", "leave_one_out", "batch_baseline")


def fill_algorithm(config: Config) -> tuple[Config, dict[str, str]]:
    """The config with the keys of `trainer.algorithm` that the recipe left open, and the reason of each."""
    name = config.trainer.algorithm
    updates: dict[str, dict[str, Any]] = {"rollouts": {}, "trainer": {}}
    for key, value in PRESETS[name].items():
        section, _, field = key.partition(".")
        if field not in getattr(config, section).model_fields_set:
            updates[section][field] = value
    filled = {section: getattr(config, section).model_copy(update=values) for section, values in updates.items()}
    reasons = {f"{section}.{field}": f"algorithm: {name}" for section, values in updates.items() for field in values}
    return config.model_copy(update=filled), reasons


def check_algorithm(config: Config) -> None:
    """Refuse what cannot work. `effects.py` knows what would be ignored."""
    for message, hint in _objections(config):
        raise ConfigError(message, hint)


def _objections(config: Config) -> Iterator[tuple[str, str]]:
    """Message and fix of everything wrong with how losses, advantages and corrections are put together."""
    yield from _objections_to_advantages(config)
    yield from _objections_to_loss(config)


def _objections_to_advantages(config: Config) -> Iterator[tuple[str, str]]:
    rollouts, trainer = config.rollouts, config.trainer
    if rollouts.group_size == 1 and rollouts.advantages in _GROUP_BASELINES:
        yield (
            f"rollouts.group_size = 1: rollouts.advantages = {rollouts.advantages!r} compares attempts at the same task",
            "set rollouts.group_size to 2 or more, or rollouts.advantages to batch or gae",
        )
    if rollouts.max_extra_rounds and rollouts.advantages not in _GROUP_BASELINES:
        yield (
            f"rollouts.max_extra_rounds = {rollouts.max_extra_rounds}: with rollouts.advantages = {rollouts.advantages!r}"
            " a group whose attempts all scored alike teaches as well as any",
            "set rollouts.max_extra_rounds to 0, or rollouts.advantages to group",
        )
    if trainer.kl_coef and trainer.kl_in == "reward" and rollouts.advantages in ("group", "group_centred", "leave_one_out"):
        yield (
            f"trainer.kl_in = 'reward': rollouts.advantages = {rollouts.advantages!r} is computed when the group is scored,"
            " before any KL is known",
            "set trainer.kl_in to loss, or rollouts.advantages to batch_baseline, batch or gae",
        )


def _objections_to_loss(config: Config) -> Iterator[tuple[str, str]]:
    trainer = config.trainer
    if trainer.kl_coef and trainer.kl_in == "loss" and trainer.kl_estimator == "k1":
        yield (
            "trainer.kl_estimator = 'k1': as a term of the loss its gradient is zero on average, and holds nothing back",
            "set trainer.kl_estimator to k3 or k2, or trainer.kl_in to reward",
        )
    if trainer.loss == "gspo" and trainer.mismatch.startswith("token_"):
        whole = trainer.mismatch.replace("token_", "sequence_")
        yield (
            f"trainer.mismatch = {trainer.mismatch!r}: trainer.loss = 'gspo' weighs whole sequences, not tokens",
            f"set trainer.mismatch to {whole}",
        )
    if trainer.dual_clip is not None and trainer.loss == "clip" and trainer.dual_clip <= 1 + trainer.clip_high:
        yield (
            f"trainer.dual_clip = {trainer.dual_clip}: must be more than 1 + trainer.clip_high = {1 + trainer.clip_high:g}",
            "set trainer.dual_clip to 3, or to null for no bound",
        )
