"""The sides of a generation bench, each with its model loaded and warm."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

import torch
from rich.console import Console

from redline.config.sections.engine import EngineConfig
from redline.lab.bench.settings import GenerateSettings
from redline.lab.material.networks import Network
from redline.lab.measure.machine import MemoryMeter
from redline.lab.measure.warmup import WarmUp, warm_up
from redline.lab.peers.generation_sides import Batch, Side, TransformersSide
from redline.lab.peers.vllm_side import VllmSide, vllm_arguments

OURS, STREAMED, AGAIN = "redline", "redline, streamed", "redline again"


class Workload(Protocol):
    def batch(self, number: int) -> Batch:
        """The work of a round; 0 is the warm-up."""
        ...


class Contest:
    def __init__(self, settings: GenerateSettings, workload: Workload, console: Console) -> None:
        self._settings = settings
        self._workload = workload
        self._console = console
        self.sides: dict[str, Side] = {}
        self.peak_bytes: dict[str, int] = {}
        """What a side took for its first runs, weights included."""
        self.versions: dict[str, str] = {}
        self.warm_ups: dict[str, WarmUp] = {}

    @property
    def peers(self) -> list[str]:
        return [name for name in self.sides if name not in (OURS, STREAMED)]

    def enter(self, name: str, side: Side, meter: MemoryMeter | None = None) -> None:
        """Whole runs that do not count, until they are steady: kernels are compiled, graphs captured, memory taken. The meter
        was made before the side was."""
        batch = self._workload.batch(0)
        if meter is not None:
            meter.begin_run()
        run, self.warm_ups[name] = warm_up(lambda _: side.run(batch), max_seconds=self._settings.warmup_s)
        assert run.num_tokens == batch.num_tokens, f"{name} made {run.num_tokens} tokens of {batch.num_tokens}"
        self._console.print(f"{name} is warm: {run.tokens_per_s:,.0f} tok/s", style="dim")
        self.sides[name] = side
        if meter is not None:
            self.peak_bytes[name] = meter.peak_bytes()

    def enter_peer(self, peer: str, network: Network, engine: EngineConfig, stack: ExitStack) -> None:
        """`engine` has the sizes that every side gets; what the side holds is released by `stack`."""
        if peer == "transformers":
            self._enter_transformers(network)
        elif peer == "vllm":
            self._enter_vllm(network, engine, stack)
        elif peer == "redline":
            self.sides[AGAIN] = self.sides[OURS]
        else:
            raise AssertionError(peer)

    def _enter_transformers(self, network: Network) -> None:
        from transformers import __version__

        meter = MemoryMeter(torch.device(self._settings.device))
        self.versions["transformers"] = __version__
        self.enter("transformers", TransformersSide(network.as_transformers()), meter)

    def _enter_vllm(self, network: Network, engine: EngineConfig, stack: ExitStack) -> None:
        device = torch.device(self._settings.device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what the sides before it no longer use
        folder = stack.enter_context(network.as_folder())
        arguments = vllm_arguments(
            folder,
            has_weights=network.folder is not None,
            dtype=self._settings.dtype,
            engine=engine,
            device=device,
        )
        side = VllmSide(arguments, self._settings.vllm_python)
        stack.callback(side.close)
        self.versions["vllm"] = side.version
        self.enter("vllm", side)
