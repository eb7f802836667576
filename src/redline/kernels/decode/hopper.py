"""The text of kernels for Hopper that bring their factors with the copy engine and multiply on tensor cores (`hopper.cuh`)."""

from __future__ import annotations

from pathlib import Path

COMMON = Path(__file__).with_suffix(".cuh")
LINE_BYTES = 128
"""Of a row, in a stage: `hopper.cuh`'s, as is what follows."""
INNER = LINE_BYTES // 2
"""Of K, in a stage of bfloat16."""
BARRIER_BYTES = 16
SHARED_MEMORY = 227 * 1024
INSTRUCTIONS = {2: ("k16.f32.bf16.bf16", "1, 1, 1, 0, 0"), 1: ("k32.f32.e4m3.e4m3", "1, 1, 1")}
"""By the bytes of a number: of K and of which types, and what is added, negated and transposed; numbers of 8 bits never are the
last."""


def source(kernel: Path, width: int, number_bytes: int = 2) -> str:
    """A kernel behind what it has in common with others, and behind the one instruction whose text depends on sizes: 64 rows by
    `width` columns, 32 bytes of K."""
    N, (kind, how) = width // 2, INSTRUCTIONS[number_bytes]
    registers, sums = (", ".join(form.format(i) for i in range(N)) for form in ("%{}", '"+f"(sums[{}])'))
    return f"""
constexpr int BYTES = {number_bytes};
__device__ __forceinline__ void multiply(float (&sums)[{N}], unsigned long long rows, unsigned long long columns) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n{width}{kind} {{{registers}}}, %{N}, %{N + 1}, {how};"
        : {sums} : "l"(rows), "l"(columns));
}}
{COMMON.read_text()}
{kernel.read_text()}"""
