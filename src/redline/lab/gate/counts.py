"""What a piece of work asks of Python and of torch, counted: the same on a busy machine as on an idle one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

COPIES = ("aten::_to_copy", "aten::copy_", "aten::clone")


@dataclass(slots=True, frozen=True)
class Counts:
    python_calls: int
    """Calls of functions, Python's and C's, in the calling thread."""
    operators: int
    """Calls that reach torch's dispatcher below autograd; views among them."""
    copies: int
    """Operators that copy a tensor."""
    allocated_bytes: int
    """Bytes of all results that have storage of their own, even if it is freed at once."""
    flops: int
    """Operations of products and attention, as torch counts them: without decode steps and attention in C."""

    def as_json(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def count(work: Callable[[], object]) -> Counts:
    """`work` is done three times and has to be the same each time; the first is its warm-up."""
    work()
    calls = _python_calls(work)
    operators = _Operators()
    with FlopCounterMode(display=False) as flops, operators:
        work()
    return Counts(calls, operators.calls, operators.copies, operators.allocated_bytes, flops.get_total_flops())


def _python_calls(work: Callable[[], object]) -> int:
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


@dataclass
class _Operators(TorchDispatchMode):
    calls: int = 0
    copies: int = 0
    allocated_bytes: int = 0
    names: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        self.copies += func._schema.name in COPIES
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        made = {_storage(tensor): tensor for tensor in _tensors(result)}
        self.allocated_bytes += sum(t.untyped_storage().nbytes() for place, t in made.items() if place not in given)
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []
