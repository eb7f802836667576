"""A run: folder, recorder, listeners, stages, loop, summary."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from redline.config import Config, Resolved
from redline.launch.build import build
from redline.launch.nothing_to_do import nothing_to_do
from redline.launch.placement import check_placement
from redline.launch.preflight import LoadedTasks, load_tasks
from redline.launch.process import prepare_process
from redline.launch.stages import Stages
from redline.launch.summary import summary
from redline.models.decoder import Decoder
from redline.models.files.hf import save_folder
from redline.models.lora.trainable import merged_tensors, save_adapter
from redline.models.sizes.in_use import MemoryUse
from redline.models.sizes.peak import find_peak
from redline.telemetry import Progress, Recorder, RunFolder, describe_environment, process_start_ns, recording, span, write_json
from redline.telemetry.files.durable import replacing_folder
from redline.telemetry.files.failure import recording_failure
from redline.telemetry.files.set_aside import set_everything_aside
from redline.telemetry.listeners import Listeners
from redline.telemetry.machine.device_time import DeviceTimer
from redline.telemetry.machine.host import Host
from redline.telemetry.machine.nvml import find_gpus
from redline.telemetry.machine.samplers import Sampler, Source
from redline.telemetry.processes import expecting_processes
from redline.telemetry.profiling.profiler import StepProfiler
from redline.telemetry.sinks import make_sinks
from redline.telemetry.stalls.watchdog import Watchdog
from redline.watch.checkpoints import Checkpoints
from redline.watch.interrupts import saying_how_to_continue
from redline.watch.outputs import Outputs
from redline.watch.run_watch import RunWatch


def train(
    resolved: Resolved,
    folder: RunFolder,
    *,
    resume: bool,
    from_scratch: bool = False,
    tasks: LoadedTasks | None = None,
    began_ns: int | None = None,
) -> dict[str, Any]:
    """Run to the last step, or to an interrupt. Returns what `--json` prints. The folder gets its config.json once nothing is
    left that can be refused without loading weights; until then an error takes it away again. `from_scratch` moves what the
    folder holds aside and begins at step 0; `tasks` are those of the recipe where the caller has loaded them already.
    The ledger begins at `began_ns`, or with the process."""
    config = resolved.config
    recorder = Recorder(keep_spans=config.telemetry.trace or "opentelemetry" in config.telemetry.sinks)
    recorder.add("run.startup", began_ns or process_start_ns(), time.perf_counter_ns())
    with (
        recording(recorder),
        folder.locked(),
        saying_how_to_continue(folder),
        recording_failure(folder, is_resumed=resume and not from_scratch) as take_up,
        expecting_processes(folder.spans),
        ExitStack() as at_end,
    ):
        progress = Progress(config.run.steps)
        if resume and not from_scratch and (done := nothing_to_do(config, folder, progress.note)):
            return done
        with span("run.setup"):
            prepare_process(config)
            check_placement(config)
            tasks = tasks or load_tasks(config)
            aside, resume = (set_everything_aside(folder), False) if from_scratch else (None, resume)
            if config.run.device == "cuda":
                recorder.time_device(DeviceTimer(lambda: torch.cuda.Event(enable_timing=True), keep_spans=recorder.keep_spans))
            for note in (f"run folder {folder.shown}", *resolved.warnings):
                progress.note(note)
            if aside:
                progress.note(f"beginning at step 0; what was there is in {aside}")
            listeners = Listeners(tell=progress.note)
            watchdog = Watchdog(recorder, tell=progress.note, send=listeners.alert)
            for listener in (watchdog, *make_sinks(config.telemetry)):  # what the first finds at the end, the others hear
                listeners.add(listener)
            if not resume:
                listeners.started(folder, config)
                at_end.callback(_close_listeners, listeners)
                _describe(config, folder)
        with span("run.setup"):
            stages = build(config, folder, progress, tasks)
            checkpoints = Checkpoints(config.run, folder, stages.trainer, progress.note)
            if resume:
                _load(stages, checkpoints)
                listeners.started(folder, config)
                at_end.callback(_close_listeners, listeners)
                take_up()  # nothing can be refused any more, and nothing of the run was written so far
        watchdog.begin(stages.queues)
        profiler = StepProfiler(folder, config, recorder, progress.note)
        at_end.callback(profiler.close)
        with span("run.setup"):
            outputs = Outputs(folder, recorder, progress, listeners)
            peak_flops = _peak_flops(config, progress)
            watch = RunWatch(config, outputs, stages, peak_flops=peak_flops, profiler=profiler, checkpoints=checkpoints)
            if resume:
                watch.resume()
                _describe(config, folder)  # run.steps may be a new number
                if watch.rows.num_groups_counted is not None:
                    watch.take_over(stages.buffer.not_counted(watch.rows.num_groups_counted))
                progress.note(f"continuing after step {stages.trainer.version}")
        try:
            with _sampling(config, folder, stages, progress):
                _run(config, stages, watch, progress, folder, profiler)
        finally:
            with span("run.close"):
                stages.close()
            watch.close()
    return summary(config, folder, stages, watch, recorder, progress)


def _load(stages: Stages, checkpoints: Checkpoints) -> None:
    """Bring trainer and buffer back to the newest checkpoint. Raises `RedlineError` where the run cannot go on."""
    try:
        with span("run.resume"):
            checkpoints.load_newest()
            stages.buffer.resume(stages.trainer.version)
    except BaseException:
        stages.close()
        raise


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


def _run(
    config: Config, stages: Stages, watch: RunWatch, progress: Progress, folder: RunFolder, profiler: StepProfiler
) -> None:
    with watch.interrupts.listening():
        if stages.trainer.version == 0:
            watch.evaluate(0)
        with progress:
            watch.begin()
            stages.run(watch, config.run.steps, profiler.around(stages.trainer))
    if not watch.is_complete:
        watch.checkpoint()
        return
    if stages.trainer.version not in watch.evaluations.rewards:
        watch.evaluate(stages.trainer.version)
    with span("models.save"):
        _save_model(config, stages, folder)


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
