"""What the routers of a mixture of experts did in an update, over the processes that took part in it."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.models.decoder import DecoderLayer
from redline.models.files.hf import AnyDecoder
from redline.models.layers.experts import Experts
from redline.models.layers.routing_notes import NAMES, RoutingNotes, summary
from redline.models.spec import DecoderSpec
from redline.trainer.parallel.processes import Parallel


class WatchedRouting:
    """Has the experts of a network note their passes with gradients. A network without experts has nothing to note."""

    def __init__(self, network: AnyDecoder, device: torch.device, *, replays: bool = False) -> None:
        """With `replays`, tokens go to the experts that they went to in the engine, where a batch says which."""
        spec = network.spec
        experts = spec.experts if isinstance(spec, DecoderSpec) else None
        self._layers = () if experts is None else experts.layers
        self._width = 0 if experts is None else RoutingNotes.width(experts.count)
        self._notes: dict[int, RoutingNotes] = {}
        """By the index of the layer in the whole network, of which this process may have a part."""
        for layer in network.modules():
            if isinstance(layer, DecoderLayer) and isinstance(layer.experts, Experts):
                notes = RoutingNotes(layer.experts.spec.count, device, replays=replays)
                layer.experts.notes = self._notes[layer.index] = notes
        self._empty = torch.zeros(0, dtype=torch.float64, device=device)

    @property
    def names(self) -> tuple[str, ...]:
        """What `take` returns, in order."""
        return NAMES if self._layers else ()

    def clear(self) -> None:
        """Forget what was noted: a pass begins, perhaps again."""
        for notes in self._notes.values():
            notes.sums.zero_()

    def take(self, parallel: Parallel) -> Tensor:
        """float64: `names`, over what all processes noted, which must ask at once. Of processes that share a sequence, each
        notes its own tokens, and those of the first of them count. Does not wait for the device."""
        if not self._layers:
            return self._empty
        return summary(parallel.sum_of(torch.stack([self._sums(layer) for layer in self._layers])))

    def _sums(self, layer: int) -> Tensor:
        """Those of a layer, zeros where another process has it."""
        notes = self._notes.get(layer)
        return self._empty.new_zeros(self._width) if notes is None else notes.sums
