"""Bytes by kind as they are now. What the stages hold they say themselves; the rest is what the allocator says less that.

               CUDA                                            CPU
    known      weights, kv_cache, gradients, optimizer         the same
    rest       activations = allocated − known                 other = resident − known
               fragmentation = reserved − allocated
    sum        reserved                                        resident

Resident memory does not say what it is used for: on the CPU, activations, the interpreter with its libraries, and freed blocks
that malloc keeps are one kind.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import psutil
import torch
from torch import Tensor, nn

Kinds = Mapping[str, int]
"""`weights`, `kv_cache`, … → bytes on the device of the run. Beside them may stand `offloaded`, in host memory, and
`activations_planned`, which are part of no sum."""
BESIDE = ("offloaded", "activations_planned")


class MemoryUse:
    """A source of samples: `memory/KIND_bytes`."""

    def __init__(self, device: torch.device, known: Callable[[], Kinds]) -> None:
        self._device = device
        self._known = known
        self._most_known = 0
        self._process = psutil.Process()

    def __call__(self) -> dict[str, int]:
        known = self._known()
        held = sum(size for kind, size in known.items() if kind not in BESIDE)
        self._most_known = max(self._most_known, held)
        rest = self._rest_on_cuda(held) if self._device.type == "cuda" else self._rest_on_cpu(held)
        return {f"memory/{kind}_bytes": size for kind, size in {**known, **rest}.items()}

    def _rest_on_cuda(self, held: int) -> dict[str, int]:
        allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        return {
            "activations": max(0, allocated - held),
            # Gradients come and go; at the peak they were there.
            "activations_peak": max(0, torch.cuda.max_memory_allocated(self._device) - self._most_known),
            "fragmentation": reserved - allocated,
            "peak": torch.cuda.max_memory_reserved(self._device),
        }

    def _rest_on_cpu(self, held: int) -> dict[str, int]:
        """Pages that were never written are held and not resident, as moments are before the first step."""
        return {
            "other": max(0, self._process.memory_info().rss - held),
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        }


def weight_bytes(networks: Iterable[nn.Module]) -> Counter[str]:
    """Bytes of the parameters by the type of device that they lie on; one that several networks share counts once."""
    return tensor_bytes(parameter for network in networks for parameter in network.parameters())


def tensor_bytes(tensors: Iterable[Tensor]) -> Counter[str]:
    """Bytes by the type of device that the tensors lie on; each counts once, however often it comes."""
    sizes = Counter[str]()
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        sizes[tensor.device.type] += tensor.nbytes
    return sizes
