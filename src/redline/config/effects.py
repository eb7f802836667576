"""Keys that have an effect only where other keys ask for it. A recipe that sets one in vain is refused: its author expects
another run than the one that would begin. Loads no torch.

A value counts as set when it is neither the schema's default nor what `trainer.algorithm` fills in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from redline.config.algorithms import PRESETS, corrects, has_older_samples, recomputes_old_logprobs
from redline.config.engine_recipe import EngineRecipe
from redline.config.problems import Problem, spell
from redline.config.schema import Config
from redline.config.sections.engine import EngineKind
from redline.config.sections.sinks import Sink
from redline.config.sections.tasks import FileTask, ReasoningGymTask
from redline.config.sections.trainer import Loss
from redline.errors import ConfigError


@dataclass(slots=True, frozen=True)
class Readers:
    """When a key is read."""

    key: str
    """`section.key`; `section.*` is every key of that section."""
    is_read: Callable[[Config], bool]
    setting: str = ""
    """What to set, and to what, so that it is read; empty where no recipe makes a run read it."""
    switch: str = ""
    """The key of `section.*` that switches the others off: it is read."""
    why: str = ""
    """Why it is not read, where the setting does not say so."""


def _has_ratio_to_clip(config: Config) -> bool:
    """Whether the policy of an update may differ from the old policy of its loss: after the first update of a step, or where
    the old policy is that of a sampler which lags behind, or samples in whole numbers."""
    trainer = config.trainer
    is_another = config.buffer.max_lag > 0 or config.engine.quantization != "none"
    of_sampler = is_another and not corrects(config) and not trainer.recompute_old_logprobs
    return trainer.updates_per_step > 1 or of_sampler


def _of_a_ratio(key: str, *losses: Loss) -> tuple[Readers, Readers]:
    """A bound that these losses set on their ratio, unless it is always 1."""
    setting, why = "trainer.mini_batches or trainer.epochs to 2 or more", "with one update per step every ratio is 1"
    return (
        Readers(key, lambda c: c.trainer.loss in losses, "trainer.loss to clip"),
        Readers(key, lambda c: c.trainer.loss not in losses or _has_ratio_to_clip(c), setting, why=why),
    )


def _falls(config: Config) -> bool:
    return config.trainer.schedule.kind != "constant"


def _has_sink(sink: Sink) -> Callable[[Config], bool]:
    return lambda config: sink in config.telemetry.sinks


def _has_environment(config: Config) -> bool:
    return config.rollouts.environment.name is not None


ENGINE_KEYS: Mapping[str, tuple[EngineKind, ...]] = {
    **dict.fromkeys(("url", "served_model", "api_key_env", "timeout_s"), ("openai",)),
    **dict.fromkeys(("weights_token_env", "weights_folder", "weights_server"), ("openai",)),
    "options": ("vllm", "sglang"),
    **dict.fromkeys(("max_num_batched_tokens", "max_model_len"), ("native", "vllm", "sglang", "transformers")),
    **dict.fromkeys(("enable_prefix_caching", "block_size", "gpu_memory_utilization"), ("native", "vllm", "sglang")),
    "kv_cache_memory_bytes": ("native", "vllm"),
    "speculation": ("native",),
    "record_routing": ("native",),
    "quantization": ("native",),
}
"""Keys of `engine` that only some kinds of engine read, and which. Sizes are left out of those that keep them to themselves."""
OF_TRAINING = ("weights_token_env", "weights_folder", "weights_server")
"""Keys of `engine` that only a run reads, which sends weights to its engine."""


def _scores_own_tasks(config: Config) -> bool:
    return not _has_environment(config) and getattr(config.rollouts.task, "kind", "") == "import"


def _compares_answers(config: Config) -> bool:
    """Whether a reply is scored by what `extract` finds in it; also true for tasks without such a key."""
    task = config.rollouts.task
    if not isinstance(task, FileTask | ReasoningGymTask):
        return True
    return not _has_environment(config) and getattr(task, "answer_field", "") is not None


def _has_worker_processes(config: Config) -> bool:
    rollouts = config.rollouts
    return rollouts.reward_run_in == "processes" or (_has_environment(config) and rollouts.environment.run_in == "processes")


def _read_by(key: str, kinds: tuple[EngineKind, ...]) -> Readers:
    return Readers(f"engine.{key}", lambda c: c.engine.kind in kinds, f"engine.kind to {kinds[0]}")


_A_MISMATCH = "trainer.mismatch.kind to token_truncate; over a recipe that sets it, trainer.mismatch=null leaves it out"


TABLE: tuple[Readers, ...] = (
    *(_read_by(key, kinds) for key, kinds in ENGINE_KEYS.items()),
    Readers("rollouts.environment.*", _has_environment, "rollouts.environment.name", "name"),
    *(
        Readers(key, lambda c: not _has_environment(c), why=why)
        for key, why in {
            "rollouts.reward_timeout_s": "the environment scores, within rollouts.environment.timeout_s",
            "rollouts.max_reward_workers": "the environment scores",
            "rollouts.reward_model.path": "the environment scores",
            "rollouts.long_prompts": "the environment decides what is asked",
        }.items()
    ),
    Readers("rollouts.reward_run_in", _scores_own_tasks, why="only the score of a task of your own (import) may be slow"),
    *(
        Readers(key, _has_worker_processes, "rollouts.environment.run_in or rollouts.reward_run_in to processes")
        for key in ("rollouts.min_workers", "rollouts.worker_idle_s")
    ),
    Readers("rollouts.reward_model.*", lambda c: c.rollouts.reward_model.path is not None, "rollouts.reward_model.path"),
    Readers(
        "rollouts.evaluation.*",
        lambda c: c.rollouts.evaluation.num_tasks > 0,
        "rollouts.evaluation.num_tasks to 64",
        "num_tasks",
    ),
    Readers(
        "rollouts.task.held_out_fraction",
        lambda c: getattr(c.rollouts.task, "held_out_split", None) is None,
        "rollouts.task.held_out_split to null",
    ),
    Readers("rollouts.task.extract", _compares_answers, why="no reply is compared with a reference"),
    Readers("buffer.depth", lambda c: c.buffer.max_lag > 0, "buffer.max_lag to 1 or more"),
    Readers("buffer.order", lambda c: c.buffer.max_lag > 0, "buffer.max_lag to 1 or more"),
    Readers("buffer.group_timeout_s", lambda c: c.buffer.max_lag > 0, "buffer.max_lag to 1 or more"),
    Readers("buffer.max_reuses", lambda c: c.buffer.max_lag > 0, "buffer.max_lag to 1 or more"),
    Readers("buffer.max_age_steps", lambda c: c.buffer.keep_trajectories, "buffer.max_bytes to more than 0"),
    Readers("trainer.schedule.decay_steps", _falls, "trainer.schedule.kind to linear"),
    Readers("trainer.schedule.min_ratio", _falls, "trainer.schedule.kind to linear"),
    Readers("trainer.kl_in", lambda c: c.needs_reference, "trainer.kl_coef to more than 0"),
    Readers("trainer.kl_estimator", lambda c: c.needs_reference, "trainer.kl_coef to more than 0"),
    Readers("trainer.reference_offload", lambda c: c.needs_reference, "trainer.kl_coef to more than 0"),
    *_of_a_ratio("trainer.clip_low", "clip", "gspo", "cispo"),
    *_of_a_ratio("trainer.clip_high", "clip", "gspo", "cispo"),
    *_of_a_ratio("trainer.dual_clip", "clip"),
    Readers("trainer.mismatch.low", corrects, _A_MISMATCH),
    Readers("trainer.mismatch.high", corrects, _A_MISMATCH),
    Readers(
        "trainer.mismatch.correct_lag",
        lambda c: has_older_samples(c) and c.trainer.mismatch.kind == "none",
        "buffer.max_lag to 1 or more, and trainer.mismatch.kind to none",
    ),
    Readers("trainer.gae_gamma", lambda c: c.needs_critic, "rollouts.advantages to gae"),
    Readers("trainer.gae_lambda", lambda c: c.needs_critic, "rollouts.advantages to gae"),
    Readers("trainer.critic.*", lambda c: c.needs_critic, "rollouts.advantages to gae"),
    Readers(
        "trainer.max_tokens_per_forward",
        lambda c: c.needs_reference or c.needs_critic or c.needs_anchor,
        "trainer.kl_coef to more than 0, or trainer.mini_batches to 2 or more",
    ),
    Readers("trainer.prefetch_layers", lambda c: c.trainer.sharding != "none", "trainer.sharding to full"),
    Readers("trainer.replay_routing", lambda c: c.engine.record_routing, "engine.record_routing to true"),
    Readers("trainer.lora.*", lambda c: c.trainer.lora.rank > 0, "trainer.lora.rank to 16"),
    Readers(
        "placement.max_restarts",
        lambda c: c.placement.engines > 0 or c.placement.cluster is not None,
        "placement.engines to 1 or more",
    ),
    Readers("placement.listen", lambda c: c.placement.remote_engines > 0, "placement.remote_engines to 1 or more"),
    Readers("placement.join_timeout_s", lambda c: c.placement.remote_engines > 0, "placement.remote_engines to 1 or more"),
    Readers("placement.address", lambda c: c.placement.cluster is not None, "placement.cluster to ray"),
    Readers("placement.trainers", lambda c: c.placement.cluster is not None, "placement.cluster to ray"),
    Readers("telemetry.profile.steps", lambda c: c.telemetry.profile.what is not None, "telemetry.profile to e2e"),
    *(
        Readers(f"telemetry.{sink}.*", _has_sink(sink), f"telemetry.sinks to [{sink}]")
        for sink in get_args(Sink)
        if sink != "tensorboard"  # it has no keys
    ),
)


def refuse_without_effect(config: Config) -> None:
    """Raise `ConfigError` with every key that the recipe sets in vain. The algorithm's keys are filled in; what else the recipe
    left open may be so still, as in a plan for another device."""
    recomputes, _ = recomputes_old_logprobs(config.trainer, config.model.dtype, config.engine.quantization)
    decided = config.trainer.model_copy(update={"recompute_old_logprobs": recomputes})
    config = config.model_copy(update={"trainer": decided})
    _refuse([*_unread(config), *_warmups_longer_than_the_run(config), *_rewards_without_weight(config)])


def refuse_engine_keys_without_effect(recipe: EngineRecipe) -> None:
    """Raise `ConfigError` with every key of `engine` that is set in vain where an engine runs alone."""
    engine, problems = recipe.engine, []
    for key, kinds in ENGINE_KEYS.items():
        value, default = _value(recipe, f"engine.{key}")
        what = f"engine.{key} = {spell(value)}: without effect here"
        if value == default:
            continue
        if key in OF_TRAINING:
            problems.append(Problem(f"{what}: only training sends weights to a server", "leave it out"))
        elif engine.kind not in kinds:
            problems.append(Problem(what, f"leave it out, or set engine.kind to {kinds[0]}"))
    _refuse(problems)


def _refuse(problems: Sequence[Problem]) -> None:
    if not problems:
        return
    if len(problems) == 1:
        raise ConfigError(problems[0].what, problems[0].fix)
    lines = "".join(f"\n  {problem}" for problem in problems)
    raise ConfigError(f"{len(problems)} keys without effect{lines}", "leave them out, or change what each of them names")


def _unread(config: Config) -> Iterator[Problem]:
    for readers in TABLE:
        if readers.is_read(config):
            continue
        fix = f"leave it out, or set {readers.setting}" if readers.setting else "leave it out"
        for key in keys_of(readers):
            value, default = _value(config, key)
            if value not in (default, PRESETS[config.trainer.algorithm].get(key, default)):
                why = f": {readers.why}" if readers.why else ""
                yield Problem(f"{key} = {spell(value)}: without effect here{why}", fix)


def keys_of(readers: Readers) -> list[str]:
    """The keys that an entry of the table stands for."""
    if not readers.key.endswith(".*"):
        return [readers.key]
    path = readers.key.removesuffix(".*")
    section: type[BaseModel] = Config
    for part in path.split("."):
        found = section.model_fields[part].annotation
        assert isinstance(found, type)
        assert issubclass(found, BaseModel)
        section = found
    return [f"{path}.{name}" for name in section.model_fields if name != readers.switch]


def _value(config: Config | EngineRecipe, key: str) -> tuple[Any, Any]:
    """What a config has, and what it would have by default."""
    section, _, name = key.rpartition(".")
    place: Any = config
    for part in section.split("."):
        place = getattr(place, part)
    return getattr(place, name), type(place).model_fields[name].get_default(call_default_factory=True)


def _warmups_longer_than_the_run(config: Config) -> Iterator[Problem]:
    steps = config.run.steps
    given = {"trainer.schedule.warmup_steps": config.trainer.schedule.warmup_steps}
    if config.needs_critic:
        given["trainer.critic.warmup_steps"] = config.trainer.critic.warmup_steps
    for key, warmup in given.items():
        if warmup > steps:
            yield Problem(
                f"{key} = {warmup}: the run ends after step {steps}, before its learning rate is reached",
                f"lower {key}, or raise run.steps to more than {warmup}",
            )


def _rewards_without_weight(config: Config) -> Iterator[Problem]:
    """Weights that no part has, for sources whose parts are known: those of a user's own task are known when it scores."""
    weights, judged = config.rollouts.reward_weights, config.rollouts.reward_model.path is not None
    if config.rollouts.task is None or config.rollouts.task.kind == "import" or _has_environment(config):
        return
    parts = [*(["correct"] if _compares_answers(config) else []), *(["reward_model"] if judged else [])]
    for name in weights:
        if name not in parts:
            yield Problem(
                f"rollouts.reward_weights.{name} = {weights[name]:g}: the reward has no such part",
                f"leave it out; its parts: {', '.join(parts)}",
            )
    if all(weights.get(part, 1.0) == 0 for part in parts):
        yield Problem(
            f"rollouts.reward_weights: every part ({', '.join(parts)}) weighs 0, so every attempt has the same reward",
            "give at least one part a weight other than 0",
        )
