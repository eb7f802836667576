"""Compiles a Triton kernel for an NVIDIA GPU that need not be there: what the interpreter accepts, the compiler may not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HOPPER = 90


def compile_kernel(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], **options: int) -> int:
    """Compile to machine code for Hopper. `types` has Triton's name for each argument that is no constant, such as `*fp32` or
    `i32`; `options` are Triton's, such as num_warps. Returns the bytes of shared memory that it takes. Not where
    `TRITON_INTERPRET` is set."""
    return int(_compiled(kernel, types, constants, options).metadata.shared)


def waits_first(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], **options: Any) -> bool:
    """Whether every program of a kernel, compiled as above, waits for the launch in front of it before it does anything to
    memory, lets the next one begin, or ends."""
    ptx = _compiled(kernel, types, constants, options).asm["ptx"]
    body = ptx[ptx.index(".entry") :]
    before, wait, after = re.sub(r"//.*", "", body).partition("griddepcontrol.wait")
    done = re.search(r"\b(ld\.global|st\.global|ld\.volatile|cp\.async|atom|red|bra|ret|exit|griddepcontrol)\b", before)
    return bool(wait) and done is None and "griddepcontrol.launch_dependents" in after


def _compiled(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    made = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=dict(options))
    assert "cubin" in made.asm
    return made
