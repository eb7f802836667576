"""What NVIDIA's driver says of a GPU, through nvidia-ml-py (the extra `gpu`). The only file that knows its names.

A driver answers what the GPU can tell: an older one has no SM activity, a virtual one no power. What is not supported is asked
once and then left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Reading = float | list[str]
Read = Callable[[Any, Any], Reading]
"""Of the module and the handle of a GPU."""

THROTTLES = {
    "SwPowerCap": "power_cap",
    "HwSlowdown": "slowdown",
    "SwThermalSlowdown": "thermal",
    "HwThermalSlowdown": "thermal_hardware",
    "HwPowerBrakeSlowdown": "power_brake",
    "SyncBoost": "sync_boost",
}
"""NVML's `nvmlClocksEventReason…` → our word. That a GPU is idle, or its clocks set by hand, is no throttling."""

READINGS: Mapping[str, Read] = {
    "utilization_percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory_utilization_percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).memory,
    "memory_used_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "memory_total_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    "power_limit_w": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    "sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "temperature_c": lambda nvml, gpu: _temperature(nvml, gpu),
    # The driver counts for 20 ms before it answers either; other threads run meanwhile.
    "pcie_sent_bytes_per_s": lambda nvml, gpu: 1024 * nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_TX_BYTES),
    "pcie_received_bytes_per_s": lambda nvml, gpu: 1024 * nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_RX_BYTES),
    "throttle_reasons": lambda nvml, gpu: _throttles(nvml, gpu),
}

ACTIVITY = {
    "sm_activity_percent": "NVML_GPM_METRIC_SM_UTIL",
    "sm_occupancy_percent": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor_activity_percent": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "memory_bandwidth_percent": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
"""What performance counters tell, on Hopper and later: utilisation only says that some kernel ran."""


def find_gpus(uuids: Sequence[str], tell: Callable[[str], None]) -> Gpus | None:
    """Those with these UUIDs (`GPU-…`). Where the library or the driver is missing, says so and returns None."""
    if not uuids:
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        tell("no GPU samples: nvidia-ml-py is not installed; pip install 'redline-rl[gpu]'")
        return None
    try:
        nvml.nvmlInit()
        return Gpus(nvml, [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids])
    except nvml.NVMLError as error:
        tell(f"no GPU samples: NVML says {str(error)!r}; the GPU's driver has to be visible where the run is")
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
        self._readings = dict(READINGS)
        self._activity = _Activity(nvml, handle) if _has_activity(nvml, handle) else None
        self._never = (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission)

    def read(self) -> dict[str, Reading]:
        values: dict[str, Reading] = {}
        for name, read in list(self._readings.items()):
            try:
                values[name] = read(self._nvml, self._handle)
            except self._never:
                del self._readings[name]
            except self._nvml.NVMLError:
                pass  # not this time
        if self._activity:
            try:
                values |= self._activity.read()
            except self._nvml.NVMLError:
                self._activity = None
        return values

    def close(self) -> None:
        if self._activity:
            self._activity.close()


class _Activity:
    """Counters between two moments: those of the last reading and now."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._before, self._now = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(handle, self._before)

    def read(self) -> dict[str, Reading]:
        nvml = self._nvml
        nvml.nvmlGpmSampleGet(self._handle, self._now)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(ACTIVITY)
        asked.sample1, asked.sample2 = self._before, self._now
        for place, metric in enumerate(ACTIVITY.values()):
            asked.metrics[place].metricId = getattr(nvml, metric)
        nvml.nvmlGpmMetricsGet(asked)
        self._before, self._now = self._now, self._before
        told = {name: asked.metrics[place] for place, name in enumerate(ACTIVITY)}
        return {name: metric.value for name, metric in told.items() if metric.nvmlReturn == nvml.NVML_SUCCESS}

    def close(self) -> None:
        for sample in (self._before, self._now):
            self._nvml.nvmlGpmSampleFree(sample)


def _has_activity(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
    except (AttributeError, nvml.NVMLError):  # a library or a driver from before there were such counters
        return False


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
