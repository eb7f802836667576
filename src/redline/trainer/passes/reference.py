"""The policy before training, which a KL term compares with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from redline.models.copies import copy_network
from redline.models.files.hf import AnyDecoder
from redline.models.lora.per_token import BARE
from redline.models.lora.trainable import has_adapter
from redline.telemetry import span
from redline.trainer.batches.micro_batches import MicroBatch
from redline.trainer.parallel.weights import Weights
from redline.trainer.passes.forward import Recompute, recompute


class Reference:
    """To be made before the first step or checkpoint changes the weights, and only where something needs it.

    Where an adapter is trained, the reference is the network without it and takes no memory. Else it is a frozen copy in the
    compute dtype, which `offload` keeps in host memory between passes.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        dtype: torch.dtype,
        temperature: float,
        *,
        offload: bool,
        wrap: Callable[[AnyDecoder], Weights] = Weights,
    ) -> None:
        """`wrap` prepares the copy as the processes of the trainer hold it: where they divide it, each has its part."""
        self._temperature = temperature
        self._device = next(decoder.parameters()).device
        self._without_adapter = has_adapter(decoder)
        self._is_away = offload and not self._without_adapter
        if self._without_adapter:
            self._network, self._weights = decoder, None
            return
        self._network = copy_network(decoder, dtype, trainable=False, parameters_on="cpu" if offload else None)
        self._weights = wrap(self._network)
        if offload and self._device.type == "cuda":
            for parameter in self._network.parameters():
                parameter.data = parameter.data.pin_memory()

    @property
    def parameters(self) -> Iterable[Tensor]:
        """What this process holds for its sake: none where the policy without its adapter is the reference."""
        return () if self._weights is None else self._weights.parameters.values()

    def logprobs(self, micro_batches: Iterable[MicroBatch], compute: Recompute = recompute) -> list[Tensor]:
        """float32[M] for each micro-batch, of its trained tokens under the reference."""
        with span("trainer.reference"), self._at_hand():
            lora = BARE if self._without_adapter else None
            found = compute(self._network, micro_batches, self._temperature, lora)
            if self._weights is not None:
                self._weights.changed()  # what was put together for the pass is not needed before the next
            return found

    @contextmanager
    def _at_hand(self) -> Iterator[None]:
        """Inside, the weights are on the device. They never change, so nothing has to be copied back."""
        if not self._is_away:
            yield
            return
        kept = [(parameter, parameter.data) for parameter in self._network.parameters()]
        try:
            for parameter, data in kept:
                parameter.data = data.to(self._device, non_blocking=True)
            yield
        finally:
            for parameter, data in kept:
                parameter.data = data
