"""How many operations per second a device can do at best: what MFU is a share of."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch

BFLOAT16_TFLOPS = {
    "NVIDIA A10": 125,
    "NVIDIA A100": 312,
    "NVIDIA A40": 150,
    "NVIDIA B200": 2250,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA H100": 989,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362,
    "NVIDIA RTX A6000": 155,
}
"""Dense products with tensor cores, as the vendor's data sheets have them. Keys are the names that the driver gives."""
MEASURED_SIZE = {"cpu": 1024, "cuda": 8192}
REPEATS = 4


@dataclass(slots=True, frozen=True)
class Peak:
    flops: float
    """Per second, of one device."""
    why: str


def find_peak(device: torch.device, dtype: torch.dtype, wanted: Literal["auto", "measure"] | float) -> Peak | None:
    """As the recipe says (`telemetry.peak_tflops`); None where it is not known."""
    if wanted == "measure":
        return measure_peak(device, dtype)
    if wanted != "auto":
        return Peak(float(wanted) * 1e12, "as the recipe says")
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    tflops = data_sheet(name)
    return Peak(tflops * 1e12, f"data sheet of {name}") if tflops else None


def data_sheet(name: str) -> float | None:
    """By the longest key that the name begins with, as whole words: `NVIDIA H100 80GB HBM3` is no `NVIDIA H100 PCIe`."""
    known = [key for key in BFLOAT16_TFLOPS if name == key or name.startswith((f"{key} ", f"{key}-"))]
    return BFLOAT16_TFLOPS[max(known, key=len)] if known else None


def measure_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """The best of a few products of large matrices, with the threads that the run has."""
    size = MEASURED_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = math.inf
    for _ in range(1 + REPEATS):  # the first warms up, and is never the best
        started = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    name = str(dtype).removeprefix("torch.")
    return Peak(2 * size**3 / best, f"measured at the start: the best of {REPEATS} {name} products of {size}³")
