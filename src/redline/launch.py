"""Config → placed, connected stages → a run. The only place that decides what runs where."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from redline import loop
from redline.buffer import GroupBuffer, GroupStore, MemoryStore, TrajectoryStore
from redline.buffer.store.segments import SEGMENT_BYTES
from redline.config import Config, Resolved
from redline.engine import NativeEngine
from redline.errors import ModelError
from redline.models.decoder import Decoder
from redline.models.files.hf import AnyDecoder, load_decoder, load_tokenizer, save_folder, stop_token_ids
from redline.models.files.sources import model_folder
from redline.models.lora.trainable import merged_tensors, save_adapter
from redline.models.sizes.in_use import MemoryUse
from redline.models.sizes.peak import find_peak
from redline.ports import Engine, Rollouts
from redline.preflight import LoadedTasks, check_placement, load_tasks
from redline.rollouts import BackgroundRollouts, Chat, SingleTurnRollouts, SteppedElsewhere
from redline.rollouts.prompts import Prompts, prompt_limit
from redline.rollouts.rewards.reward_model import RewardModel
from redline.rollouts.tasks.sources import JsonlTasks
from redline.telemetry import Progress, Recorder, RunFolder, describe_environment, process_start_ns, recording, span, write_json
from redline.telemetry.console.progress import sample_table
from redline.telemetry.files.durable import replacing_folder
from redline.telemetry.files.failure import recording_failure
from redline.telemetry.files.metrics import MetricsLog
from redline.telemetry.files.set_aside import set_everything_aside
from redline.telemetry.listeners import Listeners
from redline.telemetry.machine.device_time import DeviceTimer
from redline.telemetry.machine.host import Host
from redline.telemetry.machine.nvml import find_gpus
from redline.telemetry.machine.samplers import Sampler, Source, read_samples
from redline.telemetry.processes import expecting_processes
from redline.telemetry.profiling.profiler import StepProfiler
from redline.telemetry.sinks import make_sinks
from redline.telemetry.stalls.watchdog import Watchdog
from redline.telemetry.summary.failed_attempts import WORTH_SAYING
from redline.telemetry.summary.learning import Learning
from redline.telemetry.summary.targets import summary_line, target_table, verdicts
from redline.trainer import PolicyTrainer
from redline.types import Task, Trajectory
from redline.watch import RunWatch, saying_how_to_continue
from redline.weight_sync import SharedWeightSync

KERNEL_CACHE_CAPACITY = 128
"""Shapes. The layers of a step share a dozen, and decoding returns to some dozens."""


@dataclass(slots=True)
class Stages:
    """The five stages of one process, connected."""

    rollouts: Rollouts
    attempts: SingleTurnRollouts
    """What the rollouts are made of; answers held-out tasks too."""
    buffer: GroupBuffer
    trainer: PolicyTrainer
    weight_sync: SharedWeightSync
    engine: NativeEngine
    shared_engine: Engine
    """The engine as the loop may use it: where rollouts run in the background, only between two of its steps."""
    decoder: AnyDecoder
    source: Path
    """The folder the model was loaded from."""
    store: GroupStore
    held_out: list[Task]

    def evaluate(self, tasks: Sequence[Task]) -> list[list[Trajectory]]:
        """Afterwards the engine forgets the prompts, so that no training sample depends on whether there was an evaluation."""
        rollouts = self.rollouts
        with rollouts.paused(self.buffer.patience_s) if isinstance(rollouts, BackgroundRollouts) else nullcontext():
            attempts = self.attempts.evaluate(tasks)
            self.engine.reset_prefix_cache()
            return attempts

    def memory(self) -> Counter[str]:
        """Bytes by kind that the stages hold."""
        kinds = Counter(self.trainer.memory())
        for stage in (self.engine, self.attempts):
            kinds.update(stage.memory())
        return kinds

    def queues(self) -> dict[str, float]:
        """How much waits where; whoever asks does not wait for it."""
        metrics, stats = self.buffer.metrics, self.engine.stats
        rewards = self.rollouts.rewards if isinstance(self.rollouts, BackgroundRollouts) else None
        return {
            "buffer: groups under way": metrics["buffer/in_flight"],
            "buffer: groups that may be under way or waiting": metrics["buffer/target"],
            **({"rollouts: groups to score": rewards.num_to_score} if rewards else {}),
            **({"rollouts: workers that score": rewards.num_scoring} if rewards else {}),
            "engine: sequences running": stats.running,
            "engine: sequences waiting": stats.waiting,
            "engine: KV blocks in use": stats.kv_blocks_used,
            "engine: KV blocks": stats.kv_blocks_total,
        }

    def close(self) -> None:
        if isinstance(self.rollouts, BackgroundRollouts):
            self.rollouts.close()
        self.attempts.close()
        self.store.close()


def train(
    resolved: Resolved, folder: RunFolder, *, resume: bool, from_scratch: bool = False, tasks: LoadedTasks | None = None
) -> dict[str, Any]:
    """Run to the last step, or to an interrupt. Returns what `--json` prints. The folder gets its config.json once nothing is
    left that can be refused without loading weights; until then an error takes it away again. `from_scratch` moves what the
    folder holds aside and begins at step 0; `tasks` are those of the recipe where the caller has loaded them already."""
    config = resolved.config
    recorder = Recorder(keep_spans=config.telemetry.trace or "opentelemetry" in config.telemetry.sinks)
    recorder.add("run.startup", process_start_ns(), time.perf_counter_ns())
    with (
        recording(recorder),
        folder.locked(),
        saying_how_to_continue(folder),
        recording_failure(folder),
        expecting_processes(folder.spans),
        ExitStack() as at_end,
    ):
        with span("run.setup"):
            prepare_process(config)
            check_placement(config)
            tasks = tasks or load_tasks(config)
            aside, resume = (set_everything_aside(folder), False) if from_scratch else (None, resume)
            if config.run.device == "cuda":
                recorder.time_device(DeviceTimer(lambda: torch.cuda.Event(enable_timing=True), keep_spans=recorder.keep_spans))
            progress = Progress(config.run.steps)
            for note in (f"run folder {folder.shown}", *resolved.warnings):
                progress.note(note)
            if aside:
                progress.note(f"beginning at step 0; what was there is in {aside}")
            listeners = Listeners(tell=progress.note)
            watchdog = Watchdog(recorder, tell=progress.note, send=listeners.alert)
            for listener in (watchdog, *make_sinks(config.telemetry)):  # what the first finds at the end, the others hear
                listeners.add(listener)
            listeners.started(folder, config)
            at_end.callback(_close_listeners, listeners)
            if not resume:
                _describe(config, folder)
        with span("run.setup"):
            stages = build(config, folder, progress, tasks)
        watchdog.begin(stages.queues)
        profiler = StepProfiler(folder, config, recorder, progress.note)
        at_end.callback(profiler.close)
        with span("run.setup"):
            watch = RunWatch(
                config,
                folder,
                recorder,
                progress,
                stages.trainer,
                lambda: stages.engine.stats,
                stages.evaluate,
                stages.held_out,
                stages.trainer.flush,
                lambda: _buffer_metrics(stages.buffer, progress),
                listeners,
                _peak_flops(config, progress),
                stages.store.flush,
                profiler=profiler,
            )
            if resume:
                watch.resume()
                stages.buffer.resume(stages.trainer.version)
                _describe(config, folder)  # now that nothing can be refused any more: run.steps may be a new number
                if watch.num_groups_counted is not None:
                    watch.take_over(stages.buffer.not_counted(watch.num_groups_counted))
                progress.note(f"continuing after step {stages.trainer.version}")
        try:
            with _sampling(config, folder, stages, progress):
                _run(config, stages, watch, progress, folder, profiler)
        finally:
            with span("run.close"):
                stages.close()
            watch.close()
    return _summary(config, folder, stages, watch, recorder, progress)


def _describe(config: Config, folder: RunFolder) -> None:
    write_json(folder.config, config.model_dump(mode="json"))
    if not folder.environment.exists():
        write_json(folder.environment, describe_environment())


def _peak_flops(config: Config, progress: Progress) -> float | None:
    device, dtype = torch.device(config.run.device), getattr(torch, config.model.dtype)
    peak = find_peak(device, dtype, config.telemetry.peak_tflops)
    if peak is None:
        return None
    progress.note(f"MFU is a share of {peak.flops / 1e12:,.4g} TFLOP/s, {peak.why}")
    return peak.flops


def _sampling(config: Config, folder: RunFolder, stages: Stages, progress: Progress) -> AbstractContextManager[object]:
    """While it is open, host, memory and GPU are looked at now and then."""
    every_s, device = config.telemetry.sample_every_s, torch.device(config.run.device)
    if not every_s:
        return nullcontext()
    uuids = [f"GPU-{torch.cuda.get_device_properties(device).uuid}"] if device.type == "cuda" else []
    gpus = find_gpus(uuids, progress.note)
    sources: list[Source] = [Host(), MemoryUse(device, stages.memory), *([gpus] if gpus else [])]
    return Sampler(folder.samples, every_s, sources, step=lambda: stages.trainer.version, tell=progress.note)


def _close_listeners(listeners: Listeners) -> None:
    with span("telemetry.close"):
        listeners.close()


def build(config: Config, folder: RunFolder, progress: Progress, tasks: LoadedTasks | None = None) -> Stages:
    """The five stages, connected. `tasks` are those of the recipe where the caller has loaded them already."""
    check_placement(config)
    tasks = tasks or load_tasks(config)
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
    attempts = SingleTurnRollouts(
        tasks.source,
        engine,
        chat,
        config.rollouts,
        stop_token_ids(source, tokenizer),
        config.run.seed,
        judge,
        tasks.num_workers,
        max_prompt_tokens,
        engine.check,
    )
    rollouts, shared_engine = _place_rollouts(config, attempts, engine, trainer)
    store = _make_store(config, folder, progress.note)
    return Stages(
        rollouts=rollouts,
        attempts=attempts,
        buffer=GroupBuffer(
            config.buffer,
            config.rollouts.groups_per_step,
            store,
            keep_silent=config.trains_on_every_attempt,
            max_extra_rounds=config.rollouts.max_extra_rounds,
            workers=rollouts.rewards if isinstance(rollouts, BackgroundRollouts) else None,
            steps=config.run.steps,
            sampled_tokens=rollouts.sampled_tokens if isinstance(rollouts, BackgroundRollouts) else lambda number: (),
        ),
        trainer=trainer,
        weight_sync=SharedWeightSync(trainer.weights().tensors),
        engine=engine,
        shared_engine=shared_engine,
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


def _place_rollouts(
    config: Config, attempts: SingleTurnRollouts, engine: NativeEngine, trainer: PolicyTrainer
) -> tuple[Rollouts, Engine]:
    """In lockstep rollouts and trainer take turns in one thread, else each has its own, and on a CPU its own cores."""
    if config.buffer.max_lag == 0:
        return attempts, engine
    device, num_threads = torch.device(config.run.device), config.run.num_threads or 1

    def prepare_thread() -> None:
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(device))
        else:
            torch.set_num_threads(max(1, num_threads // 2))

    if device.type == "cpu":
        torch.set_num_threads(max(1, num_threads - num_threads // 2))

    def wait_for_device() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    rollouts = BackgroundRollouts(attempts, engine, prepare_thread, wait_for_device)
    shared = SteppedElsewhere(engine, rollouts)
    trainer.before_update, trainer.after_update = shared.hold, wait_for_device
    return rollouts, shared


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


def _run(
    config: Config, stages: Stages, watch: RunWatch, progress: Progress, folder: RunFolder, profiler: StepProfiler
) -> None:
    with watch.stopping_on_interrupt():
        if stages.trainer.version == 0:
            watch.evaluate(0)
        with progress:
            watch.begin()
            loop.run(
                stages.rollouts,
                stages.buffer,
                profiler.around(stages.trainer),
                stages.weight_sync,
                stages.shared_engine,
                steps=config.run.steps,
                watch=watch,
            )
    if not watch.is_complete:
        watch.checkpoint()
        return
    if stages.trainer.version not in watch.rewards:
        watch.evaluate(stages.trainer.version)
    with span("models.save"):
        _save_model(config, stages, folder)


def _buffer_metrics(buffer: GroupBuffer, progress: Progress) -> dict[str, float]:
    told = {"groups under way or waiting": buffer.decision, "workers for rewards": buffer.worker_decision}
    for what, decision in told.items():
        if decision.is_change or decision.is_news:
            numbers = f"{decision.old} → {decision.new}" if decision.is_change else f"{decision.new}"
            progress.note(f"buffer: {numbers} {what}, {decision.why}")
    return buffer.metrics


def _save_model(config: Config, stages: Stages, folder: RunFolder) -> None:
    """The policy as a Hugging Face folder; an adapter also by itself, as PEFT has it."""
    dtype, tensors = getattr(torch, config.model.dtype), stages.trainer.masters
    if config.trainer.lora.rank:
        assert isinstance(stages.decoder, Decoder)
        with replacing_folder(folder.adapter) as adapter:
            save_adapter(adapter, stages.decoder, config.trainer.lora, str(stages.source), tensors)
        tensors = merged_tensors(stages.decoder, tensors)
    with replacing_folder(folder.model) as model:
        save_folder(model, stages.decoder, stages.source, dtype, tensors)


def prepare_process(config: Config) -> None:
    """Settings that belong to the process, not to a stage."""
    torch.set_num_threads(config.run.num_threads or 1)
    if config.run.device == "cpu" and sys.platform == "linux":
        _bound_kernel_caches()
        _keep_freed_memory()


def _bound_kernel_caches() -> None:
    """torch caches a compiled product for each shape it has met, a thousand by default. Packed batches have a new shape at
    every step, and what is kept of each lies between the large blocks of the heap, which then no longer fit where they were."""
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(KERNEL_CACHE_CAPACITY))


def _keep_freed_memory() -> None:
    """Let glibc reuse large blocks instead of returning them: a step allocates the same hundreds of megabytes again and again,
    and the kernel clears every page it hands out."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD


def _summary(
    config: Config, folder: RunFolder, stages: Stages, watch: RunWatch, recorder: Recorder, progress: Progress
) -> dict[str, Any]:
    """Show a person how it went, and give the same as data."""
    console, ledger = progress.console, recorder.ledger()
    finished = watch.is_complete
    if len(watch.samples) > 1:
        first, last = min(watch.samples), max(watch.samples)
        console.print(sample_table(watch.samples[first], watch.samples[last]))
    console.print(ledger.render())
    judged = verdicts(MetricsLog.read(folder.metrics), read_samples(folder.samples), config)
    console.print(summary_line(judged))
    if missed := [verdict for verdict in judged if verdict.met is False]:
        console.print(target_table(missed))
    learning = Learning(MetricsLog.read(folder.metrics), config.rollouts.group_size)
    if watch.failures.share > WORTH_SAYING:
        console.print(f"{watch.failures.sentence()}; see redline show {folder.shown} --failures", soft_wrap=True)
    for line in _what_was_learned(config, folder, learning, finished):
        console.print(line, soft_wrap=True)
    if not finished:
        console.print(f"stopped after step {stages.trainer.version}; continue with: redline train {folder.shown} --resume")
    return {
        "run": str(folder.shown),
        "steps": stages.trainer.version,
        "finished": finished,
        "model": str(folder.shown / folder.model.name) if finished else None,
        "weights_changed": learning.moved_weights,
        "why_not": learning.why_not,
        "evaluation": {str(version): reward for version, reward in sorted(watch.rewards.items())},
        "accuracy": {str(version): share for version, share in sorted(watch.accuracies.items())},
        "attempts": watch.failures.num_attempts,
        "failures": watch.failures.num_failed,
        "failure_reason": str(watch.failures.commonest) if watch.failures.commonest else None,
        "targets": [asdict(verdict) for verdict in judged],
        "unaccounted_fraction": ledger.lanes["main"].unaccounted_fraction,
        "wall_s": ledger.lanes["main"].wall_ns / 1e9,
    }


def _what_was_learned(config: Config, folder: RunFolder, learning: Learning, finished: bool) -> Iterator[str]:
    """The last lines of a run: a model is called trained only where some step has moved its weights."""
    quiet, model = learning.steps_without_signal, folder.shown / folder.model.name
    if learning.why_not is not None:
        yield f"nothing was learned: {learning.why_not}"
        kept = "only decayed" if config.trainer.weight_decay else "are those that the run began with"
        if finished:
            yield f"the weights in {model} {kept}; `redline show {folder.shown}` has the attempts and their rewards"
        return
    if quiet >= config.telemetry.alerts.no_signal_steps and "not_learning" not in config.telemetry.alerts.off:
        yield f"nothing was learned in the last {quiet} steps: all attempts of every group scored alike"
    if finished:
        yield f"trained model: {model}"
