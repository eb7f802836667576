"""Algorithms by name: what each fills in, and which combinations of keys are refused. Loads no torch.

An algorithm is nothing but values for ordinary keys; whatever the recipe says itself stands. docs/algorithms.md has the table.

The mini-batches are those of the papers' runs: InstructGPT's PPO has 8 of 64 prompts in one epoch (Ouyang et al. 2022,
arXiv:2203.02155, App. C.4), DAPO 16 of 512 answers (arXiv:2503.14476, §4.1), GSPO 4 (arXiv:2507.18071, §5.1), CISPO 16 updates
(MiniMax 2025, arXiv:2506.13585, §3.1). DeepSeekMath's GRPO takes one update per batch, and so do the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from redline.config.schema import Config
from redline.config.sections.engine import Quantization
from redline.config.sections.trainer import Algorithm, TrainerConfig
from redline.errors import ConfigError

PRESETS: Mapping[Algorithm, Mapping[str, Any]] = {
    "grpo": {},  # what the schema says
    "dr_grpo": {"rollouts.advantages": "group_centred", "trainer.aggregation": "constant"},
    # The numbers are those of the paper's run: 4096 of 20480 tokens, and at most ten rounds of sampling in all.
    "dapo": {
        "trainer.clip_high": 0.28,
        "trainer.aggregation": "token_mean",
        "trainer.mini_batches": 16,
        "rollouts.max_extra_rounds": 9,
        "rollouts.overlong_fraction": 0.2,
    },
    "rloo": {"rollouts.advantages": "leave_one_out", "trainer.loss": "reinforce", "trainer.aggregation": "constant"},
    "reinforce_pp": {"rollouts.advantages": "batch", "trainer.kl_in": "reward", "trainer.kl_estimator": "k1"},
    "gspo": {"trainer.loss": "gspo", "trainer.clip_low": 3e-4, "trainer.clip_high": 4e-4, "trainer.mini_batches": 4},
    "cispo": {
        "trainer.loss": "cispo",
        "trainer.aggregation": "token_mean",
        "trainer.clip_low": 1.0,
        "trainer.clip_high": 4.0,
        "trainer.mini_batches": 16,
    },
    "ppo": {
        "rollouts.advantages": "gae",
        "trainer.aggregation": "token_mean",
        "trainer.kl_in": "reward",
        "trainer.kl_estimator": "k1",
        "trainer.mini_batches": 8,
    },
}
"""No algorithm switches a KL term on: it costs a reference policy, and `trainer.kl_coef` asks for it."""

COARSE = ("int8", "fp8")
"""Rounding by which ratios of the trainer's policy to the engine's leave the usual clip range: SmolLM2's logprobs are off by
0.09 on average and 1.6 at most, and by 0.18 on average."""
_GROUP_BASELINES = ("group", "group_centred", "leave_one_out", "batch_baseline")


def fill_algorithm(config: Config) -> tuple[Config, dict[str, str]]:
    """The config with the keys of `trainer.algorithm` that the recipe left open, and the reason of each."""
    name, most = config.trainer.algorithm, config.rollouts.groups_per_step
    updates: dict[str, dict[str, Any]] = {"rollouts": {}, "trainer": {}}
    reasons: dict[str, str] = {}
    for key, value in PRESETS[name].items():
        section, _, field = key.partition(".")
        if field in getattr(config, section).model_fields_set:
            continue
        updates[section][field], reasons[key] = value, f"algorithm: {name}"
        if key == "trainer.mini_batches" and value > most:
            updates[section][field] = most
            reasons[key] = f"algorithm: {name} has {value}, but the step only rollouts.groups_per_step = {most} groups"
    filled = {section: getattr(config, section).model_copy(update=values) for section, values in updates.items()}
    return config.model_copy(update=filled), reasons


def recomputes_old_logprobs(trainer: TrainerConfig, dtype: str, quantization: Quantization = "none") -> tuple[bool, str]:
    """Whether the old policy of the loss is the trainer's own at the beginning of a step, and not the engine's; and why, where
    the recipe left it open. `dtype` is the network's: float32, bfloat16; `quantization` that of the engine."""
    if trainer.recompute_old_logprobs != "auto":
        return trainer.recompute_old_logprobs, ""
    if trainer.loss in ("cispo", "reinforce"):
        return False, f"auto: trainer.loss = {trainer.loss} has no clip around the policy of the step's beginning"
    if trainer.updates_per_step > 1:
        return True, f"auto: {trainer.updates_per_step} updates per step; one pass gives the logprobs at its beginning"
    coarse = quantization if quantization != "none" else dtype
    if coarse in COARSE or (trainer.loss == "gspo" and coarse != "float32"):
        return True, f"auto: {coarse}'s rounding between engine and trainer would be clipped; with one update it takes no pass"
    return False, "auto: one update per step"


def has_older_samples(config: Config) -> bool:
    """Whether a batch may hold samples of an older policy that its loss does not weigh (`trainer/loss/off_policy.py`)."""
    loss = config.trainer.loss
    return loss != "cispo" and (config.buffer.max_lag > 0 or (loss == "reinforce" and config.trainer.updates_per_step > 1))


def corrects(config: Config) -> bool:
    """Whether samples may be weighed by the ratio of the trainer's policy to the engine's."""
    return config.trainer.mismatch.kind != "none" or (config.trainer.mismatch.correct_lag and has_older_samples(config))


def check_algorithm(config: Config) -> None:
    """Refuse what cannot work. `effects.py` knows what would be ignored."""
    for message, hint in _objections(config):
        raise ConfigError(message, hint)


def _objections(config: Config) -> Iterator[tuple[str, str]]:
    """Message and fix of everything wrong with how losses, advantages and corrections are put together."""
    yield from _objections_to_advantages(config)
    yield from _objections_to_loss(config)
    yield from _objections_to_updates(config)


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
    if trainer.loss == "gspo" and trainer.mismatch.kind.startswith("token_"):
        whole = trainer.mismatch.kind.replace("token_", "geometric_")
        yield (
            f"trainer.mismatch = {trainer.mismatch.kind!r}: trainer.loss = 'gspo' weighs whole sequences, not tokens",
            f"set trainer.mismatch to {whole}",
        )
    if trainer.dual_clip is not None and trainer.loss == "clip" and trainer.dual_clip <= 1 + trainer.clip_high:
        yield (
            f"trainer.dual_clip = {trainer.dual_clip}: must be more than 1 + trainer.clip_high = {1 + trainer.clip_high:g}",
            "set trainer.dual_clip to 3, or to null for no bound",
        )


def _objections_to_updates(config: Config) -> Iterator[tuple[str, str]]:
    trainer, groups = config.trainer, config.rollouts.groups_per_step
    if trainer.mini_batches > groups:
        yield (
            f"trainer.mini_batches = {trainer.mini_batches}: a step has rollouts.groups_per_step = {groups} groups to divide",
            f"set trainer.mini_batches to {groups} or less, and trainer.epochs for more updates",
        )
    needs_anchor = trainer.updates_per_step > 1 and trainer.loss != "reinforce" and corrects(config)
    if needs_anchor and trainer.recompute_old_logprobs is False:
        mismatch = trainer.mismatch
        weighs = "trainer.mismatch.correct_lag" if mismatch.kind == "none" else f"trainer.mismatch = {mismatch.kind!r}"
        yield (
            f"trainer.recompute_old_logprobs = false: {weighs} weighs samples by the policy at the beginning of the step, which"
            f" is gone after the first of {trainer.updates_per_step} updates",
            "set trainer.recompute_old_logprobs to auto, or trainer.mini_batches and trainer.epochs to 1",
        )
    if trainer.recompute_old_logprobs is True and trainer.loss == "cispo" and config.buffer.max_lag and not corrects(config):
        yield (
            "trainer.recompute_old_logprobs = true: with buffer.max_lag, trainer.loss = 'cispo' weighs samples by the ratio to"
            " the engine that sampled them",
            "set trainer.recompute_old_logprobs to auto",
        )
