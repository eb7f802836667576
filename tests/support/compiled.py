"""Compiles a Triton kernel for an NVIDIA GPU that need not be there: what the interpreter accepts, the compiler may not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HOPPER = 90


def compile_kernel(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], **options: int) -> int:
    """Compile to machine code for Hopper. `types` has Triton's name for each argument that is no constant, such as `*fp32` or
    `i32`; `options` are Triton's, such as num_warps. Returns the bytes of shared memory that it takes. Not where
    `TRITON_INTERPRET` is set."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    made = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options)
    assert "cubin" in made.asm
    return int(made.metadata.shared)
