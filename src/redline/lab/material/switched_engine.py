"""An engine that can be used as those do who do not put their requests together, and whose requests name an adapter."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from redline.engine import NativeEngine
from redline.errors import EngineError
from redline.types import Delta, EngineStats, GenerateRequest, WeightUpdate

ADAPTER = "policy"


@dataclass(slots=True)
class SwitchedEngine:
    """Implements `ports.SteppedEngine`."""

    engine: NativeEngine
    singly: bool = False
    """One completion at a time is in the engine, each as a request of its own: what callers get who do not work together."""
    adapter: Path | None = None
    """A LoRA adapter that every request names."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _waiting: deque[tuple[int, GenerateRequest, int]] = field(default_factory=deque)
    _wholes: dict[int, int] = field(default_factory=dict)
    """The engine's number of a request → ours."""

    def load_adapter(self, version: int) -> None:
        """Have the adapter in this version: nothing is read where it is there."""
        if self.adapter is not None:
            self.engine.load_adapter(ADAPTER, self.adapter, version)

    def submit(self, request: GenerateRequest, *, streaming: int = 0) -> int:
        number = next(self._numbers)
        wanted = replace(request, adapter=ADAPTER) if self.adapter is not None else request
        if self.singly:
            self._waiting.extend((number, single, streaming) for single in _singles(wanted))
        else:
            self._wholes[self.engine.submit(wanted, streaming=streaming)] = number
        return number

    def abort(self, request_id: int) -> None:
        self._waiting = deque(one for one in self._waiting if one[0] != request_id)
        for inner in [inner for inner, whole in self._wholes.items() if whole == request_id]:
            self.engine.abort(inner)

    def end(self, request_id: int, index: int) -> None:
        for inner in [inner for inner, whole in self._wholes.items() if whole == request_id]:
            self.engine.end(inner, index)

    def sampled_tokens(self, request_id: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for inner in [inner for inner, whole in list(self._wholes.items()) if whole == request_id]:
            found.update(self.engine.sampled_tokens(inner))
        return found

    def step(self) -> list[tuple[int, Delta | EngineError]]:
        if self._waiting and not self.engine.has_work:
            number, request, streaming = self._waiting.popleft()
            self._wholes[self.engine.submit(request, streaming=streaming)] = number
        return [(self._wholes[inner], piece) for inner, piece in self.engine.step()]

    def apply(self, update: WeightUpdate) -> None:
        self.engine.apply(update)

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self.engine.has_work

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats


def _singles(request: GenerateRequest) -> Iterator[GenerateRequest]:
    """A request for each completion, which samples what it would have sampled."""
    for index in request.sampling.indices:
        yield replace(request, sampling=replace(request.sampling, n=1, first_index=index))
