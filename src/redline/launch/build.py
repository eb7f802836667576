"""Config → connected stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from redline.buffer import GroupBuffer, GroupStore, MemoryStore, TrajectoryStore
from redline.buffer.store.segments import SEGMENT_BYTES
from redline.config import Config
from redline.engine import EngineSession, NativeEngine
from redline.environments.single_turn import SingleTurn
from redline.errors import ModelError
from redline.launch.placement import Placement
from redline.launch.preflight import LoadedTasks
from redline.launch.stages import Stages
from redline.models.files.hf import load_decoder, load_tokenizer, stop_token_ids
from redline.models.files.sources import model_folder
from redline.ports import Rollouts
from redline.rollouts import Chat, Dispatcher, RolloutSetup
from redline.rollouts.prompts import Prompts, prompt_limit
from redline.rollouts.rewards.reward_model import RewardModel
from redline.rollouts.tasks.sources import JsonlTasks
from redline.telemetry import Progress, RunFolder, span
from redline.trainer import PolicyTrainer
from redline.types import Task
from redline.weight_sync import SharedStorage, WeightProtocol
from redline.weight_sync.transport import Transport

TRANSPORTS: Mapping[str, Callable[[Mapping[str, torch.Tensor]], Transport]] = {"shared": SharedStorage}
"""Name → a transport to an engine that reads these tensors."""


def build(config: Config, folder: RunFolder, progress: Progress, placement: Placement, tasks: LoadedTasks) -> Stages:
    """Load the model and make the five stages of a recipe, connected. `placement` and `tasks` are the recipe's own."""
    device, dtype = torch.device(config.run.device), getattr(torch, config.model.dtype)
    with span("models.load"):
        progress.note(f"loading {config.model.path}")
        source = model_folder(config.model.path, config.run.seed)
        tokenizer = load_tokenizer(source)
        decoder = load_decoder(source, device)
        if not decoder.plain_head:
            raise ModelError(
                f"{config.model.path}: its logits are more than a product with the output weights, which training assumes",
                "train a model whose head has no bias, scale or cap",
            )
    with span("trainer.setup"):
        trainer = PolicyTrainer(
            decoder,
            dtype,
            config.rollouts.temperature,
            config.trainer,
            advantages=config.rollouts.advantages,
            max_new_tokens=config.rollouts.max_new_tokens,
            seed=config.run.seed,
            bad_steps=folder.path / "bad-steps",
            tell=progress.note,
        )
    engine = NativeEngine(decoder, config.engine, tokenizer)
    chat = Chat(tokenizer, config.rollouts.system_prompt, config.rollouts.prompt_suffix, config.rollouts.answer_prefix)
    max_prompt_tokens = prompt_limit(config.rollouts, min(engine.limits.max_len, engine.limits.cache_tokens))
    held_out = _without_bad_prompts(tasks, Prompts(chat, config.rollouts, max_prompt_tokens, engine.check), progress)
    judge = _load_reward_model(config, device, dtype)
    session = EngineSession(engine, wait_for_device=lambda: _wait_for(device))
    setup = RolloutSetup(
        tasks=tasks.source,
        environment=SingleTurn,
        chat=chat,
        config=config.rollouts,
        stop_token_ids=stop_token_ids(source, tokenizer),
        seed=config.run.seed,
        reward_model=judge,
        max_reward_workers=tasks.num_workers,
        max_prompt_tokens=max_prompt_tokens,
        check_request=engine.check,
        group_timeout_s=config.buffer.group_timeout_s,
    )
    weight_sync = _connect(placement, trainer, engine, session)
    rollouts = _place_rollouts(placement, setup, session)
    store = _make_store(config, folder, progress.note)
    return Stages(
        rollouts=rollouts,
        buffer=GroupBuffer(
            config.buffer,
            config.rollouts.groups_per_step,
            store,
            keep_silent=config.trains_on_every_attempt,
            max_extra_rounds=config.rollouts.max_extra_rounds,
            workers=rollouts.reward_workers,
            steps=config.run.steps,
            sampled_tokens=rollouts.sampled_tokens,
        ),
        trainer=trainer,
        weight_sync=weight_sync,
        engine=engine,
        session=session,
        decoder=decoder,
        source=source,
        store=store,
        held_out=held_out,
    )


def _without_bad_prompts(tasks: LoadedTasks, prompts: Prompts, progress: Progress) -> list[Task]:
    """The held-out tasks, once the rows of a file whose prompts the model cannot take are left out of it. Any other source is
    asked for its tasks as they come: looking at all of them beforehand would take as long as the run."""
    if not isinstance(tasks.source, JsonlTasks):
        return tasks.held_out
    with span("rollouts.setup"):
        left_out = tasks.source.leave_out(prompts.refusal)
    if left_out:
        task, failure = left_out[0]
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        progress.note(f"left out of {tasks.source.path}: {task.id} ({failure.reason}){more}")
    refused = {task.id for task, _ in left_out}
    return [task for task in tasks.held_out if task.id not in refused]


def _connect(placement: Placement, trainer: PolicyTrainer, engine: NativeEngine, session: EngineSession) -> WeightProtocol:
    """Connect the trainer to an engine in its process, which reads the tensors that the trainer writes."""
    trained, device = trainer.weights().tensors, torch.device(placement.stages["trainer"].device)
    engine_tensors = {name: tensor.detach() for name, tensor in engine.decoder.named_parameters() if name in trained}

    def wait_for_device() -> None:
        if not placement.is_lockstep:  # there both launch on one stream
            _wait_for(device)

    weight_sync = WeightProtocol(TRANSPORTS["shared"](engine_tensors), session, wait_for_device)
    trainer.writing = weight_sync.writing
    return weight_sync


def _place_rollouts(placement: Placement, setup: RolloutSetup, session: EngineSession) -> Rollouts:
    """In lockstep rollouts and trainer take turns in one thread, else each has its own, and on a CPU its own cores."""
    if placement.is_lockstep:
        return Dispatcher(session, setup)
    device = torch.device(placement.stages["engine"].device)

    def prepare_thread() -> None:
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(device))
        else:
            torch.set_num_threads(placement.stages["engine"].cpu_threads)

    if device.type == "cpu":
        torch.set_num_threads(placement.stages["trainer"].cpu_threads)
    return Dispatcher(session, setup, beside=True, prepare_thread=prepare_thread)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _make_store(config: Config, folder: RunFolder, tell: Callable[[str], None]) -> GroupStore:
    """Whatever is let go, groups that may be replayed, or that a run resumed from any checkpoint kept goes back to, stay.
    Segments go as a whole, so they are a small part of what there may be."""
    buffer = config.buffer
    if not buffer.keep_trajectories:
        return MemoryStore(horizon=buffer.max_lag, numbers=folder.numbers)
    keep_steps = buffer.max_lag + 1 + config.run.keep_checkpoints * config.run.checkpoint_every
    segment_bytes = SEGMENT_BYTES if buffer.max_bytes is None else min(SEGMENT_BYTES, buffer.max_bytes // 8)
    return TrajectoryStore(
        folder.trajectories,
        buffer.max_bytes,
        buffer.max_age_steps,
        keep_steps=keep_steps,
        segment_bytes=segment_bytes,
        tell=tell,
    )


def _load_reward_model(config: Config, device: torch.device, dtype: torch.dtype) -> RewardModel | None:
    wanted = config.rollouts.reward_model
    if wanted.path is None:
        return None
    with span("models.load"):
        return RewardModel(model_folder(wanted.path, config.run.seed), device, dtype, wanted.max_tokens_per_batch)
