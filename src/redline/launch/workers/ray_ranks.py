"""Train on a Ray cluster: the driver starts the trainer's ranks, forwards what rank 0 says, and starts all of them again from
the newest checkpoint when one is lost.

    redline train … placement.cluster=ray        driver: checks, placement group, watch
      ├─ actor ─► redline train …  RANK=0          the run: loop, run folder; begins the engines (`ray_engines.py`)
      ├─ actor ─► redline train …  RANK=1          follows rank 0
      └─ …                                         as torchrun would start them

A rank that ends by itself has the last word: what it refuses is refused. One that was killed, crashed, or lost its node costs a
restart, of which `placement.max_restarts` are made.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import redline
from redline.config import Config
from redline.errors import ConfigError, RedlineError, RunFolderError
from redline.launch.checked_run import CheckedRun
from redline.launch.ranks import DIVISION
from redline.launch.workers.ray_cluster import (
    GROUP_VARIABLE,
    PASSED_ON,
    RUNTIME_VARIABLE,
    Bundle,
    bundle_resources,
    group_name,
    joined,
    room,
    runtime_env_of_job,
    wait_for_room,
)
from redline.launch.workers.ray_host import Job
from redline.launch.workers.ray_process import ActorGoneError, HostedProcess, news_of
from redline.telemetry import RunFolder

FOLDER_VARIABLE = "REDLINE_RUN_FOLDER"
"""The folder that the driver has made for a new run."""
END_S = 30.0
"""Seconds for the others to end once a rank was lost or rank 0 has ended, and for all after a second Ctrl-C."""
FOR_RANKS = (*PASSED_ON, "NO_COLOR", "OMP_NUM_THREADS")
"""Beginnings of variables that ranks get from the driver's environment."""
REFUSED, INTERRUPTED = 2, 130
"""Exit codes of a `redline train` that ended on purpose."""


def is_driver(config: Config) -> bool:
    """Whether this process is to start the others of its run. Raises `ConfigError` where torchrun has started some."""
    if config.placement.cluster != "ray" or GROUP_VARIABLE in os.environ:
        return False
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "placement.cluster = 'ray' starts the trainer's ranks, and so does torchrun",
            "start it without torchrun; placement.trainers says how many ranks there are",
        )
    return True


def train_on_ray(run: CheckedRun, *, from_scratch: bool = False) -> dict[str, Any]:
    """Train to the last step or to an interrupt, and return what `redline train --json` prints. Everything that was started has
    ended by then."""
    config, wanted = run.resolved.config, run.resolved.config.placement
    device, width = config.run.device, config.engine.tensor_parallel_size
    needed = [bundle_resources(device)] * wanted.trainers + [bundle_resources(device, width)] * wanted.engines
    one_node = wanted.engines > 0 and run.placement.transport == "cuda_ipc"
    with joined(wanted, wanted.trainers + width * wanted.engines), room(needed, one_node=one_node) as bundles:
        folder = run.folder or RunFolder.create(config.run.folder, config.run.name, given=run.given)
        try:
            return _Driver(run, folder, bundles).train(from_scratch)
        finally:
            if not folder.config.exists():  # it came to nothing, and a killed rank has not tidied up
                shutil.rmtree(folder.path, ignore_errors=True)


@dataclass(slots=True)
class _Driver:
    run: CheckedRun
    folder: RunFolder
    bundles: Sequence[Bundle]
    summary: dict[str, Any] | None = None
    """What rank 0 printed at its end."""
    stops: int = 0
    """Signals that asked the run to stop."""
    _ranks: list[HostedProcess] = field(default_factory=list)

    def train(self, from_scratch: bool) -> dict[str, Any]:
        most, lost = self.run.resolved.config.placement.max_restarts, ""
        for restart in range(most + 1):
            try:
                with self._listening():
                    lost = self._try(from_scratch)  # ranks know whether an earlier start has begun from scratch already
            finally:
                for rank in self._ranks:
                    rank.kill()
            if not lost:
                return self._result()
            if restart < most:
                _tell(f"{lost}\nall ranks begin again at the newest checkpoint (restart {restart + 1} of {most})")
        raise RedlineError(
            f"{lost}\nthat was start {most + 1} of the run, and placement.max_restarts = {most}",
            f"see why it ended; `redline train {self.folder.shown} --resume` goes on from the newest checkpoint"
            if self.folder.config.exists()
            else "see why it ended; nothing was trained yet",
        )

    def _try(self, from_scratch: bool) -> str:
        """Start all ranks and watch them to their end. Returns why one was lost; empty where all ended by themselves."""
        wait_for_room(self.bundles[0].group, [bundle.resources for bundle in self.bundles])
        trainers = self.run.resolved.config.placement.trainers  # the bundles after theirs are for engines, which rank 0 begins
        self._ranks = [HostedProcess(f"rank {index}", bundle) for index, bundle in enumerate(self.bundles[:trainers])]
        try:
            self._meet()
            for rank, job in zip(self._ranks, self._jobs(from_scratch), strict=True):
                rank.start(job)
        except ActorGoneError as gone:
            return gone.message
        self._watch()
        return "\n".join(rank.why_ended() for rank in self._ranks if _is_lost(rank))

    def _meet(self) -> None:
        """Wait for every actor, refuse nodes that cannot do their part, and give neighbouring ranks the same node."""
        abouts = {rank: rank.meet() for rank in self._ranks}
        check_nodes(self._ranks, abouts, self.folder)
        first = self._ranks[0].address
        self._ranks.sort(key=lambda rank: (rank.address != first, rank.address))
        for index, rank in enumerate(self._ranks):
            rank.name = f"rank {index}"

    def _jobs(self, from_scratch: bool) -> Iterator[Job]:
        config, ranks = self.run.resolved.recorded, self._ranks
        if self.folder.config.exists():
            kept = {"run.steps": config.run.steps} | {f"placement.{key}": value for key, value in config.placement}
            kept |= {f"trainer.{key}": getattr(config.trainer, key) for key in DIVISION}
            kept["engine.tensor_parallel_size"] = config.engine.tensor_parallel_size
            overrides = [f"{key}={json.dumps(value)}" for key, value in kept.items()]
            arguments, files = ["train", str(self.folder.path), *overrides, "--resume", "--json"], {}
        else:
            arguments, files = ["train", "{files}/recipe.yaml", "--json"], {"recipe.yaml": as_recipe(config)}
        if from_scratch:
            arguments.append("--from-scratch")
        shared = self._shared_environment()
        for index, rank in enumerate(ranks):
            beside = [other for other in ranks if other.address == rank.address]
            own = {"RANK": str(index), "LOCAL_RANK": str(beside.index(rank)), "LOCAL_WORLD_SIZE": str(len(beside))}
            if config.run.device == "cuda":  # Ray shows each of its workers one GPU: to itself it is alone on its machine
                own |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            folder = os.getcwd() if rank.call("has_folder", os.getcwd()) else None
            yield Job("redline", arguments, {**shared, **own}, folder, files)

    def _shared_environment(self) -> dict[str, str]:
        import ray

        first = self._ranks[0]
        one_node = all(rank.address == first.address for rank in self._ranks)
        return {
            **{name: value for name, value in os.environ.items() if name.startswith(FOR_RANKS)},
            "MASTER_ADDR": "127.0.0.1" if one_node else first.address,
            "MASTER_PORT": str(first.call("free_port")),
            "WORLD_SIZE": str(len(self._ranks)),
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            RUNTIME_VARIABLE: runtime_env_of_job(),
            GROUP_VARIABLE: group_name(self.bundles[0]),
            FOLDER_VARIABLE: str(self.folder.path),
        }

    def _watch(self) -> None:
        """Forward what rank 0 says until every rank has ended. Those that must end have `END_S` seconds for it."""
        deadline, sent = float("inf"), 0
        while any(rank.is_alive for rank in self._ranks):
            for rank, kind, line in news_of(self._ranks):
                if rank is self._ranks[0]:
                    self._forward(kind, line)
            if sent < self.stops:
                sent = self.stops
                self._ranks[0].send_signal(signal.SIGINT)
            if must_end(self._ranks, self.stops):
                deadline = min(deadline, time.monotonic() + END_S)
            if time.monotonic() > deadline:
                for rank in self._ranks:
                    rank.end(f"{END_S:g} s had passed since it should have")

    def _forward(self, kind: str, line: str) -> None:
        if kind == "err":
            _tell(line)
            return
        with suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict) and "finished" in document:
                self.summary = document
                return
        _tell(line)

    def _result(self) -> dict[str, Any]:
        code = self._ranks[0].code
        if self.summary is not None and code in (0, INTERRUPTED):
            return self.summary
        if code == INTERRUPTED or self.stops:
            raise KeyboardInterrupt
        ended = next((rank for rank in self._ranks if rank.code), self._ranks[0])
        if ended.code and ended is self._ranks[0]:
            raise RedlineError(f"{ended.where} ended with the error above")
        raise RedlineError(
            ended.why_ended(), f"`redline train {self.folder.shown} --resume` goes on from the newest checkpoint"
        )

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Inside the block the first Ctrl-C, SIGTERM or SIGHUP asks rank 0 to end after its step; the second ends it at once,
        and the third ends this process."""

        def stop(number: int, frame: object) -> None:
            self.stops += 1
            if self.stops > 2:
                raise KeyboardInterrupt

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def check_nodes(ranks: Sequence[HostedProcess], abouts: dict[HostedProcess, dict[str, str]], folder: RunFolder) -> None:
    """Raise `RedlineError` where a node has another redline, or does not see the run folder."""
    for rank in ranks:
        if (there := abouts[rank]["redline"]) != redline.__version__:
            raise ConfigError(
                f"{rank.where}: its node has redline {there}, the driver has {redline.__version__}",
                "install the same version on every node",
            )
    probe = folder.path / f".seen-by-all-{secrets.token_hex(8)}"
    probe.write_text(probe.name)
    try:
        blind = next((rank for rank in ranks if rank.call("reads", str(probe)) != probe.name), None)
    finally:
        probe.unlink()
    if blind:
        raise RunFolderError(
            f"run.folder: {blind.where} does not see {folder.path}, where checkpoints would be written and read",
            "set run.folder to a folder that all nodes share under the same path (NFS, Lustre, …)",
        )


def as_recipe(config: Config) -> str:
    """The resolved recipe as a file: what the driver has decided, every rank does."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def made_folder() -> RunFolder | None:
    """The folder that a driver has made for the new run of this process; None where there is no driver."""
    if FOLDER_VARIABLE not in os.environ:
        return None
    folder = RunFolder(Path(os.environ[FOLDER_VARIABLE]))
    for path in (folder.trajectories, folder.checkpoints):
        path.mkdir(parents=True, exist_ok=True)  # a start that failed early has removed them
    return folder


def must_end(ranks: Sequence[HostedProcess], stops: int) -> bool:
    """Whether the ranks that are alive are to end soon: after a second Ctrl-C, after the end of rank 0, and after a rank that
    did not end well. Where all others ended well, rank 0 has the time that it takes: it may be at a checkpoint."""
    return stops > 1 or not ranks[0].is_alive or any(not rank.is_alive and rank.code != 0 for rank in ranks)


def _is_lost(rank: HostedProcess) -> bool:
    """Whether the rank ended otherwise than on purpose, and not because the driver ended it."""
    return not rank.was_ended and (bool(rank.gone) or rank.code not in (0, REFUSED, INTERRUPTED))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
