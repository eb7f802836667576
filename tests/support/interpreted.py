"""Makes Triton's interpreter quicker without changing what it computes. For processes that compile no kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np


class _Stays:
    """In place of what would take the functions away again."""

    def restore(self) -> None: ...


def make_interpreter_quicker() -> None:
    _patch_language_once()
    _look_up_types_once()
    _make_types_once()
    _make_shapes_once()
    _compare_shapes_as_they_are()
    _leave_equal_shapes()
    _check_no_overflow()


def _patch_language_once() -> None:
    """It gives the language its own functions at every launch, and again at every call of a function inside a kernel, by
    looking through all that the language has: most of the time of kernels as small as these. Given once, they may stay."""
    from triton.runtime import interpreter

    patch, stays = interpreter._patch_lang, _Stays()
    seen: set[int] = set()
    """Modules whose functions have been run: each may know the language by other names."""

    def patch_once(function: Any) -> _Stays:
        if (module := id(function.__globals__)) not in seen:
            patch(function)
            seen.add(module)
        return stays

    interpreter._patch_lang = patch_once


def _look_up_types_once() -> None:
    """It makes a table of numpy's types for every value that it converts."""
    from triton.runtime import interpreter

    look_up, known = interpreter._get_np_dtype, dict[str, np.dtype]()

    def look_up_once(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = look_up_once


def _make_types_once() -> None:
    """It makes the type of every block anew, with its name."""
    from triton.language import core

    make, known = core.block_type.__init__, dict[tuple[Any, ...], dict[str, Any]]()

    def make_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        if key in known:
            self.__dict__ = known[key]
        else:
            make(self, element_ty, shape)
            known[key] = self.__dict__

    core.block_type.__init__ = make_once


def _make_shapes_once() -> None:
    """It makes the shape of every tensor anew, though those of one type have one."""
    from triton.language import core

    make = core.tensor.__init__

    def make_once(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("known_of_tensors")
        if known is None:
            make(self, handle, type)
            type.known_of_tensors = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    core.tensor.__init__ = make_once


def _compare_shapes_as_they_are() -> None:
    """It copies what it compares with, number by number."""
    from triton.language import core

    def equals(self: Any, other: Any) -> Any:
        values = other.values if isinstance(other, core.tuple) else list(core._unwrap_if_constexpr(other))
        return core.constexpr(self.values == values)

    core.tuple.__eq__ = equals


def _leave_equal_shapes() -> None:
    """It works out a common shape, size by size, for two tensors that have one."""
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_others


def _check_no_overflow() -> None:
    """It works out of every sum of integers whether it overflows, and says so only where it debugs."""
    from triton.runtime.interpreter import interpreter_builder

    if not interpreter_builder.options.debug:
        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
