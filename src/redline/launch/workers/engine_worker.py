"""The program of an engine's process: one engine, a session that steps it, and connections that say what for.

    python -m redline.launch.workers.engine_worker [--ends-with PID]      with spec and token in its environment

    stdout           {"address": "127.0.0.1:4711"}, once the model is loaded; everything else that is printed goes to stderr
    role requests    submit, abort, calls ──►   ◄── pieces, results, pulses (engine/remote/service.py)
    role weights     buckets, adopt, revert ──►   ◄── checksums, pauses (weight_sync/receiver.py)

The first connection for requests is its parent's: the process ends with it. It ends too with the process that started it,
whatever that one has left behind; where no parent has connected after `ALONE_S` seconds; and where its engine breaks, with the
reason on stderr.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from redline.child import bound_stderr, take_stdout
from redline.config import EngineRecipe
from redline.config.sections.lora import LoraConfig
from redline.engine import EngineSession
from redline.engine.remote.service import RequestService, why_failed
from redline.errors import ConfigError, RedlineError
from redline.launch.engines import LoadedEngine, load_engine
from redline.launch.process import prepare_process
from redline.launch.workers.engine_rank import rank_program
from redline.launch.workers.receivers import receiver_of
from redline.launch.workers.spawn import SPEC_VARIABLE, EngineSpec
from redline.telemetry import idle_as, span
from redline.telemetry.machine.hosts import HostSampling, sampling_host
from redline.telemetry.processes import recording_process
from redline.weight_sync.receiver import WeightReceiver
from redline.wire import Connection, Listener, error_fields, listen, token_from_environment

ALONE_S = 300.0
"""Seconds in which its parent has to connect."""
CLOSE_S = 5.0
"""Seconds that the last step has to end."""
LOOK_S = 0.5
"""Seconds between two looks at whether the process that started this one is alive."""
_is_serving = threading.Event()
"""Whether the end of the parent's connection will end this process by itself."""


def main() -> None:
    """Serve one engine until its parent is gone. A failure that we understand is told on stderr in its own words."""
    reply = take_stdout()
    if "--ends-with" in sys.argv[1:]:
        parent = int(sys.argv[sys.argv.index("--ends-with") + 1])
        threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    try:
        token, spec = token_from_environment(), _spec()
        with recording_process(spec.name.replace(" ", "-"), Path(spec.spans) if spec.spans else None):
            problem = serve(spec, token, reply)
    except RedlineError as error:
        problem = str(error)
    if problem:
        print(problem, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1 if problem else 0)  # at once: a step that never ends must not keep the process


def _spec() -> EngineSpec:
    text = os.environ.pop(SPEC_VARIABLE, "")
    if not text:
        raise ConfigError(f"{SPEC_VARIABLE} is not set", "this program is started by redline, which says what it is to hold")
    return EngineSpec.from_json(text)


def serve(spec: EngineSpec, token: str, reply: Callable[[Mapping[str, Any]], None]) -> str | None:
    """Load the engine, tell the address, and answer connections until the parent's has ended. Returns why the engine broke,
    where that ended it. Blocks."""
    recipe = spec.engine_recipe()
    lora = LoraConfig.model_validate(spec.lora) if spec.lora else None
    with span("run.setup"):
        loaded, session = _started(spec, recipe, lora)
    try:
        with listen(spec.host, spec.port, token=token) as listener:
            _is_serving.set()
            reply({"address": listener.address})
            with span("wait.for_end"):
                Roles(spec, loaded, session, listener, lambda: receiver_of(loaded.engine, session, recipe, lora)).answer()
        return why_failed(session)
    finally:
        with span("run.close"):
            session.close(CLOSE_S)
            loaded.close()


def _started(spec: EngineSpec, recipe: EngineRecipe, lora: LoraConfig | None) -> tuple[LoadedEngine, EngineSession]:
    """The engine, in a thread that steps it."""
    prepare_process(recipe)
    loaded = load_engine(
        recipe,
        lora=lora,
        rank_program=rank_program(spec.name.replace(" ", "-"), spec.spans),
        tell=_say,
    )
    session = loaded.session()
    session.start("engine", prepare_thread=lambda: torch.set_num_threads(spec.num_threads))
    return loaded, session


class Roles:
    """Answers each connection by its role, in a thread of its own."""

    def __init__(
        self,
        spec: EngineSpec,
        loaded: LoadedEngine,
        session: EngineSession,
        listener: Listener,
        make_receiver: Callable[[], WeightReceiver],
    ) -> None:
        self._spec, self._loaded, self._session, self._listener = spec, loaded, session, listener
        self._make_receiver = make_receiver
        self._parent_is_gone = threading.Event()
        self._has_parent = threading.Event()
        self._answers: dict[str, Callable[[Connection], None]] = {
            "requests": self._answer_requests,
            "weights": self._answer_weights,
        }

    def answer(self) -> None:
        """Block until the parent's connection has ended, or nobody has come to be the parent."""
        self._listener.answer_each(self._answer)
        if self._has_parent.wait(ALONE_S):
            self._parent_is_gone.wait()

    def _answer(self, connection: Connection) -> None:
        with connection:
            if connection.role in self._answers:
                self._answers[connection.role](connection)
            else:
                refusal = ConfigError(f"an engine answers no connection of the role {connection.role!r}")
                connection.send("error", error_fields(refusal))

    def _answer_requests(self, connection: Connection) -> None:
        is_parent = not self._has_parent.is_set()
        self._has_parent.set()
        service = RequestService(self._session, connection)
        sampling = HostSampling(**self._spec.sampling) if self._spec.sampling and is_parent else None
        try:
            with sampling_host(sampling, self._spec.name, service.send_sample, _say):
                service.serve(self._about())
        finally:
            if is_parent:
                self._parent_is_gone.set()

    def _answer_weights(self, connection: Connection) -> None:
        idle_as("wait.for_updates")
        try:
            receiver = self._make_receiver()
        except RedlineError as error:
            connection.send("error", error_fields(error))
            return
        receiver.serve(connection)

    def _about(self) -> dict[str, Any]:
        """What the other side must know to refuse a request as the engine would."""
        engine: Any = self._loaded.engine
        limits = getattr(engine, "limits", None)
        return {"limits": asdict(limits) if limits else None, "adapters": list(getattr(engine, "adapters", ()))}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _end_with(parent: int) -> None:
    """End this process once its parent is gone, and keep its stderr from growing without end. The parent is known by its id: a
    pipe would stay open in whatever else it has started. Where the model is loaded, the parent's connection has ended as well,
    and the spans are still to be written."""
    while os.getppid() == parent:
        bound_stderr()
        time.sleep(LOOK_S)
    if _is_serving.is_set():
        time.sleep(2 * CLOSE_S)
    os._exit(0)


if __name__ == "__main__":
    main()
