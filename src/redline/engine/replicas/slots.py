"""The places of engines: what each has under way, what it has done, and what the engine in it must be able to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from redline.engine.prefix_routes import PrefixMemory
from redline.errors import EngineError
from redline.ports import SteppedEngine
from redline.types import Delta, EngineStats, GenerateRequest

if TYPE_CHECKING:
    from redline.engine.replicas.open_requests import OpenRequest

Event = tuple[int, Delta | EngineError]
_GAUGES = {
    "running",
    "waiting",
    "kv_blocks_used",
    "kv_blocks_total",
    "kv_blocks_peak",
    "kv_blocks_peak_before",
    "batch_size",
    "tokens_per_s",
    "adapters",
}
"""What is true of an engine now, and of none that was lost."""


class Replica(SteppedEngine, Protocol):
    """One of the engines: `engine.remote.client.RemoteEngine`."""

    name: str

    @property
    def limits(self) -> Any: ...

    @property
    def why_lost(self) -> str | None:
        """Why its process is lost; None while it is there."""
        ...

    def check(self, request: GenerateRequest) -> None: ...

    def flush(self) -> None:
        """Send what was submitted since the last step. Raises EngineLostError."""
        ...

    def take(self) -> Sequence[Event]:
        """What has come since the last call. Does not block. Raises EngineLostError once everything was taken."""
        ...

    def unanswered(self) -> Mapping[str, float]:
        """What it was asked and has not answered, in words → seconds since. Does not block."""
        ...

    def stack(self) -> Sequence[str]:
        """Where its process was at its last sign of life, where its step lasts long; else nothing. Does not block."""
        ...

    def sleep(self, *, weights: bool = False) -> Any: ...

    def wake(self) -> Any: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one engine."""

    index: int
    name: str
    engine: Replica | None
    """None while it is lost."""
    fresh: Replica | None = None
    """The engine in its place that is ready to be used."""
    requests: dict[int, OpenRequest] = field(default_factory=dict)
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)
    restarting_since: float | None = None
    """When its engine began to be started again, in seconds of `time.monotonic`; None where it does not have to be."""
    restarts: int = 0
    before: EngineStats = field(default_factory=lambda: EngineStats(kv_blocks_total=0))
    """The sums of the engines that were lost here."""

    @property
    def load(self) -> int:
        """Completions that its engine is to sample yet."""
        return sum(request.missing for request in self.requests.values())

    def takes(self, request: OpenRequest) -> bool:
        """Whether its engine is there, and no request would have more company than it may."""
        if self.engine is None or self.engine.why_lost is not None:
            return False
        limits = [one.company for one in (request, *self.requests.values()) if one.company is not None]
        return not limits or len(self.requests) < min(limits)

    def empty(self) -> list[OpenRequest]:
        """Note that the engine is lost. Returns the requests that it had."""
        engine, self.engine = self.engine, None
        assert engine is not None
        self.before = _summed([self.before, replace(engine.stats, **dict.fromkeys(_GAUGES, 0))])
        self.prefixes.clear()
        lost, self.requests = list(self.requests.values()), {}
        return lost


def engines_of(slots: Sequence[Slot]) -> list[Replica]:
    """All engines that are there, also those that are about to get work again."""
    return [engine for slot in slots for engine in (slot.engine, slot.fresh) if engine is not None]


def stats_of(slots: Sequence[Slot]) -> EngineStats:
    """The sum over all engines, with those that were lost."""
    parts = [engine.stats for engine in [slot.engine for slot in slots] if engine is not None]
    total = _summed([*parts, *(slot.before for slot in slots)])
    version = min((part.version for part in parts), default=0)
    return replace(total, version=version, kv_blocks_total=max(1, total.kv_blocks_total))


def _summed(parts: Sequence[EngineStats]) -> EngineStats:
    return EngineStats(**{one.name: sum(getattr(part, one.name) for part in parts) for one in fields(EngineStats)})
