"""The engine over several processes. Every rank runs the same scheduler on the same requests, so ranks tell each other only
what is new: requests and aborts as they come, and the sampled tokens.

    rank 0   submit, abort ──► log ──announce──► step ──sums──► sample ──tokens──► results
    rank 1+                          follow ───► step ──sums──► take rank 0's tokens

A decode step therefore sends a few bytes of log and one token and logprob per sequence, whatever the sequences' lengths; block
tables and slots are derived on every rank. The sums over ranks inside the network are the model's own traffic. Between two
steps rank 0 may order the others to do something else, such as to take new weights: who starts the ranks says what (`follow`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from redline.addresses import loopback_interface
from redline.config.sections.engine import ServedEngineConfig
from redline.engine.native.engine import Event, NativeEngine
from redline.errors import EngineError, EngineLostError
from redline.models.decoder import Decoder
from redline.models.files.hf import load_decoder, load_tokenizer
from redline.models.parallel import Shard, shard_decoder
from redline.telemetry import span
from redline.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Obey = Callable[[Mapping[str, Any]], None]
"""Does what rank 0 orders between two steps."""

IDLE_PATIENCE = timedelta(days=365)
"""How long a rank waits for the next step to begin: an idle server may have none for a long time. A rank that has died is
noticed sooner, by the end of its connection."""
START_PATIENCE = timedelta(minutes=30)
"""How long ranks wait for each other to load the model."""
MEET_PATIENCE = timedelta(minutes=2)
"""How long ranks that are all there take to connect to each other."""
ARRIVED = "arrived"
"""At the meeting: how many of the other ranks have come."""
STEP_TIMEOUT_S = 120.0
"""How long a rank waits for the others inside a step."""
LOOK_S = 0.5
"""Seconds between two looks of another rank at whether rank 0 is alive."""
END_S = 10.0
"""For the other ranks to end when they are told to, and to be seen to have died."""


class Ranks:
    """The processes of one engine, and what they send each other."""

    def __init__(
        self, shard: Shard, device: torch.device, meeting: dist.TCPStore, step_timeout_s: float = STEP_TIMEOUT_S
    ) -> None:
        """Blocks until all ranks have met at `meeting`, which rank 0 made."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        world, step = shard.world, timedelta(seconds=step_timeout_s)
        with _on_loopback():
            dist.init_process_group(backend, store=meeting, rank=shard.rank, world_size=world, timeout=MEET_PATIENCE)
            self._steps = dist.new_group(backend=backend, timeout=step)
            """Everything inside a step."""
            # Messages to people's processes go over the host: a log entry is no work for a GPU.
            self._host = dist.new_group(backend="gloo", timeout=step) if backend == "nccl" else self._steps
            self._start = dist.new_group(backend="gloo", timeout=START_PATIENCE)
            # Rank 0 begins steps. One that is not there then, since it hangs between two of them, is not waited for.
            self._idle = dist.new_group(backend="gloo", timeout=step if shard.rank == 0 else IDLE_PATIENCE)
            """The beginning of a step, for which the others wait."""
        self.shard = shard
        self.control_bytes = 0
        """Sent to each other rank beside the sums: logs, and sampled tokens."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, in place where the tensor is contiguous."""
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self._steps)
        return tensor

    def smallest(self, value: int) -> int:
        tensor = torch.tensor([value])
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._start)
        return int(tensor)

    def announce(self, entries: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """Rank 0's entries, on every rank; the others pass None."""
        data = bytearray(json.dumps(entries).encode() if entries else b"")
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0, group=self._idle)
        self.control_bytes += length.nbytes
        if not length:
            return []
        message = torch.frombuffer(data, dtype=torch.uint8) if entries else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(message, 0, group=self._host)
        self.control_bytes += message.nbytes
        return json.loads(message.numpy().tobytes())

    def send(self, run: Tensor) -> None:
        """Rank 0's bytes, in place, on every rank."""
        dist.broadcast(run, 0, group=self._steps)

    def is_same(self, value: int) -> bool:
        """Block until every rank has come to this point, and return whether all have the same value."""
        least = torch.tensor([value, ~value])  # and, since ~ turns the order around, the most
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._host)
        return int(least[0]) == ~int(least[1])

    def share_samples(self, tokens_B: Tensor, logprobs_B: Tensor) -> None:
        """Rank 0's, to all: equal logits should give equal tokens, but a difference in one bit must not part the ranks."""
        for tensor in (tokens_B, logprobs_B):
            dist.broadcast(tensor, 0, group=self._steps)
            self.control_bytes += tensor.nbytes

    def leave(self) -> None:
        dist.destroy_process_group()


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Groups of gloo that are made in the block listen on loopback alone, whatever the environment has for other groups: the
    ranks of an engine are on one machine."""
    key, before = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    if (name := loopback_interface()) is not None:
        os.environ[key] = name
    try:
        yield
    finally:
        os.environ.pop(key, None)
        if before is not None:
            os.environ[key] = before


LOOK_AT_STDERR = "look at what it wrote to stderr, and start again"
PROGRAM = ("redline.engine.native.tensor_parallel",)
"""The module that the other ranks run where they take no new weights, and its first arguments."""


class TensorParallelEngine(NativeEngine):
    """Rank 0: what callers see. The other ranks are processes it starts, and ends in `close`."""

    def __init__(
        self,
        folder: Path,
        config: ServedEngineConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        step_timeout_s: float = STEP_TIMEOUT_S,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """`program` is the module that the other ranks run, and its first arguments: `run_worker`, with what they are to do
        between steps. The last argument is their settings."""
        if config.max_loras:
            raise EngineError("LoRA adapters are not divided among processes", "set engine.max_loras=0")
        world = config.tensor_parallel_size
        meeting = new_meeting()
        settings = _worker_settings(folder, config, device, dtype, meeting.port) | {"step_timeout_s": step_timeout_s}
        self._step_timeout_s = step_timeout_s
        self._log: list[dict[str, Any]] = []
        self._has_failed = False
        self._workers = [_start_worker(program, settings, rank) for rank in range(1, world)]
        with self._ending_with_others():
            self._wait_for_others(meeting)
            self.ranks = Ranks(Shard(0, world), device, meeting, step_timeout_s)
            decoder, tokenizer = _load(folder, self.ranks, device, dtype)
            super().__init__(decoder, config, tokenizer, self.ranks)

    @contextmanager
    def _ending_with_others(self) -> Iterator[None]:
        """Where the block fails, end the other ranks, and say which of them has died, if one has."""
        try:
            yield
        except BaseException as error:
            reason = self._why_ended() if isinstance(error, RuntimeError) else None
            for worker in self._workers:
                worker.kill()
            if reason is not None:
                raise EngineLostError(f"{reason} while it started", LOOK_AT_STDERR) from error
            raise

    def _wait_for_others(self, meeting: dist.TCPStore) -> None:
        """Block until every other rank has come to the meeting. Raises EngineLostError where one has died on the way: all that
        ranks do together would wait for it."""
        until = time.monotonic() + START_PATIENCE.total_seconds()
        while meeting.add(ARRIVED, 0) < len(self._workers):
            if (reason := self.why_broken()) is not None:
                raise EngineLostError(f"{reason} while it started", LOOK_AT_STDERR)
            if time.monotonic() > until:
                raise EngineLostError(f"not all ranks of the engine have started within {START_PATIENCE}", LOOK_AT_STDERR)
            time.sleep(0.02)

    def _queue(self, request: GenerateRequest, streaming: int) -> int:
        request_id = super()._queue(request, streaming)
        self._log.append({"submit": encode_request(request), "streaming": streaming})
        return request_id

    def abort(self, request_id: int) -> None:
        super().abort(request_id)
        self._log.append({"abort": request_id})

    def end(self, request_id: int, index: int) -> None:
        super().end(request_id, index)
        self._log.append({"end": [request_id, index]})

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._log.append({"reset_prefix_cache": True})

    def step(self) -> list[Event]:
        """Raises EngineLostError where another rank has died, or does not answer within the step's timeout."""
        with self._others():
            self._announce()
            return super().step()

    # ── between two steps, for who has the engine then ─────────────────────────────────────────────────────────────────

    def order(self, entry: Mapping[str, Any]) -> None:
        """Have the other ranks do what an entry says. Raises EngineLostError as `step` does; so do the two below."""
        with self._others():
            self._announce({"order": entry})

    def send(self, run: Tensor) -> None:
        """Send a run of bytes to the other ranks."""
        with self._others():
            self.ranks.send(run)

    def is_same(self, value: int) -> bool:
        """Block until every rank has come to this point, and return whether all have the same value."""
        with self._others():
            return self.ranks.is_same(value)

    def _announce(self, *more: dict[str, Any]) -> None:
        log, self._log = self._log, []
        self.ranks.announce([*log, *more])

    @contextmanager
    def _others(self) -> Iterator[None]:
        """Say which of the other ranks is gone where the block fails for it."""
        if (reason := self.why_broken()) is not None:
            raise EngineLostError(reason, LOOK_AT_STDERR)
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what a collective raises, whichever its backend
            self._has_failed = True
            raise EngineLostError(self._why_failed(error), LOOK_AT_STDERR) from error

    def why_broken(self) -> str | None:
        """Which rank has died, if one has. From any thread."""
        for rank, worker in enumerate(self._workers, start=1):
            if worker.poll() is not None:
                return f"rank {rank} of the engine has ended with code {worker.returncode}"
        return None

    def _why_failed(self, error: RuntimeError) -> str:
        why = f"a step over {len(self._workers) + 1} ranks failed (limit {self._step_timeout_s:g} s): {error}"
        return self._why_ended() or why

    def _why_ended(self) -> str | None:
        """Which rank has died, if one has. The connection ends a moment before the process can be seen to have."""
        deadline = time.monotonic() + END_S / 5
        while (reason := self.why_broken()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return reason

    def close(self) -> None:
        """End the other ranks: by a message, or by force where one of them has failed already, or does not take it."""
        if not self._has_failed and self.why_broken() is None:
            try:
                self.ranks.announce([{"close": True}])
            except RuntimeError:
                self._has_failed = True
        if self._has_failed or self.why_broken() is not None:
            for worker in self._workers:
                worker.kill()
        for worker in self._workers:
            try:
                worker.wait(END_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self.ranks.leave()


def follow(engine: NativeEngine, ranks: Ranks, obey: Obey | None = None) -> None:
    """What the other ranks do: as rank 0 does, until it closes. `obey` does what it orders between two steps."""
    while True:
        with span("wait.for_requests"):
            entries = ranks.announce(None)
        with span("engine.schedule"):  # what is neither prefill nor decode
            if not _follow_step(engine, entries, obey):
                return


def _follow_step(engine: NativeEngine, entries: Sequence[Mapping[str, Any]], obey: Obey | None) -> bool:
    """Do what rank 0 announced, and unless that was an order take a step. False where rank 0 closes."""
    steps = True
    for entry in entries:
        if "submit" in entry:
            engine.submit(decode_request(entry["submit"]), streaming=entry["streaming"])
        elif "abort" in entry:
            engine.abort(entry["abort"])
        elif "end" in entry:
            engine.end(*entry["end"])
        elif "reset_prefix_cache" in entry:
            engine.reset_prefix_cache()
        elif "order" in entry:
            assert obey is not None, "rank 0 orders what nobody has told this rank to do"
            steps = False
            obey(entry["order"])
        else:
            return False
    if steps:
        engine.step()
    return True


def encode_request(request: GenerateRequest) -> dict[str, Any]:
    sampling = asdict(request.sampling)
    sampling["logit_bias"] = list(request.sampling.logit_bias.items())
    prompt_ids, order = request.prompt_ids.tolist(), list(request.order)
    return {"prompt_ids": prompt_ids, "sampling": sampling, "adapter": request.adapter, "order": order}


def decode_request(fields: dict[str, Any]) -> GenerateRequest:
    sampling = dict(fields["sampling"])
    for name in ("stop_token_ids", "stop", "allowed_token_ids"):
        sampling[name] = None if sampling[name] is None else tuple(sampling[name])
    sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"]}
    version, less = fields["order"]
    prompt_ids = np.array(fields["prompt_ids"], np.int32)
    return GenerateRequest(prompt_ids, SamplingParams(**sampling), fields["adapter"], (version, less))


def _load(
    folder: Path, ranks: Ranks, device: torch.device, dtype: torch.dtype
) -> tuple[Decoder, PreTrainedTokenizerBase | None]:
    """Each rank reads the whole model on the host and keeps its part."""
    whole = load_decoder(folder, "cpu", dtype)
    if not isinstance(whole, Decoder):
        raise EngineError(f"{folder}: tensor parallelism needs a model of the Llama or Qwen families", "use one process")
    tokenizer = load_tokenizer(folder) if any(folder.glob("tokenizer*")) else None
    return shard_decoder(whole, ranks.shard, device, ranks.sum), tokenizer


def new_meeting() -> dist.TCPStore:
    """Where the ranks of a new engine meet: at a port of this machine's own, which is held from now on, so that another engine
    that starts meanwhile gets another. Returns at once."""
    listening = socket.create_server(("127.0.0.1", 0))
    host, port = listening.getsockname()
    held = listening.detach()
    return dist.TCPStore(host, port, None, True, START_PATIENCE, wait_for_workers=False, master_listen_fd=held)


def join_meeting(port: int) -> dist.TCPStore:
    """The same, for another rank."""
    return dist.TCPStore("127.0.0.1", port, None, False, START_PATIENCE, wait_for_workers=False)


def _worker_settings(
    folder: Path, config: ServedEngineConfig, device: torch.device, dtype: torch.dtype, port: int
) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "config": config.model_dump(mode="json"),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "port": port,
        "num_threads": torch.get_num_threads(),
        "parent": os.getpid(),
    }


def _start_worker(program: Sequence[str], shared: dict[str, Any], rank: int) -> subprocess.Popen[bytes]:
    settings = shared | {"rank": rank}
    return subprocess.Popen([sys.executable, "-m", *program, json.dumps(settings)], env=os.environ)


def run_worker(settings: dict[str, Any], make_obey: Callable[[NativeEngine, Ranks], Obey] | None = None) -> None:
    """Be another rank than 0, with the settings that rank 0 gave, until rank 0 closes. `make_obey` returns what does the orders
    of rank 0."""
    threading.Thread(target=_end_with, args=(settings["parent"],), name="rank 0", daemon=True).start()
    with span("run.setup"):
        engine, ranks = _joined(settings)
    follow(engine, ranks, make_obey(engine, ranks) if make_obey else None)
    ranks.leave()


def _joined(settings: dict[str, Any]) -> tuple[NativeEngine, Ranks]:
    """This rank's part of the engine, once all ranks have met."""
    torch.set_num_threads(settings["num_threads"])
    config = ServedEngineConfig(**settings["config"])
    device, dtype = torch.device(settings["device"]), getattr(torch, settings["dtype"])
    if device.type == "cuda":
        device = torch.device("cuda", settings["rank"])
        torch.cuda.set_device(device)
    shard = Shard(settings["rank"], config.tensor_parallel_size)
    meeting = join_meeting(settings["port"])
    meeting.add(ARRIVED, 1)
    ranks = Ranks(shard, device, meeting, settings["step_timeout_s"])
    decoder, tokenizer = _load(Path(settings["folder"]), ranks, device, dtype)
    return NativeEngine(decoder, config, tokenizer, ranks), ranks


def _end_with(rank_0: int) -> None:
    """End this process where rank 0 is gone: a rank that is still loading has no connection that would end."""
    while os.getppid() == rank_0:
        time.sleep(LOOK_S)
    time.sleep(END_S)  # one that has connections ends by itself, with its spans written
    os._exit(1)


if __name__ == "__main__":
    run_worker(json.loads(sys.argv[1]))
