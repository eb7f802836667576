"""How the process of an engine is started, watched and ended: on this machine by `LocalProcesses`, on others by `joined.py`.

    spawner.spawn(spec) ──► Spawned: address, token, is_alive(), kill(), why_ended()

The spec and the token travel in the environment of the new process, which other users cannot read; neither is ever among its
arguments. The process prints its address when it has loaded the model, and ends when its parent does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from redline.child import Child, ChildError
from redline.config import EngineRecipe
from redline.errors import ConfigError, EngineLostError
from redline.wire import TOKEN_VARIABLE, make_token

SPEC_VARIABLE = "REDLINE_ENGINE_SPEC"
WORKER = "redline.launch.workers.engine_worker"
START_S = 600.0
"""Seconds for a worker to load its model; the largest come from a disk at a gigabyte a second."""
REAPED_S = 1.0
"""Seconds until a process that has ended its connection is gone."""


@dataclass(slots=True, frozen=True)
class EngineSpec:
    """What the process of an engine is to hold. All of it is JSON."""

    recipe: Mapping[str, Any]
    """The dump of an `EngineRecipe`."""
    name: str = "engine 0"
    """What messages and spans call it."""
    device: str = "cpu"
    """`cpu`, `cuda`, or `cuda:1` for one of those that this process sees."""
    width: int = 1
    """Processes that divide it, with a GPU each from `device` on."""
    num_threads: int = 1
    """Threads of the CPU kernels of each of its processes."""
    host: str = "127.0.0.1"
    """The address that it listens on."""
    port: int = 0
    """The port that it listens on; 0 is any that is free."""
    remote: bool = False
    """Whether it runs on another machine, where somebody has started `redline join`."""
    spans: str | None = None
    """The run's folder of spans; None records none."""
    lora: Mapping[str, Any] | None = None
    """The dump of a `LoraConfig`, where the policy is a frozen network with an adapter that the trainer trains."""
    sampling: Mapping[str, Any] | None = None
    """The fields of a `HostSampling`: how it samples its machine; None samples nothing."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineSpec:
        return cls(**json.loads(text))

    def engine_recipe(self) -> EngineRecipe:
        """The recipe with this spec's device and threads."""
        run = {**self.recipe["run"], "device": self.device.partition(":")[0], "num_threads": self.num_threads}
        return EngineRecipe.model_validate({**self.recipe, "run": run})

    def environment(self, token: str) -> dict[str, str]:
        """What its process finds in its environment: this spec, the token, and the GPUs that it may use."""
        found = {SPEC_VARIABLE: self.to_json(), TOKEN_VARIABLE: token}
        _, _, index = self.device.partition(":")
        if index:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            wanted = range(int(index), int(index) + self.width)
            found["CUDA_VISIBLE_DEVICES"] = ",".join(
                _visible_gpu(visible.split(","), gpu) if visible else str(gpu) for gpu in wanted
            )
        return found


def _visible_gpu(visible: Sequence[str], index: int) -> str:
    if index >= len(visible):
        why = f"cuda:{index}: CUDA_VISIBLE_DEVICES = {','.join(visible)} shows {len(visible)}"
        raise ConfigError(why, "name one of those, from cuda:0 on")
    return visible[index]


class Spawned(Protocol):
    """A worker that was started, wherever it runs."""

    @property
    def address(self) -> str:
        """`host:port`, where it listens."""
        ...

    @property
    def token(self) -> str:
        """What it demands of who connects."""
        ...

    def is_alive(self) -> bool: ...

    def kill(self) -> None:
        """End it at once, also where it is stopped. Returns when it is gone."""
        ...

    def why_ended(self) -> str:
        """How it ended and the last lines that it wrote; empty while it is alive. Waits a second for one that is ending."""
        ...


def wait_for_end(is_alive: Callable[[], bool]) -> None:
    """Block until a process that may be ending is gone, for `REAPED_S` seconds at most."""
    deadline = time.monotonic() + REAPED_S
    while is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)


class Spawner(Protocol):
    """Starts workers."""

    def spawn(self, spec: EngineSpec) -> Spawned:
        """Start a worker and block until it listens. Raises EngineLostError, with what it said last, where it does not."""
        ...


class LocalProcesses:
    """Starts workers on this machine. Implements `Spawner`."""

    def __init__(self, start_s: float = START_S) -> None:
        self._start_s = start_s
        self._lock = threading.Lock()
        self._starting: set[LocalProcess] = set()
        self._is_closed = False

    def spawn(self, spec: EngineSpec, token: str | None = None) -> LocalProcess:
        """Start a worker and block until it listens. It demands `token`, by default a new one. Raises EngineLostError, with
        what it said last, where it does not listen."""
        process = self._begin(spec, token or make_token())
        try:
            process.wait(self._start_s)
        except ChildError as error:
            raise EngineLostError(
                f"{spec.name} did not start: {error}", "mend what it says, or set placement.engines=0"
            ) from None
        except BaseException:
            process.kill()
            raise
        finally:
            with self._lock:
                self._starting.discard(process)
        return process

    def close(self) -> None:
        """End the workers that do not listen yet. A thread that waits for one gets an EngineLostError. Starts none any more."""
        with self._lock:
            self._is_closed, starting = True, list(self._starting)
        for process in starting:
            process.kill()

    def _begin(self, spec: EngineSpec, token: str) -> LocalProcess:
        command = [sys.executable, "-m", WORKER, "--ends-with", str(os.getpid())]
        with self._lock:
            if self._is_closed:
                raise EngineLostError(f"{spec.name} is no longer needed")
            process = LocalProcess(Child(command, spec.environment(token), own_group=True), token)
            self._starting.add(process)
        return process


class LocalProcess:
    """A worker on this machine. Implements `Spawned`."""

    def __init__(self, child: Child, token: str) -> None:
        self._child, self.address, self.token = child, "", token

    def wait(self, limit_s: float) -> None:
        """Block until it listens. Raises ChildError where it ends first, or takes longer; it is gone then."""
        try:
            self.address = self._child.read(limit_s)["address"]
        except ChildError:
            self._child.close()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    def is_alive(self) -> bool:
        return self._child.is_alive

    def kill(self) -> None:
        """End it and what it started at once, also where it is stopped. Returns when it is gone."""
        self._child.kill()

    def why_ended(self) -> str:
        """How it ended and the last lines that it wrote; empty while it is alive. Waits a second for one that is ending."""
        wait_for_end(self.is_alive)
        code = self._child.code
        if code is None:
            return ""
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = self._child.last_lines()
        return "\n".join([f"its process {self.pid} was {how}" if code < 0 else f"its process {self.pid} {how}", *lines])
