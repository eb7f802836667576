"""What users can write. A key or an option that comes or goes shows here, in the diff of the change that does it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import typer
from pydantic import BaseModel
from support.paths import ROOT

import redline
from redline import __version__
from redline.cli import app
from redline.config import load_recipe, resolve
from redline.config.schema import Config
from redline.config.section import Entries

CONFIG_KEYS = """
buffer.depth
buffer.group_timeout_s
buffer.late_groups
buffer.max_age_steps
buffer.max_bytes
buffer.max_lag
buffer.max_reuses
buffer.order
engine.api_key_env
engine.block_size
engine.enable_prefix_caching
engine.gpu_memory_utilization
engine.kind
engine.kv_cache_memory_bytes
engine.max_model_len
engine.max_num_batched_tokens
engine.max_num_seqs
engine.options
engine.quantization
engine.record_routing
engine.served_model
engine.speculation
engine.tensor_parallel_size
engine.timeout_s
engine.url
engine.weights_folder
engine.weights_server
engine.weights_token_env
model.dtype
model.path
placement.address
placement.cluster
placement.engines
placement.join_timeout_s
placement.listen
placement.max_restarts
placement.remote_engines
placement.sleep
placement.trainers
placement.transport
rollouts.advantages
rollouts.answer_prefix
rollouts.environment.call_timeout_s
rollouts.environment.folder
rollouts.environment.keep_replies
rollouts.environment.max_tokens
rollouts.environment.max_turns
rollouts.environment.name
rollouts.environment.oversample
rollouts.environment.params
rollouts.environment.retries
rollouts.environment.run_in
rollouts.environment.timeout_s
rollouts.environment.workers
rollouts.evaluation.every
rollouts.evaluation.num_tasks
rollouts.evaluation.samples_per_task
rollouts.evaluation.stop_at
rollouts.evaluation.temperature
rollouts.group_size
rollouts.groups_per_step
rollouts.long_prompts
rollouts.max_extra_rounds
rollouts.max_new_tokens
rollouts.max_prompt_tokens
rollouts.max_reward_workers
rollouts.min_workers
rollouts.overlong_fraction
rollouts.prompt_suffix
rollouts.reward_model.max_tokens_per_batch
rollouts.reward_model.path
rollouts.reward_run_in
rollouts.reward_timeout_s
rollouts.reward_weights
rollouts.system_prompt
rollouts.task(file).answer_field
rollouts.task(file).extract
rollouts.task(file).held_out_fraction
rollouts.task(file).held_out_split
rollouts.task(file).kind
rollouts.task(file).path
rollouts.task(file).prompt_field
rollouts.task(file).split
rollouts.task(import).folder
rollouts.task(import).kind
rollouts.task(import).params
rollouts.task(import).path
rollouts.task(reasoning_gym).dataset
rollouts.task(reasoning_gym).extract
rollouts.task(reasoning_gym).held_out_fraction
rollouts.task(reasoning_gym).kind
rollouts.task(reasoning_gym).params
rollouts.task_timeout_s
rollouts.temperature
rollouts.worker_idle_s
run.checkpoint_every
run.device
run.folder
run.keep_checkpoints
run.name
run.num_threads
run.seed
run.steps
telemetry.alert_webhook
telemetry.alerts:
telemetry.alerts: abort_storm
telemetry.alerts: dead_worker
telemetry.alerts: host_memory_slope
telemetry.alerts: kv_saturation
telemetry.alerts: length_bias
telemetry.alerts: long_wait
telemetry.alerts: not_finite
telemetry.alerts: not_learning
telemetry.alerts: reward_collapse
telemetry.alerts: staleness_rise
telemetry.alerts: stall
telemetry.alerts: stalled_rollouts
telemetry.alerts: throughput_drop
telemetry.mlflow.experiment
telemetry.mlflow.tracking_uri
telemetry.nvtx
telemetry.opentelemetry.endpoint
telemetry.opentelemetry.min_span_ms
telemetry.peak_tflops
telemetry.profile:
telemetry.profile: steps
telemetry.profile: what
telemetry.prometheus.host
telemetry.prometheus.port
telemetry.sample_every_s
telemetry.sinks
telemetry.stall_after_s
telemetry.targets:
telemetry.targets: batch_size
telemetry.targets: data_percent
telemetry.targets: first_token_s
telemetry.targets: generation_tokens_per_s
telemetry.targets: gpu_utilization_percent
telemetry.targets: imbalance
telemetry.targets: memory_percent
telemetry.targets: mfu_percent
telemetry.targets: other_percent
telemetry.targets: padding_tokens
telemetry.targets: policy_lag_steps
telemetry.targets: preemptions
telemetry.targets: samples_per_hour
telemetry.targets: steps_per_hour
telemetry.targets: training_tokens_per_s
telemetry.targets: unaccounted_percent
telemetry.targets: weight_sync_percent
telemetry.targets: weight_sync_s
telemetry.trace_max_bytes
telemetry.trackio.project
telemetry.trackio.space_id
telemetry.wandb.entity
telemetry.wandb.mode
telemetry.wandb.project
telemetry.wandb.trajectories_every
trainer.aggregation
trainer.algorithm
trainer.betas
trainer.clip_high
trainer.clip_low
trainer.critic.clip
trainer.critic.learning_rate
trainer.critic.max_tokens_per_micro_batch
trainer.critic.warmup_steps
trainer.dual_clip
trainer.entropy_coef
trainer.epochs
trainer.eps
trainer.gae_gamma
trainer.gae_lambda
trainer.gradient_checkpointing
trainer.kl_coef
trainer.kl_estimator
trainer.kl_in
trainer.learning_rate
trainer.lora.alpha
trainer.lora.rank
trainer.lora.rslora
trainer.lora.targets
trainer.loss
trainer.max_bad_steps
trainer.max_grad_norm
trainer.max_tokens_per_forward
trainer.max_tokens_per_micro_batch
trainer.mini_batches
trainer.mismatch:
trainer.mismatch: correct_lag
trainer.mismatch: high
trainer.mismatch: kind
trainer.mismatch: low
trainer.offload_optimizer
trainer.optimizer_states
trainer.pipeline_parallel_size
trainer.prefetch_layers
trainer.rank_timeout_s
trainer.recompute_old_logprobs
trainer.reference_offload
trainer.replay_routing
trainer.replicate
trainer.schedule:
trainer.schedule: decay_steps
trainer.schedule: kind
trainer.schedule: min_ratio
trainer.schedule: warmup_steps
trainer.sequence_parallel_size
trainer.sharding
trainer.weight_decay
"""

COMMAND_LINE = """
redline --version
redline train RECIPE OVERRIDES --dry-run --from-scratch --json --resume
redline eval MODEL TASKS --against --json --save
redline show RUN --attempt --failures --group --json --ledger --limit --step
redline report RUN --devices --json --output --price --target
redline dash RUNS --host --port
redline serve MODEL OVERRIDES --allowed-host --api-key-env --device --dtype --host --lora --port --served-model-name --weights-token-env
redline export RUN --merge --step --to
redline join ADDRESS --device --model --port --threads --wait
redline keys PREFIX --markdown
redline plan RECIPE OVERRIDES --gpu --gpus --json --new-tokens --price --prompt-tokens --sharding --tensor-parallel
redline doctor RUN TRACES --devices --json --output --price --probe --target
redline simulate RUN OVERRIDES --json
redline tune RECIPE OVERRIDES --effect --json --max-lag --minutes --out --trials
redline profile RUN --steps --wait --what
redline repair RUN --json
redline bench CASE OVERRIDES --against --json --profile --quick --save --trl-python
redline compare A B OVERRIDES --a --b --case --effect --guard --json --max-minutes --max-pairs --metric --recipe --rounds --save --seed --tolerance
redline perf --baselines --device --json --reason --update
redline env list --json
redline env check NAME PARAMS --json --limit --say --seed --tasks
redline env play NAME PARAMS --api-key-env --json --max-tokens --model --seed --served-model-name --task --temperature --url
redline env warm NAME PARAMS --json --out --seed --states --workers
"""  # noqa: E501

PYTHON = """
BudgetError
Engine
Environment
Game
Policy
Reaction
RedlineError
Reply
ReplySoFar
Run
Task
TaskSource
ToolCall
ToolEnvironment
Turn
__version__
schema_of
span
split_held_out
tool
train
"""

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = [field.annotation, *get_args(field.annotation)]
        sections = [kind for kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if sections and issubclass(sections[0], Entries):
            yield f"{prefix}{name}:"
            yield from (f"{prefix}{name}: {entry}" for entry in sections[0].model_fields)
            continue
        if not sections:
            yield f"{prefix}{name}"
        for inside in sections:
            kind = f"({get_args(inside.model_fields['kind'].annotation)[0]})" if field.discriminator else ""
            yield from keys(inside, f"{prefix}{name}{kind}.")


def command_lines() -> Iterator[str]:
    root = typer.main.get_command(app)
    yield " ".join(["redline", *options(root)])
    for name, command in verbs(root):
        arguments = [p.name.upper() for p in command.params if p.param_type_name == "argument"]
        yield " ".join(["redline", name, *arguments, *options(command)])


def verbs(group, before: str = "") -> Iterator[tuple[str, typer.core.TyperCommand]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def options(command) -> list[str]:
    return sorted(max(p.opts, key=len) for p in command.params if p.param_type_name == "option")


def test_the_keys_of_a_recipe_are_these() -> None:
    assert sorted(keys(Config)) == CONFIG_KEYS.strip().splitlines()


def test_the_verbs_and_their_options_are_these() -> None:
    assert list(command_lines()) == COMMAND_LINE.strip().splitlines()


def test_every_key_says_what_it_is_for() -> None:
    def undocumented(section: type[BaseModel]) -> Iterator[str]:
        for name, field in section.model_fields.items():
            if not field.description:
                yield f"{section.__name__}.{name}"
            for kind in (field.annotation, *get_args(field.annotation)):
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    yield from undocumented(kind)

    assert list(undocumented(Config)) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_of_ours_is_valid(path: Path) -> None:
    config = load_recipe(path, ["run.device=cpu"])
    assert resolve(config).config.run.name == path.stem


def test_the_names_that_import_redline_gives_are_these() -> None:
    assert redline.__all__ == PYTHON.split() == sorted(redline.__all__)
    for name in redline.__all__:
        assert getattr(redline, name) is not None
        assert name in dir(redline)
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        redline.Trainer  # noqa: B018


def test_type_checkers_see_the_same_names_as_programs() -> None:
    """What is imported for them is what is loaded when it is first used."""
    tree = ast.parse(Path(redline.__file__).read_text())
    [checking] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in checking.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imports == redline._HOME
    assert Path(redline.__file__).with_name("py.typed").is_file()


def test_the_version_is_one() -> None:
    assert __version__.count(".") == 2
