"""How the receiver knows that it has the right bytes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class SameStorage:
    """Proof by address: an engine that reads the very memory that the trainer writes has the right bytes.

    Keeps the engine's tensors alive. An address that is equal is therefore the same memory, never another tensor's that was
    put there after the first had been freed."""

    def __init__(self, engine_tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(engine_tensors)
        self._addresses = _addresses(engine_tensors)
        self._has_same_form = False
        """Shapes and types are compared once: memory that stays in place keeps them."""

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise AssertionError unless these tensors lie where the engine reads, all of them and no others."""
        addresses = _addresses(tensors)
        assert addresses == self._addresses, (
            "the trainer replaced its tensors; the engine still reads the old ones: "
            + ", ".join(sorted({name for name, _ in addresses.items() ^ self._addresses.items()}))
        )
        if not self._has_same_form:
            for name, tensor in tensors.items():
                engines = self._tensors[name]
                assert (tensor.shape, tensor.dtype) == (engines.shape, engines.dtype), (
                    f"{name}: the trainer writes {tensor.dtype} {list(tensor.shape)},"
                    f" the engine reads {engines.dtype} {list(engines.shape)}"
                )
            self._has_same_form = True


def _addresses(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
