"""An engine of others in the trainer's process: it has weights of its own, and loads ours by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from redline.types import WeightSet
from redline.weight_sync.parts import timed
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.verify import Probe, check_logprobs
from redline.wire import Connection

Named = Iterable[tuple[str, Tensor]]
OTHER_KERNELS = 10
"""How much further than our own engine's another's logprobs may be from the trainer's: its kernels round otherwise."""


class TakesWeights(Protocol):
    """An engine that loads weights itself."""

    def update_weights(self, weights: Named) -> None:
        """Load tensors by their Hugging Face names, and forget what was computed with the old ones. Raises where it cannot."""
        ...

    def stop_sampling(self, reason: str) -> None:
        """Raise an error with this reason in every later step."""
        ...


class PushedTensors:
    """The engine reads the trainer's tensors once, while it is held: nothing is written meanwhile, so that no copy lies in
    between. Implements `Transport`."""

    shares_storage = False
    pause_s = None

    def __init__(
        self,
        engine: TakesWeights,
        trained: Mapping[str, Tensor],
        named: Callable[[Mapping[str, Tensor]], Named],
        logprobs: Callable[[Sequence[int]], Sequence[float] | None] = lambda tokens: None,
    ) -> None:
        """`trained` are the tensors that the trainer trains; `named` returns every weight of the policy under its Hugging Face
        name, given those.
        `logprobs` returns what the engine makes of each token after the first; None where it cannot say now."""
        self._engine = engine
        self._forms = _forms(trained)
        self._named = named
        self._logprobs = logprobs
        self._moved: tuple[int, list[tuple[str, Tensor]]] | None = None
        """A version, and its weights by their Hugging Face names."""
        self._is_loading = False
        self.parts: dict[str, float] = {}

    def move(self, plan: TransferPlan, weights: WeightSet) -> int:
        self._check(weights)
        self.parts = {}
        with timed("convert", self.parts):
            named = list(self._named(weights.tensors))
        self._moved = (weights.version, named)
        return sum(tensor.nbytes for _, tensor in named)

    def verify(self, weights: WeightSet) -> None:
        """The bytes are the trainer's own; the engine checks what it gets when it loads them."""
        self._check(weights)
        assert self._moved is None or self._moved[0] == weights.version, "other weights were moved"

    def adopt(self, probe: Probe | None = None) -> None:
        assert self._moved is not None, "nothing was moved"
        self._is_loading = True
        with timed("load", self.parts):
            self._engine.update_weights(self._moved[1])
        with timed("verify", self.parts):
            found = self._logprobs(probe.tokens) if probe is not None else None
            if probe is not None and found is not None:
                check_logprobs(probe.logprobs, found, OTHER_KERNELS * probe.tolerance)
        self._moved, self._is_loading = None, False

    def revert(self, version: int) -> None:
        """Forget what was moved. Nobody has the old weights any more once the engine has begun to load: it samples no more."""
        self._moved = None
        if self._is_loading:
            self._engine.stop_sampling(f"its weights are part of version {version} and part of the one before")

    def _check(self, weights: WeightSet) -> None:
        other = {name for name, _ in _forms(weights.tensors).items() ^ self._forms.items()}
        assert not other, f"other tensors than the engine was made for: {', '.join(sorted(other))}"

    def catch_up(self, channel: Connection, weights: WeightSet, probe: Probe | None = None) -> None:
        raise AssertionError("an engine of another process is given its weights by another transport")

    def close(self) -> None:
        """Nothing was opened."""


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
