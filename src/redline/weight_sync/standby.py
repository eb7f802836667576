"""A second set of an engine's weights: filled while the engine samples from the first, exchanged between two of its steps.

    begin(version) ──► put(tensors) … ──► adopt() ──► the engine reads the new bytes, standby has the old ones
                                             │
                                             └──► revert() ──► the engine reads the old bytes again

Only tensors that were put are exchanged: those of the engine that did not change stay where they are. Bytes are exchanged, not
addresses, since captured graphs and views of fused tensors know the addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from redline.errors import EngineError


class StandbyWeights:
    """The standby set of one engine. Memory for a tensor is taken when it comes for the first time."""

    def __init__(self, live: Mapping[str, Tensor], version: int = 0) -> None:
        """`live`: the tensors that the engine reads, by the trainer's names."""
        self._live = {name: tensor.detach() for name, tensor in live.items()}
        self._standby: dict[str, Tensor] = {}
        self._staged: dict[str, None] = {}
        self._adopted: tuple[str, ...] | None = None
        """What `revert` takes back; None where there is nothing."""
        self.version = version
        """The version that the engine reads."""
        self.version_before = version
        """The version that `revert` goes back to."""
        self.staged_version: int | None = None
        """The version that is being put together; None between an adoption and the next `begin`."""

    @property
    def live(self) -> Mapping[str, Tensor]:
        """What the engine reads."""
        return self._live

    @property
    def staged(self) -> tuple[str, ...]:
        """Names that came since `begin`."""
        return tuple(self._staged)

    def begin(self, version: int) -> None:
        """Forget what came for another version, and the version before the one that the engine reads."""
        self._staged, self._adopted, self.staged_version = {}, None, version

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors of the version that is being put together. Blocks until they are on the engine's device and checked
        there. Raises EngineError, and takes none of them, where the engine has no such tensors."""
        assert self.staged_version is not None, "begin first"
        for name, tensor in tensors.items():
            self._check_form(name, tensor)
        for name, tensor in tensors.items():
            there = self._standby.setdefault(name, torch.empty_like(self._live[name]))
            there.copy_(tensor)
            if checksum(there) != checksum(tensor):
                raise EngineError(f"{name}: other bytes have arrived on the device than were sent", "send the weights again")
            self._staged[name] = None

    def _check_form(self, name: str, tensor: Tensor) -> None:
        there = self._live.get(name)
        if there is None:
            raise EngineError(f"the engine has no tensor {name}", "trainer and engine must run the same model")
        if (tensor.dtype, tensor.shape) != (there.dtype, there.shape):
            raise EngineError(
                f"{name}: {tensor.dtype} {list(tensor.shape)} was sent, the engine reads {there.dtype} {list(there.shape)}",
                "trainer and engine must run the same model in the same type",
            )

    def check_staged(self, version: int, names: Iterable[str]) -> None:
        """Raise EngineError unless this version is staged, with exactly these tensors."""
        if version != self.staged_version:
            raise EngineError(f"version {version} was not sent; the one that was is {self.staged_version}", "send it first")
        if missing := set(names) ^ set(self._staged):
            raise EngineError(f"version {version} is not whole: {', '.join(sorted(missing)[:5])}", "send it again")

    @torch.no_grad()
    def adopt(self) -> None:
        """Exchange what was staged with what the engine reads. For the thread that steps the engine, between two steps."""
        assert self.staged_version is not None
        self._exchange(self._staged)
        self._adopted = tuple(self._staged)
        self.version_before, self.version = self.version, self.staged_version
        self._staged, self.staged_version = {}, None

    @torch.no_grad()
    def revert(self, version: int) -> None:
        """Go back to the version before, or drop what was staged where the engine still reads that version. For the thread that
        steps the engine. Raises EngineError where the version is gone."""
        if version == self.version:
            self._staged, self.staged_version = {}, None
            return
        if self._adopted is None or version != self.version_before:
            raise EngineError(f"version {version} is gone; the engine is at {self.version}", "send it again")
        self._exchange(self._adopted)
        self.version, self._adopted = self.version_before, None

    def _exchange(self, names: Iterable[str]) -> None:
        for name in names:
            live, standby = self._live[name], self._standby[name]
            old = live.clone()
            live.copy_(standby)
            standby.copy_(old)


def checksum(tensor: Tensor) -> int:
    """A sum over a tensor's bytes that any device computes; two tensors of one form with other bytes rarely have the same."""
    if tensor.numel() == 0:
        return 0
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    return int(words.sum()) + int(flat[words.numel() * 8 :].sum())
