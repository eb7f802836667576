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


def _check_no_overflow() -> None:
    """It works out of every sum of integers whether it overflows, and says so only where it debugs."""
    from triton.runtime.interpreter import interpreter_builder

    if not interpreter_builder.options.debug:
        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
