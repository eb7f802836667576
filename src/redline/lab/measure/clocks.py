"""How fast processors and GPUs are clocked at this moment. A machine that throttles is another machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

CPUFREQ = Path("/sys/devices/system/cpu/cpu0/cpufreq")
GPU_FIELDS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
    "pcie.link.gen.max": "pcie_generation",
    "pcie.link.width.max": "pcie_lanes",
}
"""nvidia-smi's word → ours. Of the link the most it can be: an idle one sleeps at a lower generation."""


def read_clocks() -> dict[str, Any]:
    """Whatever of it the machine tells: a virtual one may keep its frequency limits to itself."""
    cpu = {
        "mhz": _current_mhz(),
        "max_mhz": _mhz(CPUFREQ / "cpuinfo_max_freq"),
        "governor": _text(CPUFREQ / "scaling_governor"),
    }
    return {"cpu": {name: value for name, value in cpu.items() if value is not None}, "gpus": _gpus()}


def _current_mhz() -> list[float] | None:
    """The clock of every core, in MHz."""
    found = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", _text(Path("/proc/cpuinfo")) or "", flags=re.MULTILINE)
    return [float(mhz) for mhz in found] or None


def _mhz(path: Path) -> float | None:
    text = _text(path)
    return int(text) / 1e3 if text else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _gpus() -> list[dict[str, float]]:
    query = f"--query-gpu={','.join(GPU_FIELDS)}"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu_row(line) for line in done.stdout.splitlines()]


def gpu_row(line: str) -> dict[str, float]:
    """A line of nvidia-smi; what the GPU does not tell (`[N/A]`) is left out."""
    values = dict(zip(GPU_FIELDS.values(), line.split(", "), strict=False))
    return {name: float(value) for name, value in values.items() if re.fullmatch(r"[\d.]+", value)}
