"""What NVIDIA's driver says of a GPU, through nvidia-ml-py (the extra `gpu`). The only file that knows its names.

A driver answers what the GPU can tell: an older one has no SM activity, a virtual one no power. What is not supported is asked
once and then left out.

Counters are read once per sample and compared with those of the sample before. Nothing is waited for, but where only the driver
can count the bytes on the bus: that takes it 20 ms each way, and is asked for rarely.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from redline.config.installation import how_to_install

Reading = float | list[str]
Read = Callable[[Any, Any], tuple[Reading, ...]]
"""Reads from the module and the handle of a GPU, in one call of the driver."""

THROTTLES = {
    "SwPowerCap": "power_cap",
    "HwSlowdown": "slowdown",
    "SwThermalSlowdown": "thermal",
    "HwThermalSlowdown": "thermal_hardware",
    "HwPowerBrakeSlowdown": "power_brake",
    "SyncBoost": "sync_boost",
}
"""NVML's `nvmlClocksEventReason…` → our word. That a GPU is idle, or its clocks set by hand, is no throttling."""

READINGS: Mapping[tuple[str, ...], Read] = {
    ("utilization_percent", "memory_utilization_percent"): lambda nvml, gpu: _utilization(nvml, gpu),
    ("memory_used_bytes", "memory_total_bytes"): lambda nvml, gpu: _memory(nvml, gpu),
    ("power_w",): lambda nvml, gpu: (nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,),
    ("power_limit_w",): lambda nvml, gpu: (nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,),
    ("sm_clock_mhz",): lambda nvml, gpu: (nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),),
    ("memory_clock_mhz",): lambda nvml, gpu: (nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),),
    ("temperature_c",): lambda nvml, gpu: (_temperature(nvml, gpu),),
    ("throttle_reasons",): lambda nvml, gpu: (_throttles(nvml, gpu),),
}

ACTIVITY: Mapping[str, tuple[str, float]] = {
    "sm_activity_percent": ("NVML_GPM_METRIC_SM_UTIL", 1),
    "sm_occupancy_percent": ("NVML_GPM_METRIC_SM_OCCUPANCY", 1),
    "tensor_activity_percent": ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", 1),
    "memory_bandwidth_percent": ("NVML_GPM_METRIC_DRAM_BW_UTIL", 1),
    "pcie_sent_bytes_per_s": ("NVML_GPM_METRIC_PCIE_TX_PER_SEC", 2**20),  # NVML's unit is MiB/s
    "pcie_received_bytes_per_s": ("NVML_GPM_METRIC_PCIE_RX_PER_SEC", 2**20),
}
"""What performance counters tell, on Hopper and later: NVML's name, and what its unit is in ours. Utilisation only says that
some kernel ran."""

SLOW: Mapping[tuple[str, ...], Read] = {
    ("pcie_sent_bytes_per_s",): lambda nvml, gpu: (_pcie(nvml, gpu, nvml.NVML_PCIE_UTIL_TX_BYTES),),
    ("pcie_received_bytes_per_s",): lambda nvml, gpu: (_pcie(nvml, gpu, nvml.NVML_PCIE_UTIL_RX_BYTES),),
}
"""For those that no counter told: the driver counts for 20 ms before it answers. Other threads run meanwhile."""
SLOW_EVERY_S = 10.0

FIELDS = {name for names in (*READINGS, *SLOW) for name in names} | ACTIVITY.keys()
"""All that a sample may have of a GPU."""


def find_gpus(uuids: Sequence[str], tell: Callable[[str], None]) -> Gpus | None:
    """Those with these UUIDs (`GPU-…`). Where the library or the driver is missing, says so and returns None."""
    if not uuids:
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        tell(f"no GPU samples: nvidia-ml-py is not installed; {how_to_install('gpu')}")
        return None
    try:
        nvml.nvmlInit()
        return Gpus(nvml, [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids])
    except nvml.NVMLError as error:
        tell(f"no GPU samples: NVML says {str(error)!r}; the GPU's driver has to be visible where the run is")
        return None


def find_all_gpus() -> Gpus | None:
    """Those that the driver shows; None where there is none, or no library to ask."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        return Gpus(nvml, [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]) if count else None
    except nvml.NVMLError:
        return None


class Gpus:
    """A source of samples: `gpu/0/…`, `gpu/1/…`, in the order given."""

    def __init__(self, nvml: ModuleType, handles: Sequence[Any]) -> None:
        self._nvml: Any = nvml
        self._gpus = [_Gpu(nvml, handle) for handle in handles]

    def __call__(self) -> dict[str, Reading]:
        return {f"gpu/{number}/{name}": value for number, gpu in enumerate(self._gpus) for name, value in gpu.read().items()}

    def close(self) -> None:
        for gpu in self._gpus:
            gpu.close()
        self._nvml.nvmlShutdown()


class _Gpu:
    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._readings, self._slow = dict(READINGS), dict(SLOW)
        self._slow_due = 0.0
        self._activity = _Activity(nvml, handle) if _has_activity(nvml, handle) else None
        self._never = (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission)

    def read(self) -> dict[str, Reading]:
        values = self._ask(self._readings, list(self._readings))
        if self._activity:
            try:
                values |= self._activity.read()
            except self._nvml.NVMLError:
                self._activity = None
        missing = [names for names in self._slow if not values.keys() >= set(names)]
        if missing and (now := time.monotonic()) >= self._slow_due:
            self._slow_due = now + SLOW_EVERY_S
            values |= self._ask(self._slow, missing)
        return values

    def _ask(self, readings: dict[tuple[str, ...], Read], wanted: Sequence[tuple[str, ...]]) -> dict[str, Reading]:
        """What those that are wanted tell; one that this GPU will never tell is taken out."""
        values: dict[str, Reading] = {}
        for names in wanted:
            try:
                values |= zip(names, readings[names](self._nvml, self._handle), strict=True)
            except self._never:
                del readings[names]
            except self._nvml.NVMLError:
                pass  # not this time
        return values

    def close(self) -> None:
        if self._activity:
            self._activity.close()


class _Activity:
    """Counters between two moments: those of the last reading and now."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._before, self._now = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._asked = nvml.c_nvmlGpmMetricsGet_t()
        self._asked.version, self._asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(ACTIVITY)
        for place, (metric, _) in enumerate(ACTIVITY.values()):
            self._asked.metrics[place].metricId = getattr(nvml, metric)
        nvml.nvmlGpmSampleGet(handle, self._before)

    def read(self) -> dict[str, Reading]:
        nvml, asked = self._nvml, self._asked
        nvml.nvmlGpmSampleGet(self._handle, self._now)
        asked.sample1, asked.sample2 = self._before, self._now
        nvml.nvmlGpmMetricsGet(asked)
        self._before, self._now = self._now, self._before
        told = zip(ACTIVITY.items(), asked.metrics, strict=False)  # there is room for more
        return {name: scale * metric.value for (name, (_, scale)), metric in told if metric.nvmlReturn == nvml.NVML_SUCCESS}

    def close(self) -> None:
        for sample in (self._before, self._now):
            self._nvml.nvmlGpmSampleFree(sample)


def _has_activity(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
    except (AttributeError, nvml.NVMLError):  # a library or a driver from before there were such counters
        return False


def _utilization(nvml: Any, gpu: Any) -> tuple[Reading, ...]:
    rates = nvml.nvmlDeviceGetUtilizationRates(gpu)
    return rates.gpu, rates.memory


def _memory(nvml: Any, gpu: Any) -> tuple[Reading, ...]:
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    return memory.used, memory.total


def _pcie(nvml: Any, gpu: Any, direction: int) -> float:
    return 1024 * nvml.nvmlDeviceGetPcieThroughput(gpu, direction)


def _temperature(nvml: Any, gpu: Any) -> float:
    return _newest(nvml, "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")(gpu, nvml.NVML_TEMPERATURE_GPU)


def _newest(nvml: Any, name: str, former: str) -> Callable[..., Any]:
    """A call under its newest name, else under the one that newer libraries will drop and older drivers have."""

    def call(*args: Any) -> Any:
        try:
            return getattr(nvml, name)(*args)
        except (AttributeError, nvml.NVMLError_FunctionNotFound):
            return getattr(nvml, former)(*args)

    return call


def _throttles(nvml: Any, gpu: Any) -> list[str]:
    bits = _newest(nvml, "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")(gpu)
    return [word for name, word in THROTTLES.items() if bits & getattr(nvml, f"nvmlClocksEventReason{name}")]
