"""What devices have, from their makers' data sheets: dense bfloat16, no sparsity. Loads no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from redline.errors import ConfigError

MIB = 2**20
GB, TB = 1e9, 1e12


@dataclass(slots=True, frozen=True)
class Device:
    """One accelerator, or the cores of one machine."""

    name: str
    memory_bytes: int
    """As the driver reports it."""
    flops: float
    """Dense bfloat16 operations per second, products summed in float32."""
    bandwidth: float
    """Bytes per second of its own memory."""
    host_bandwidth: float
    """Bytes per second to or from host memory, each way; from pinned pages."""
    link_bandwidth: float
    """Bytes per second to another one in the same machine, each way; over the host's bus where there is no link of its own."""
    watts: int
    """Most that it draws."""
    price: float
    """Dollars per hour: what clouds ask without a contract, rounded. Say what you pay with `--price`."""
    kind: str = "cuda"

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def has_fp8(self) -> bool:
        """Whether it multiplies numbers of 8-bit floating point: since Ada and Hopper."""
        return self.is_gpu and self.name not in WITHOUT_FP8

    def flops_in(self, dtype: str) -> float:
        """Operations per second of products in that dtype. A CPU's rate was measured in its own."""
        return FLOAT32_FLOPS.get(self.name, self.flops) if dtype == "float32" else self.flops


# A PCIe link of generation 4 or 5 with 16 lanes carries 32 or 64 GB/s each way, of which copies from pinned memory reach about
# 85%. NVLink figures of data sheets are for both directions together; here is one.
PCIE4, PCIE5 = 26 * GB, 55 * GB

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("b200", 183_359 * MIB, 2250e12, 8.0 * TB, PCIE5, 900 * GB, 1000, 5.0),  # HBM3e, NVLink 5: 1.8 TB/s
        Device("h200", 143_771 * MIB, 989.4e12, 4.8 * TB, PCIE5, 450 * GB, 700, 3.0),  # HBM3e, NVLink 4: 900 GB/s
        Device("h100", 81_559 * MIB, 989.4e12, 3.35 * TB, PCIE5, 450 * GB, 700, 2.0),  # SXM, HBM3, NVLink 4: 900 GB/s
        Device("h100-nvl", 95_830 * MIB, 835e12, 3.9 * TB, PCIE5, 300 * GB, 400, 2.0),  # HBM3, NVLink bridge: 600 GB/s
        Device("h100-pcie", 81_559 * MIB, 756e12, 2.0 * TB, PCIE5, 300 * GB, 350, 1.8),  # HBM2e
        Device("a100", 81_920 * MIB, 312e12, 2.039 * TB, PCIE4, 300 * GB, 400, 1.5),  # SXM, 80 GB, NVLink 3: 600 GB/s
        Device("a100-40gb", 40_960 * MIB, 312e12, 1.555 * TB, PCIE4, 300 * GB, 400, 1.2),
        Device("l40s", 46_068 * MIB, 362e12, 0.864 * TB, PCIE4, PCIE4, 350, 1.0),  # GDDR6, no NVLink
        Device("a10g", 23_028 * MIB, 70e12, 0.6 * TB, PCIE4, PCIE4, 300, 0.8),
        Device("l4", 23_034 * MIB, 121e12, 0.3 * TB, PCIE4, PCIE4, 72, 0.6),
        Device("rtx4090", 24_564 * MIB, 165.2e12, 1.008 * TB, PCIE4, PCIE4, 450, 0.5),
    )
}
FLOAT32_FLOPS: Mapping[str, float] = {
    "b200": 75e12,
    "h200": 67e12,
    "h100": 67e12,
    "h100-nvl": 60e12,
    "h100-pcie": 51e12,
    "a100": 19.5e12,
    "a100-40gb": 19.5e12,
    "l40s": 91.6e12,
    "a10g": 35e12,
    "l4": 30.3e12,
    "rtx4090": 82.6e12,
}
"""Operations per second in float32. Such products do not use the tensor cores: torch leaves TF32 off, and so do we."""
WITHOUT_FP8 = ("a100", "a100-40gb", "a10g")
CPU_PRICE = 0.1
"""Dollars per hour of a few cores."""


def find_device(name: str) -> Device:
    """By its name here, or as a driver writes it (`NVIDIA H100 80GB HBM3`)."""
    short = _short(name)
    if short in DEVICES:
        return DEVICES[short]
    known = [*DEVICES, "cpu"]
    near = difflib.get_close_matches(short, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
    raise ConfigError(f"--gpu {name}: no such device in the table", hint)


def _short(name: str) -> str:
    """`NVIDIA A100-SXM4-40GB` → `a100-40gb`."""
    lower = name.strip().lower().removeprefix("nvidia ").removeprefix("geforce ").replace("rtx ", "rtx")
    if lower in DEVICES:
        return lower
    words = re.split(r"[\s-]+", lower)
    for variant in words[1:]:
        if f"{words[0]}-{variant}" in DEVICES:
            return f"{words[0]}-{variant}"
    return words[0]


def with_prices(device: Device, prices: Sequence[str]) -> Device:
    """`h200=4.0` for each device whose hour costs something else; those of other devices are checked and change nothing."""
    for given in prices:
        name, equals, text = given.partition("=")
        try:
            price = float(text)
        except ValueError:
            price = -1.0
        if not equals or not 0 <= price < float("inf"):
            raise ConfigError(f"--price {given}: not of the form device=dollars per hour", "for example --price h200=4.0")
        if name != "cpu" and name not in DEVICES:
            raise ConfigError(f"--price {given}: no such device in the table", f"one of {', '.join([*DEVICES, 'cpu'])}")
        if name == device.name:
            device = replace(device, price=price)
    return device
