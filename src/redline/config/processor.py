"""What the CPU of this machine can do, by the flags that Linux shows of it. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from redline.config.sections.engine import Quantization

BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Flags of CPUs that multiply bfloat16 themselves; the last is ARM's."""
WHOLE_NUMBER_FLAGS: dict[Quantization, tuple[str, ...]] = {
    "int8": ("avx512_vnni", "avx_vnni", "asimddp"),
    "int16": ("avx512_vnni", "avx_vnni", "avx2"),
}
"""Flags of CPUs whose products of whole numbers are as fast as those of float32 or faster; `asimddp` is ARM's."""
CPUINFO = Path("/proc/cpuinfo")


def bfloat16_flags(cpuinfo: Path = CPUINFO) -> list[str]:
    """What this CPU has of `BFLOAT16_FLAGS`."""
    return _found(BFLOAT16_FLAGS, cpuinfo)


def multiplies_in(quantization: Quantization, cpuinfo: Path = CPUINFO) -> bool:
    """Whether this CPU has instructions for such products; none have those of floating point in 8 bits."""
    return quantization == "none" or bool(_found(WHOLE_NUMBER_FLAGS.get(quantization, ()), cpuinfo))


def _found(flags: tuple[str, ...], cpuinfo: Path) -> list[str]:
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    own = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return [flag for flag in flags if flag in own]
