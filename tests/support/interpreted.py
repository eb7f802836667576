"""Makes Triton's interpreter quicker without changing what it computes.

It gives the language its own functions at every launch, and again at every call of a function inside a kernel, by looking
through all that the language has: that takes most of the time of kernels as small as these. Given once, they may stay, in a
process that compiles nothing."""

from __future__ import annotations

from typing import Any


class _Stays:
    """In place of what would take the functions away again."""

    def restore(self) -> None: ...


def patch_language_once() -> None:
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
