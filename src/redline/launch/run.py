"""A run: folder, recorder, listeners, stages, loop, summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from redline.config import Config, Resolved
from redline.errors import EngineLostError, GroupsLateError
from redline.launch.build import build
from redline.launch.checked_run import CheckedRun
from redline.launch.process import prepare_process, sparing_what_is_there
from redline.launch.ranks import closing_before_the_launcher_ends_it, num_ranks, remember_launch
from redline.launch.result import save_model
from redline.launch.resume.began_with import refuse_other_data, remember_base, remember_data
from redline.launch.resume.nothing_to_do import nothing_to_do
from redline.launch.resume.state import go_on, load
from redline.launch.stages import Stages
from redline.launch.summary import summary
from redline.models.sizes.in_use import MemoryUse
from redline.models.sizes.peak import find_peak
from redline.telemetry import Progress, Recorder, RunFolder, describe_environment, process_start_ns, recording, span, write_json
from redline.telemetry.files.failure import recording_at_once, recording_failure
from redline.telemetry.files.set_aside import set_everything_aside
from redline.telemetry.listeners import Listeners
from redline.telemetry.machine.device_time import DeviceTimer
from redline.telemetry.machine.host import Host, machine_id
from redline.telemetry.machine.hosts import HostSamples, HostSampling, Roll
from redline.telemetry.machine.nvml import find_gpus
from redline.telemetry.machine.samplers import SampleLog, Sampler, Source
from redline.telemetry.processes import expecting_processes
from redline.telemetry.profiling.profiler import StepProfiler
from redline.telemetry.sinks import make_sinks
from redline.telemetry.stalls.watchdog import Watchdog
from redline.watch.checkpoints import Checkpoints
from redline.watch.interrupts import saying_how_to_continue
from redline.watch.outputs import Outputs
from redline.watch.run_watch import RunWatch


def train(run: CheckedRun, folder: RunFolder, *, from_scratch: bool = False, began_ns: int | None = None) -> dict[str, Any]:
    """Train to the last step or to an interrupt, and return what `redline train --json` prints. The folder of a new run gets
    its config.json once nothing is left that can be refused without weights; until then an error takes the folder away again.
    Nothing is written to the folder of a run that goes on before its checkpoint is loaded. `from_scratch` moves what the folder
    holds aside and begins at step 0. The ledger begins at `began_ns`, by default with the process."""
    config, goes_on = run.resolved.config, run.folder is not None and not from_scratch
    recorder = Recorder(keep_spans=config.telemetry.trace or "opentelemetry" in config.telemetry.sinks)
    recorder.add("run.startup", began_ns or process_start_ns(), time.perf_counter_ns())
    with (
        torch.enable_grad(),  # a caller from Python may have turned it off
        recording(recorder),
        folder.locked(),
        saying_how_to_continue(folder),
        recording_failure(folder, is_resumed=goes_on) as take_up,
        expecting_processes(folder.spans),
        ExitStack() as at_end,
    ):
        progress = Progress(config.run.steps)
        if goes_on and (done := nothing_to_do(config, folder, progress.note)):
            return done
        outputs = Outputs(folder, recorder, progress, Listeners(tell=progress.note))
        with span("run.setup"):
            prepare_process(config)
            _say_what_begins(run, outputs, set_everything_aside(folder) if from_scratch else None)
            hosts = _other_hosts(config, outputs)
            stages, watch, profiler = _set_up(run, outputs, hosts, at_end, take_up if goes_on else None)
            context = min(stages.engine.limits.max_len, stages.engine.limits.cache_tokens)
        try:
            with sparing_what_is_there(), _sampling(config, outputs, stages, hosts):
                _take_steps(config, outputs, stages, watch, profiler)
        finally:
            with span("run.close"):
                stages.close()
            watch.close()
    return summary(config, outputs, watch, stages.trainer.version, context)


def _say_what_begins(run: CheckedRun, outputs: Outputs, aside: Path | None) -> None:
    for note in (f"run folder {outputs.folder.shown}", f"placement: {run.placement}", *run.resolved.warnings):
        outputs.progress.note(note)
    if aside:
        outputs.progress.note(f"beginning at step 0; what was there is in {aside}")


def _set_up(
    run: CheckedRun, outputs: Outputs, hosts: HostSamples | None, at_end: ExitStack, take_up: Callable[[], None] | None
) -> tuple[Stages, RunWatch, StepProfiler]:
    """Start listeners, build the stages and set a watch over them. `take_up` is that of a run that goes on: called once nothing
    can be refused any more, and before anything is written to its folder."""
    config, folder, tell = run.resolved.config, outputs.folder, outputs.progress.note
    if take_up:
        refuse_other_data(folder, run.tasks)
    watchdog = _add_listeners(config, outputs)
    if not take_up:
        _start_listeners(config, outputs, at_end)
        _describe(run.resolved, folder)
    stages = build(config, folder, outputs.progress, run.placement, run.tasks, hosts=hosts)
    checkpoints = Checkpoints(config.run, folder, stages.trainer, tell)
    if take_up:
        load(config, folder, stages, checkpoints)
        _start_listeners(config, outputs, at_end)
        take_up()
    else:
        remember_base(folder, stages.model.folder)
        remember_data(folder, run.tasks)
    watchdog.begin(stages.queues, stages.stacks_elsewhere)
    profiler = StepProfiler(folder, config, outputs.recorder, tell)
    at_end.callback(profiler.close)
    peak_flops = _peak_flops(config, outputs.progress)
    watch = RunWatch(config, outputs, stages, peak_flops=peak_flops, profiler=profiler, checkpoints=checkpoints)
    if take_up:
        go_on(outputs, stages, watch)
        _describe(run.resolved, folder)  # run.steps may have another value now
    return stages, watch, profiler


def _add_listeners(config: Config, outputs: Outputs) -> Watchdog:
    """Make the watchdog, which is returned, and the sinks."""
    recorder, listeners = outputs.recorder, outputs.listeners
    if config.run.device == "cuda":
        recorder.time_device(DeviceTimer(lambda: torch.cuda.Event(enable_timing=True), keep_spans=recorder.keep_spans))
    watchdog = Watchdog(recorder, tell=outputs.progress.note, send=listeners.alert)
    for listener in (watchdog, *make_sinks(config.telemetry)):  # what the first finds at the end, the others hear
        listeners.add(listener)
    return watchdog


def _start_listeners(config: Config, outputs: Outputs, at_end: ExitStack) -> None:
    """Start watchdog and sinks, and see to it that they are closed. Raises where a sink cannot work."""
    outputs.listeners.started(outputs.folder, config)
    at_end.callback(_close_listeners, outputs.listeners)


def _close_listeners(listeners: Listeners) -> None:
    with span("telemetry.close"):
        listeners.close()


def _describe(resolved: Resolved, folder: RunFolder) -> None:
    """Write what the run is and where it runs."""
    write_json(folder.config, resolved.recorded.model_dump(mode="json"))
    remember_launch(folder)
    if not folder.environment.exists():
        write_json(folder.environment, describe_environment())


def _peak_flops(config: Config, progress: Progress) -> float | None:
    """What the devices of all ranks can do in a second, where that is known: a step counts the work of all."""
    device, dtype = torch.device(config.run.device), getattr(torch, config.model.dtype)
    peak = find_peak(device, dtype, config.telemetry.peak_tflops)
    if peak is None:
        return None
    ranks = num_ranks()
    several = f"{ranks} times " if ranks > 1 else ""
    progress.note(f"MFU is a share of {several}{peak.flops / 1e12:,.4g} TFLOP/s, {peak.why}")
    return ranks * peak.flops


def _other_hosts(config: Config, outputs: Outputs) -> HostSamples | None:
    """What takes the samples of other machines; None where no samples are taken."""
    folder, every_s = outputs.folder, config.telemetry.sample_every_s
    if not every_s:
        return None
    sampling = HostSampling(every_s, str(folder.path.absolute()), machine_id(), has_gpus=config.run.device == "cuda")
    return HostSamples(folder.samples_elsewhere, sampling, outputs.progress.note)


@contextmanager
def _sampling(config: Config, outputs: Outputs, stages: Stages, hosts: HostSamples | None) -> Iterator[None]:
    """Inside the block a thread measures host, memory and GPU every `telemetry.sample_every_s` seconds, and so do processes of
    the run on other machines."""
    every_s, device, tell = config.telemetry.sample_every_s, torch.device(config.run.device), outputs.progress.note
    if hosts is None:
        yield
        return
    uuids = [f"GPU-{torch.cuda.get_device_properties(device).uuid}"] if device.type == "cuda" else []
    gpus = find_gpus(uuids, tell)
    sources: list[Source] = [Host(Roll(hosts.sampling).others), MemoryUse(device, stages.memory), *([gpus] if gpus else [])]
    log = SampleLog(outputs.folder.samples)
    with hosts, Sampler(log, every_s, sources, step=lambda: stages.trainer.version, tell=tell):
        yield


def _take_steps(config: Config, outputs: Outputs, stages: Stages, watch: RunWatch, profiler: StepProfiler) -> None:
    """Evaluate, run the loop, evaluate again and save the model; or, after an interrupt, a checkpoint."""
    with closing_before_the_launcher_ends_it(), watch.interrupts.listening(), recording_at_once(outputs.folder):
        if stages.trainer.version == 0:
            watch.evaluate(0)
        with outputs.progress:
            watch.begin()
            try:
                stages.run(watch, config.run.steps, profiler.around(stages.trainer))
            except (EngineLostError, GroupsLateError):  # the trainer is not at fault, and has what no engine has
                watch.keep()
                raise
    if not watch.is_complete:
        watch.checkpoint()
        return
    if stages.trainer.version not in watch.evaluations.rewards:
        watch.evaluate(stages.trainer.version)
    with span("models.save"):
        save_model(config, stages.model, stages.trainer.masters, outputs.folder, stages.trainer.version)
