"""The policy as one network that an engine can sample from, whatever ranks do with its weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from redline.models.copies import empty_copy
from redline.models.files.hf import AnyDecoder
from redline.telemetry import span
from redline.trainer.parallel.processes import Parallel
from redline.trainer.parallel.weights import Weights


class SampledFrom:
    """The trainer's own network; or, where ranks divide its weights, a copy that rank 0 alone has and every step fills."""

    def __init__(self, decoder: AnyDecoder, dtype: torch.dtype, parallel: Parallel) -> None:
        """`decoder` is the whole network, before it is cut or divided."""
        self._dtype, self._parallel = dtype, parallel
        self._copy: AnyDecoder | None = None
        if parallel.is_divided and parallel.is_main:
            assert parallel.device is not None
            self._copy = empty_copy(decoder, dtype, parallel.device)

    def network(self, own: AnyDecoder) -> AnyDecoder:
        """The copy, or where there is none the network of this process."""
        return own if self._copy is None else self._copy

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Those of the copy; none where there is no copy."""
        return () if self._copy is None else tuple(self._copy.parameters())

    @torch.no_grad()
    def fill(self, weights: Weights, parts: Mapping[str, Tensor], version: int) -> None:
        """Put weights that ranks divide together in the copy, one tensor at a time. All ranks must call it at once."""
        if not self._parallel.is_divided:
            return
        with span("weight_sync.gather", device=True, version=version):
            into = {} if self._copy is None else dict(self._copy.named_parameters())
            for name, whole in weights.full(parts, self._dtype):
                if into:
                    into[name].copy_(whole)
