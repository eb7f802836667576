"""The text of kernels for Hopper that bring their factors with the copy engine and multiply on tensor cores (`hopper.cuh`)."""

from __future__ import annotations

from pathlib import Path

COMMON = Path(__file__).with_suffix(".cuh")
INNER = 64
"""Of K, in a stage: `hopper.cuh`'s, as is what follows."""
LINE_BYTES = 2 * INNER
BARRIER_BYTES = 16
SHARED_MEMORY = 227 * 1024


def source(kernel: Path, width: int) -> str:
    """A kernel behind what it has in common with others, and behind the one instruction whose text depends on sizes: 64 rows by
    `width` columns, 16 of K."""
    N = width // 2
    registers, sums = (", ".join(form.format(i) for i in range(N)) for form in ("%{}", '"+f"(sums[{}])'))
    return f"""
__device__ __forceinline__ void multiply(float (&sums)[{N}], unsigned long long rows, unsigned long long columns) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {{{registers}}}, %{N}, %{N + 1}, 1, 1, 1, 0, 0;"
        : {sums} : "l"(rows), "l"(columns));
}}
{COMMON.read_text()}
{kernel.read_text()}"""
