"""Which LoRA adapters the engine knows, and which of them hold one of the network's slots.

An adapter comes in by name and version, and stays on the host until it is unloaded. When slots run short, the one that was
asked for longest ago gives its slot up; it comes back by a copy when a request names it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from redline.config.sections.engine import ServedEngineConfig
from redline.engine.native.sequence import NO_SLOT
from redline.errors import EngineBusyError, EngineError
from redline.models.decoder import Decoder
from redline.models.lora.peft import read_adapter
from redline.models.lora.per_token import LoraBank, PreparedAdapter, refuse_experts
from redline.models.spec import DENSE_FAMILIES

Source = Path | str | Mapping[str, Tensor] | PreparedAdapter
"""A PEFT folder, tensors by PEFT's names, or what `prepare` made of either."""


@dataclass(slots=True)
class LoraCounts:
    """Since the engine was made."""

    loads: int = 0
    """Adapters and versions that were new."""
    copies: int = 0
    """Copies into a slot: every load, and every return of an evicted adapter."""
    evictions: int = 0


@dataclass(slots=True)
class _Known:
    content: PreparedAdapter
    version: int
    load: int
    """The number of its load, another one for every content: what was cached for a name and a version that come again, or by
    a request that saw two versions, is never found."""
    slot: int = NO_SLOT
    users: int = 0
    """Unfinished requests."""


class Adapters:
    """Names, versions and slots."""

    def __init__(self, bank: LoraBank | None) -> None:
        self.bank = bank
        """None where LoRA is off."""
        self.counts = LoraCounts()
        self._known: dict[str, _Known] = {}
        """Least recently used first."""

    @property
    def versions(self) -> dict[str, int]:
        """The version of every adapter that a request may name."""
        return {name: known.version for name, known in sorted(self._known.items())}

    @property
    def num_resident(self) -> int:
        return sum(known.slot != NO_SLOT for known in self._known.values())

    def salt(self, name: str) -> str:
        """What tells its keys and values from all others."""
        known = self._known[name]
        return f"{name}@{known.version}#{known.load}"

    # ── in and out ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, source: Source, *, alpha: float | None = None, use_rslora: bool = False) -> PreparedAdapter:
        """Read, check and convert; touches nothing of the engine, so any thread may do it."""
        bank = self._the_bank()
        if isinstance(source, PreparedAdapter):
            return source
        return bank.prepare(read_adapter(source, alpha=alpha, use_rslora=use_rslora))

    def load(self, name: str, source: Source, version: int, *, alpha: float | None, use_rslora: bool) -> None:
        """Make the adapter resident. Where this version is known already, the source is not looked at."""
        known = self._known.get(name)
        if known is not None and known.version == version:
            self._make_resident(name)
            return
        content = self.prepare(source, alpha=alpha, use_rslora=use_rslora)
        slot = known.slot if known is not None and known.slot != NO_SLOT else self._free_slot()
        self.counts.loads += 1
        self._known.pop(name, None)  # the most recently used is last
        self._known[name] = _Known(content, version, self.counts.loads, users=0 if known is None else known.users)
        self._write(name, slot)

    def unload(self, name: str) -> None:
        """Forget it; its slot is free."""
        known = self._known.get(name)
        if known is None:
            raise EngineError(f"unknown adapter {name!r}", f"loaded: {', '.join(self.versions) or 'none'}")
        if known.users:
            raise EngineError(
                f"adapter {name!r} is used by {known.users} unfinished request(s)", "wait for them to finish or abort them"
            )
        del self._known[name]

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, name: str | None) -> int:
        """The slot of a known adapter for one request more; it keeps the slot until they are all done."""
        if name is None:
            return NO_SLOT
        slot = self._make_resident(name)
        self._known[name].users += 1
        return slot

    def release(self, name: str | None) -> None:
        """One request less."""
        if name is not None:
            self._known[name].users -= 1

    # ── slots ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_resident(self, name: str) -> int:
        self._known[name] = known = self._known.pop(name)
        if known.slot == NO_SLOT:
            self._write(name, self._free_slot())
        return known.slot

    def _write(self, name: str, slot: int) -> None:
        known = self._known[name]
        self._the_bank().write(slot, known.content)
        known.slot = slot
        self.counts.copies += 1

    def _free_slot(self) -> int:
        num_slots, taken = self._the_bank().num_slots, {known.slot for known in self._known.values()}
        free = next((slot for slot in range(num_slots) if slot not in taken), None)
        if free is not None:
            return free
        idle = next((known for known in self._known.values() if known.slot != NO_SLOT and not known.users), None)
        if idle is None:
            raise EngineBusyError(
                f"unfinished requests use all {num_slots} adapters that fit", "raise engine.max_loras or wait for them"
            )
        slot, idle.slot = idle.slot, NO_SLOT
        self.counts.evictions += 1
        return slot

    def _the_bank(self) -> LoraBank:
        if self.bank is None:
            raise EngineError("LoRA is off", "set engine.max_loras to the number of adapters to keep resident")
        return self.bank


def make_bank(decoder: object, config: ServedEngineConfig) -> LoraBank | None:
    """Room for `max_loras` adapters; None where there is to be none. Made before the engine, whose KV cache takes the memory
    that is left."""
    if config.max_loras == 0:
        return None
    if not isinstance(decoder, Decoder):
        raise EngineError(
            f"engine.max_loras = {config.max_loras}: this model takes no LoRA adapters",
            f"set it to 0, or use a model of one of: {', '.join(DENSE_FAMILIES)}",
        )
    refuse_experts(decoder.spec, f"engine.max_loras = {config.max_loras}", "set it to 0")
    return LoraBank(decoder, config.max_loras, config.max_lora_rank)
