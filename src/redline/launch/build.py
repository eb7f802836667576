"""The one way to make each stage of a recipe, and to connect them.

    recipe ─┬─► policy ──► trainer ──────────────────────┬─► weight_sync
            ├─► engine side ─► engine ─► session ─┬──────┘
            ├─► tasks ────────────────────────────┴─► rollouts ─┐
            └─► store ──────────────────────────────────────────┴─► buffer

The engine side is made in `engine_side.py`, engines by themselves in `engines.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from redline.buffer import GroupBuffer, GroupStore, MemoryStore, TrajectoryStore
from redline.buffer.store.segments import SEGMENT_BYTES
from redline.config import Config
from redline.engine import EngineSession
from redline.environments.single_turn import SingleTurn
from redline.launch.engine_side import EngineSide, apart, colocated
from redline.launch.kinds import PACKAGED
from redline.launch.left_out import without_bad_prompts
from redline.launch.models import LoadedModel, load_reward_model, load_trainable_policy
from redline.launch.placement import Placement
from redline.launch.preflight import LoadedTasks
from redline.launch.stages import RunEngine, Stages
from redline.launch.starting_engines import StartingEngines
from redline.launch.trainers import make_trainer, meet_ranks
from redline.launch.workers.ray_workers import place_workers
from redline.models.prompt_logprobs import prompt_logprobs
from redline.ports import Rollouts, SteppedEngine
from redline.rollouts import Chat, Dispatcher, RolloutSetup
from redline.rollouts.prompts import prompt_limit
from redline.telemetry import Progress, RunFolder
from redline.telemetry.machine.hosts import HostSamples
from redline.trainer import PolicyTrainer
from redline.weight_sync import WeightProtocol
from redline.weight_sync.transport import Transport
from redline.weight_sync.verify import Probe

Tell = Callable[[str], None]
QUEUE_DEPTH = 2
"""Replies that environments may have under way in the engine, in units of `engine.max_num_seqs`: enough that a row which
becomes free finds the next prompt there, and few enough that groups begun earlier go first."""

PROBE_TOKENS = 32
"""Tokens of the prompt by which engines in other processes prove that they compute with the trainer's weights."""
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Mean difference of logprobs that rounding explains, by the network's type."""


def build(
    config: Config,
    folder: RunFolder,
    progress: Progress,
    placement: Placement,
    tasks: LoadedTasks,
    around_engine: Callable[[SteppedEngine], SteppedEngine] = lambda engine: engine,
    hosts: HostSamples | None = None,
) -> Stages:
    """Load the model and make the five stages of a recipe, connected. `placement` and `tasks` are the recipe's own. A benchmark
    that says more of the samples than a recipe can puts something `around_engine`. Processes on other machines sample those for
    `hosts`; without it, none does."""
    tell = progress.note
    tell(f"loading {config.model.path}")
    place_workers(config, hosts)
    parallel = meet_ranks(config, folder, hosts)
    starting = StartingEngines(config, placement, folder, tell, hosts) if placement.engines else None
    try:
        model = load_trainable_policy(config)
        trainer = make_trainer(config, model, folder, tell, parallel)
        model = replace(model, decoder=trainer.network)
        engines = apart(config, placement, starting, trainer, tell) if starting else colocated(config, model, trainer, tell)
    except BaseException:
        if starting:
            starting.close()
        raise
    try:
        return _connected(_Made(config, folder, tell, model, trainer, engines), placement, tasks, around_engine)
    except BaseException:
        engines.close()
        raise


@dataclass(slots=True, frozen=True)
class _Made:
    """Both sides of a run, not connected yet."""

    config: Config
    folder: RunFolder
    tell: Tell
    model: LoadedModel
    trainer: PolicyTrainer
    engines: EngineSide


def _connected(
    made: _Made, placement: Placement, tasks: LoadedTasks, around_engine: Callable[[SteppedEngine], SteppedEngine]
) -> Stages:
    config, model, trainer, engines = made.config, made.model, made.trainer, made.engines
    # Engines of other processes wait for their own devices.
    device = "cpu" if placement.engines else config.run.device
    session = EngineSession(around_engine(engines.engine), wait_for_device=lambda: _wait_for(device))
    setup = make_rollout_setup(config, model, engines.engine, tasks)
    held_out = without_bad_prompts(tasks, setup, made.tell)
    has_own_weights = placement.engines or config.engine.kind in (*PACKAGED, "openai")
    probe = make_probe(model) if has_own_weights else None
    weight_sync = make_weight_sync(placement, trainer, engines.transport, session, probe)
    if placement.engines or config.engine.kind == "openai":
        # At once: a transport that does not work ends the run before it begins, and a restarted engine finds a version. Until
        # then a server may have the weights of another run, and the first evaluation would measure those.
        weight_sync.engine.apply(weight_sync.publish(trainer.weights()))
    engines.join(weight_sync)
    rollouts = make_rollouts(placement, setup, session)
    store = make_store(config, made.folder, made.tell)
    return Stages(
        rollouts=rollouts,
        buffer=make_buffer(config, store, rollouts),
        trainer=trainer,
        weight_sync=weight_sync,
        synced_engine=weight_sync.engine,
        engine=engines.engine,
        close_engines=engines.close,
        session=session,
        store=store,
        model=model,
        held_out=held_out,
        sleeper=engines.sleeper,
        elsewhere=engines.elsewhere,
    )


def make_rollout_setup(config: Config, model: LoadedModel, engine: RunEngine, tasks: LoadedTasks) -> RolloutSetup:
    """Bring together what rollouts are made from: tasks, chat template, limits of the engine, a model that judges."""
    rollouts = config.rollouts
    return RolloutSetup(
        tasks=tasks.scored or tasks.source,
        environment=lambda score: tasks.environment or SingleTurn(score),
        chat=Chat(
            model.tokenizer,
            rollouts.system_prompt,
            rollouts.prompt_suffix,
            rollouts.answer_prefix,
            keeps_replies=rollouts.environment.keep_replies,
        ),
        config=rollouts,
        stop_token_ids=model.stop_token_ids,
        seed=config.run.seed,
        reward_model=load_reward_model(config),
        max_reward_workers=tasks.num_workers,
        max_prompt_tokens=prompt_limit(rollouts, min(engine.limits.max_len, engine.limits.cache_tokens)),
        check_request=engine.check,
        max_sequences=QUEUE_DEPTH * config.engine.max_num_seqs,
        group_timeout_s=config.buffer.group_timeout_s,
    )


def make_weight_sync(
    placement: Placement,
    trainer: PolicyTrainer,
    transport: Transport,
    session: EngineSession,
    probe: Callable[[], Probe] | None = None,
) -> WeightProtocol:
    """Connect the trainer to its engines. One that reads the trainer's own tensors is held while a step overwrites them. With a
    `probe`, engines prove after each update that they come to the trainer's own logprobs."""

    def wait_for_device() -> None:
        if not placement.is_lockstep:  # there both launch on one stream
            _wait_for(placement.stages["trainer"].device)

    weight_sync = WeightProtocol(transport, session, wait_for_device, probe)
    trainer.writing = weight_sync.writing
    return weight_sync


def make_probe(model: LoadedModel) -> Callable[[], Probe]:
    """Return a function that says what the trainer's network makes of a fixed prompt now."""
    decoder = model.decoder
    vocabulary = decoder.spec.vocab_size
    tokens = [(1 + 7919 * position) % vocabulary for position in range(PROBE_TOKENS)]
    tolerance = PROBE_TOLERANCE[decoder.output_weight.dtype]
    return lambda: Probe(tokens, prompt_logprobs(decoder, tokens), tolerance)


def make_rollouts(placement: Placement, setup: RolloutSetup, session: EngineSession) -> Rollouts:
    """In lockstep rollouts and trainer take turns in one thread, else each has its own, and on a CPU its own cores."""
    if placement.is_lockstep:
        return Dispatcher(session, setup)
    place = placement.stages["rollouts"]

    def prepare_thread() -> None:
        if place.device == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(place.device))
        else:
            torch.set_num_threads(place.cpu_threads)

    if place.device == "cpu":
        torch.set_num_threads(placement.stages["trainer"].cpu_threads)
    return Dispatcher(session, setup, beside=True, prepare_thread=prepare_thread)


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def make_store(config: Config, folder: RunFolder, tell: Tell) -> GroupStore:
    """Make the store that the recipe's `buffer` section asks for. Whatever a store deletes, it keeps groups that may be
    replayed, and those that a run resumed from any kept checkpoint goes back to. It deletes whole segments, so a segment is a
    small part of what may be kept."""
    buffer = config.buffer
    if not buffer.keep_trajectories:
        return MemoryStore(horizon=buffer.max_lag, under_way=folder.under_way)
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


def make_buffer(config: Config, store: GroupStore, rollouts: Rollouts) -> GroupBuffer:
    """Make the buffer between these rollouts and the trainer."""
    return GroupBuffer(
        config.buffer,
        config.rollouts.groups_per_step,
        store,
        keep_no_signal=config.trains_on_every_attempt,
        max_extra_rounds=config.rollouts.max_extra_rounds,
        workers=rollouts.reward_workers,
        steps=config.run.steps,
        sampled_tokens=rollouts.sampled_tokens,
    )
