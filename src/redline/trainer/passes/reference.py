"""The policy before training, which a KL term compares with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from redline.models.copies import copy_network
from redline.models.files.hf import AnyDecoder
from redline.models.lora.per_token import BARE
from redline.models.lora.trainable import has_adapter
from redline.telemetry import span
from redline.trainer.batches.micro_batches import MicroBatch
from redline.trainer.passes.forward import ShareOf, recompute, whole


class Reference:
    """To be made before the first step or checkpoint changes the weights, and only where something needs it.

    Where an adapter is trained, the reference is the network without it and takes no memory. Else it is a frozen copy in the
    compute dtype, which `offload` keeps in host memory between passes.
    """

    def __init__(self, decoder: AnyDecoder, dtype: torch.dtype, temperature: float, *, offload: bool) -> None:
        self._temperature = temperature
        self._device = decoder.output_weight.device
        self._without_adapter = has_adapter(decoder)
        if self._without_adapter:
            self._network = decoder
            return
        self._network = copy_network(decoder, dtype, trainable=False, parameters_on="cpu" if offload else None)
        if offload and self._device.type == "cuda":
            for parameter in self._network.parameters():
                parameter.data = parameter.data.pin_memory()

    @property
    def network(self) -> AnyDecoder:
        """Its own, or the policy's where the adapter is all that differs."""
        return self._network

    def logprobs(self, micro_batches: Iterable[MicroBatch], share_of: ShareOf = whole) -> list[Tensor]:
        """float32[M] for each micro-batch, of its trained tokens under the reference."""
        with span("trainer.reference"), self._at_hand():
            lora = BARE if self._without_adapter else None
            return recompute(self._network, micro_batches, self._temperature, lora, share_of)

    @contextmanager
    def _at_hand(self) -> Iterator[None]:
        """Inside, the weights are on the device. They never change, so nothing has to be copied back."""
        kept = [(parameter, parameter.data) for parameter in self._network.parameters()]
        if all(data.device == self._device for _, data in kept):
            yield
            return
        try:
            for parameter, data in kept:
                parameter.data = data.to(self._device, non_blocking=True)
            yield
        finally:
            for parameter, data in kept:
                parameter.data = data
