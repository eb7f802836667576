"""What runs where: which stage in which process and thread, on which device, and how weights get to the engines. A recipe that
cannot be placed is refused here, before anything loads and before there is a run folder. Importing this file loads no torch.

    buffer.max_lag: 0         main: rollouts ─► engine ─► buffer ─► trainer ─► weight_sync, in turn
    buffer.max_lag: 1…        main: buffer ─► trainer ─► weight_sync        rollouts: rollouts ─► engine, beside it
    placement.engines: 1…     the same threads, but engines in processes of their own; rollouts send requests there
    placement.remote_engines  some of these processes are on other machines, and join the run from there
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from redline.config import Config, EngineRecipe
from redline.errors import ConfigError
from redline.launch.joining import address_to_join, note_on
from redline.launch.ranks import check_ranks

MAIN = "main"
"""The thread of the loop."""
BESIDE = "rollouts"
"""The thread of rollouts that run beside the trainer."""
ENGINE = "engine"
"""The thread of an engine in a process of its own."""
TRAINER_GPU = "cuda:0"
"""The trainer's GPU, as this process counts them."""
WHY_TRANSPORT = {
    "shared": "engine and trainer have one set of weights",
    "cuda_ipc": "engines are on the trainer's machine",
    "broadcast": "trainer and engines form a process group",
    "checkpoint_engine": "every version is written to the run folder, and engines read it there",
    "http": "the engine is a server",
}
"""Transport → why it is taken, or what it does."""


@dataclass(slots=True, frozen=True)
class Place:
    """Where a stage runs."""

    thread: str
    """The thread's lane in the ledger."""
    device: str
    """`cpu`, `cuda` or `cuda:1`: where its tensors are."""
    cpu_threads: int
    """Threads of its CPU kernels."""
    process: int = 0
    """0 is the process of the loop; engines of their own have 1, 2, …"""
    width: int = 1
    """Processes that divide an engine among them; on GPUs each has one, from `device` on."""
    joins_at: str = ""
    """`host:port` of the run, where the process is on another machine and joins from there; empty on this one."""

    def __str__(self) -> str:
        if self.joins_at:
            return f"process {self.process}, on a machine that joins at {self.joins_at} ({self.device})"
        kernels = f", {self.cpu_threads} CPU thread{'s' if self.cpu_threads > 1 else ''}" if self.device == "cpu" else ""
        if self.width == 1:
            return f"process {self.process}, thread {self.thread} ({self.device}{kernels})"
        where = f"cpu{kernels} each" if self.device == "cpu" else f"{self.width} GPUs from {self.device} on"
        return f"process {self.process}, thread {self.thread}, divided among {self.width} processes ({where})"


@dataclass(slots=True, frozen=True)
class Placement:
    """Every stage of a run and its place."""

    stages: Mapping[str, Place]
    """Name of the stage → its place. Engines in processes of their own are not among them."""
    transport: str = "shared"
    """What brings weights to the engines."""
    engines: tuple[Place, ...] = ()
    """Engines in processes of their own."""
    notes: tuple[str, ...] = ()
    """What a person may want to know: who shares what."""

    @property
    def num_processes(self) -> int:
        return 1 + len(self.engines)

    @property
    def is_lockstep(self) -> bool:
        """Whether rollouts and trainer take turns in one thread."""
        return self.stages["rollouts"].thread == self.stages["trainer"].thread

    def shares_gpu(self, place: Place) -> bool:
        """Whether an engine in a process of its own has a GPU together with the trainer or with another engine."""
        is_here = place.device != "cpu" and not place.joins_at
        return is_here and (place.device == TRAINER_GPU or self.engines_on(place.device) > 1)

    def engines_on(self, device: str) -> int:
        """How many processes of engines there are on a device of this machine."""
        return sum(place.device == device and not place.joins_at for place in self.engines)

    def __str__(self) -> str:
        """`rollouts, engine: process 0, thread rollouts (cpu, 1 CPU thread); buffer, …`."""
        there: dict[Place, list[str]] = {}
        for stage, place in (*self.stages.items(), *(("engine", place) for place in self.engines)):
            there.setdefault(place, []).append(stage)
        stages = "; ".join(f"{', '.join(stages)}: {place}" for place, stages in there.items())
        how = f"; weights by {self.transport}: {WHY_TRANSPORT[self.transport]}" if self.transport != "shared" else ""
        return stages + how + "".join(f"; {note}" for note in self.notes)


def place(config: Config, num_gpus: int | None = None) -> Placement:
    """Place the stages of a resolved recipe. Raises `ConfigError` for one that needs what this version or machine lacks.
    `num_gpus` is what the machine has, by default as many as this process sees."""
    check_ranks(config)
    _refuse_offload_on_cpu(config)
    _refuse_sleep_without_effect(config)
    _refuse_engines_elsewhere(config)
    _refuse_engines_divided(config)
    joins_at = address_to_join(config) if config.placement.remote_engines else ""
    threads, device = config.run.num_threads or 1, config.run.device
    # On a CPU two threads that work at once divide the cores; on a GPU their kernels run there, and each may use all cores.
    count, remote = config.placement.engines, config.placement.remote_engines
    divides = bool(config.buffer.max_lag) and device == "cpu" and (not count or remote < count)
    of_main, of_engines = (threads - threads // 2, threads // 2) if divides else (threads, threads)
    main = Place(MAIN, device, max(1, of_main))
    beside = Place(BESIDE, device, max(1, of_engines)) if config.buffer.max_lag else main
    stages = {"rollouts": beside, "engine": beside, "buffer": main, "trainer": main, "weight_sync": main}
    if not count:
        return Placement(stages, _transport(config, ()))
    del stages["engine"]
    here = _engine_places(config, of_engines, visible_gpus() if num_gpus is None else num_gpus)
    _refuse_others_on_the_trainers_gpu(config, here)
    engines = (
        *here,
        *(Place(ENGINE, device, 0, process, joins_at=joins_at) for process in range(count - remote + 1, count + 1)),
    )
    notes = _who_shares(config, here, threads) + ([note_on(config)] if remote else [])
    return Placement(stages, _transport(config, engines), engines, tuple(filter(None, notes)))


def _transport(config: Config, engines: tuple[Place, ...]) -> str:
    """The transport of a recipe. Raises `ConfigError` for one that cannot reach the recipe's engines."""
    wanted = config.placement.transport
    if config.engine.kind == "openai" or wanted == "http":
        return _transport_to_server(config)
    elsewhere = [place.device for place in engines if place.device not in ("cpu", TRAINER_GPU) and not place.joins_at]
    crosses = bool(elsewhere) or any(place.joins_at for place in engines) or not _has_shared_memory()
    fits = "shared" if not engines else "broadcast" if crosses else "cuda_ipc"
    if wanted == "auto":
        return fits
    if wanted == "shared" and engines:
        raise ConfigError(
            f"placement.transport = shared: {len(engines)} engines in processes of their own do not read the trainer's weights",
            f"leave it out, which takes {fits}; or set placement.engines=0 to sample in the trainer's process",
        )
    if wanted != "shared" and not engines:
        raise ConfigError(
            f"placement.transport = {wanted}: the engine is in the trainer's process and reads its weights; nothing moves",
            "leave it out; or set placement.engines=1 for an engine in a process of its own",
        )
    if wanted == "cuda_ipc":
        _check_shared_memory(config, engines, elsewhere, fits)
    return wanted


def _has_shared_memory() -> bool:
    """Whether this system has shared memory of the kind that we use, without a name: Linux's."""
    return hasattr(os, "memfd_create")


def _check_shared_memory(config: Config, engines: tuple[Place, ...], elsewhere: Sequence[str], fits: str) -> None:
    """Raise `ConfigError` where `cuda_ipc` does not reach these engines; `elsewhere` are their devices beside the trainer's."""
    otherwise = f"leave it out, which takes {fits}"
    if any(place.joins_at for place in engines):
        why = "engines on other machines do not see the memory of this one"
        otherwise += "; or checkpoint_engine, where all machines see the run folder"
    elif config.engine.kind != "native" and config.run.device == "cuda":
        why = f"engine.kind = {config.engine.kind} loads weights from host memory"
    elif elsewhere:
        why = f"the trainer is on {TRAINER_GPU}, and an engine on {elsewhere[0]} does not see it"
    elif not _has_shared_memory():
        why = "it needs shared memory without a name, which Linux has"
    else:
        return
    raise ConfigError(f"placement.transport = cuda_ipc: {why}", otherwise)


def _transport_to_server(config: Config) -> str:
    wanted, is_server = config.placement.transport, config.engine.kind == "openai"
    if is_server and wanted in ("auto", "http"):
        return "http"
    if is_server:
        raise ConfigError(
            f"placement.transport = {wanted}: the engine is a server (engine.kind = openai), which takes weights over HTTP",
            "leave it out, which takes http; or set engine.kind=native",
        )
    raise ConfigError(
        f"placement.transport = http: engine.kind = {config.engine.kind} is no server",
        "leave it out; or set engine.kind=openai and engine.url to the address of one",
    )


def _engine_places(config: Config, cpu_threads: int, num_gpus: int) -> tuple[Place, ...]:
    """A place for each engine of this machine: on a CPU with its part of the cores; on GPUs that the trainer leaves, else on
    its own."""
    count, width = config.placement.engines - config.placement.remote_engines, config.engine.tensor_parallel_size
    if config.run.device == "cpu":
        each = max(1, cpu_threads // (count * width)) if count else 1
        return tuple(Place(ENGINE, "cpu", each, number, width) for number in range(1, count + 1))
    if config.placement.cluster:  # it shows each engine GPUs of its own; here they are numbered as its bundles are
        first = config.placement.trainers
        return tuple(Place(ENGINE, f"cuda:{first + i * width}", cpu_threads, i + 1, width) for i in range(count))
    trainers = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), num_gpus)
    left = list(range(trainers, num_gpus)) or [0]
    if width > 1 and count * width > num_gpus - trainers:
        raise ConfigError(
            f"engine.tensor_parallel_size = {width}: placement.engines = {count} take {count * width} GPUs besides the"
            f" trainer's, and {num_gpus - trainers} are left",
            "lower one of them; an engine that is not divided may share the trainer's GPU",
        )
    return tuple(Place(ENGINE, f"cuda:{left[i * width % len(left)]}", cpu_threads, i + 1, width) for i in range(count))


def _who_shares(config: Config, engines: tuple[Place, ...], cores: int) -> list[str]:
    if config.run.device == "cpu":
        needed = sum(place.cpu_threads * place.width for place in engines)
        return [f"{needed} threads of engines share {cores} cores"] if needed > cores else []
    notes, whole = [], f"engine.gpu_memory_utilization = {config.engine.gpu_memory_utilization:g} of its memory"
    for device in sorted({place.device for place in engines}):
        count = sum(place.device == device for place in engines)
        if device == TRAINER_GPU:
            who = "the engine gets" if count == 1 else f"{count} engines get equal parts of"
            notes.append(f"trainer and engines share {device}: {who} what the trainer leaves of {whole}")
        elif count > 1:
            notes.append(f"{count} engines share {device}: each gets an equal part of {whole}")
    return notes


def visible_gpus() -> int:
    """How many NVIDIA GPUs this process sees, without torch."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))
    return there if named is None else len([name for name in named.split(",") if name.strip() not in ("", "-1")])


def _refuse_engines_elsewhere(config: Config) -> None:
    """Refuse engines in processes of their own where something keeps the engine in the trainer's process."""
    if config.placement.engines and config.engine.kind == "openai":
        why, fix = "engine.kind = openai: the server has processes of its own already", "set placement.engines=0"
        raise ConfigError(f"placement.engines = {config.placement.engines}: {why}", fix)


def _refuse_others_on_the_trainers_gpu(config: Config, engines: tuple[Place, ...]) -> None:
    """Refuse engines of others in processes of their own where they would share a GPU: what each may take is not known."""
    devices = [place.device for place in engines if place.device != "cpu"]
    if config.engine.kind != "native" and (TRAINER_GPU in devices or len(set(devices)) < len(devices)):
        raise ConfigError(
            f"placement.engines = {len(engines)}: engine.kind = {config.engine.kind} needs GPUs besides the trainer's",
            "lower placement.engines, set it to 0 for one in the trainer's process, or set engine.kind=native",
        )


def _refuse_engines_divided(config: Config) -> None:
    """Refuse engines of several processes where an engine must be whole, each with the change that goes with it."""
    size = config.engine.tensor_parallel_size
    if size == 1:
        return
    if config.engine.kind in ("openai", "transformers"):
        why, fix = f"engine.kind = {config.engine.kind} is not divided by it", "leave it out"
    elif not config.placement.engines:
        why = "an engine in the trainer's process is whole, since it has the trainer's weights and device"
        fix = "set placement.engines=1 for one in processes of its own"
    elif config.placement.remote_engines:
        why = "engines on machines that join are whole"
        fix = "leave it out, or set placement.remote_engines=0; placement.cluster=ray divides engines on its nodes"
    elif config.trainer.lora.rank and config.engine.kind == "native":
        why, fix = "an adapter that is trained (trainer.lora) is not divided", "leave one of them out"
    else:
        return
    raise ConfigError(f"engine.tensor_parallel_size = {size}: {why}", fix)


def _refuse_sleep_without_effect(config: Config) -> None:
    """Refuse a sleep that frees nothing for the trainer, each with the one change that makes it work or superfluous."""
    if not config.placement.sleep:
        return
    if config.run.device == "cpu":
        why, fix = "on the CPU a KV cache takes memory only once it is used", "set placement.sleep=false"
    elif config.engine.kind in ("transformers", "openai"):
        why, fix = f"engine.kind = {config.engine.kind} keeps its cache", "set placement.sleep=false, or engine.kind=native"
    elif config.placement.engines:
        why, fix = "engines in processes of their own sample while the trainer works", "set placement.sleep=false"
    elif config.buffer.max_lag:
        why, fix = "with a lag the engine samples while the trainer works", "set placement.sleep=false, or buffer.max_lag=0"
    else:
        return
    raise ConfigError(f"placement.sleep = true: {why}", fix)


def _refuse_offload_on_cpu(config: Config) -> None:
    if config.trainer.offload_optimizer and config.run.device == "cpu":
        raise ConfigError(
            "trainer.offload_optimizer: on the CPU the optimizer's state is in host memory already",
            "set trainer.offload_optimizer=false; trainer.optimizer_states=int8 makes it smaller",
        )


def check_engine_place(recipe: EngineRecipe) -> None:
    """Raise `ConfigError` where this machine has no place for an engine that runs alone. Imports torch."""
    import torch

    check_device(recipe.run.device)
    size, devices = recipe.engine.tensor_parallel_size, torch.cuda.device_count()
    if recipe.run.device == "cuda" and size > devices:
        raise ConfigError(
            f"engine.tensor_parallel_size = {size}: each process needs a GPU of its own, and there {_are(devices)}",
            f"set it to {devices}" if devices == 1 else f"set it to {devices} or less",
        )


def _are(devices: int) -> str:
    return "is 1" if devices == 1 else f"are {devices}"


def check_device(device: str) -> None:
    """Raise `ConfigError` where torch cannot use the device. Imports torch."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "run.device = cuda: there is an NVIDIA device, but torch cannot use it",
            "install a torch built for CUDA and a driver that fits it, or set run.device=cpu",
        )
