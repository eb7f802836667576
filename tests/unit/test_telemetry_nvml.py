"""The adapter, through the real library, on a driver made here: functions of C that fill in what they are pointed at."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pynvml
import pytest

from redline.telemetry.nvml import ACTIVITY, READINGS, find_gpus

UUID = "GPU-5b3e1a9c-0000-1111-2222-333344445555"


class Driver:
    """An H200. `nvmlDevice…` are called with a handle and a reference to what they shall write."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.returns: dict[str, int] = {}
        """Function → what it returns instead of success."""
        self.reasons = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonGpuIdle
        self.supports_activity = 1

    def __getattr__(self, name: str) -> Any:
        fill = getattr(type(self), f"_{name}", None)
        if not name.startswith("nvml") or fill is None:
            raise AttributeError(name)

        def function(*args: Any) -> int:
            self.calls.append(name)
            if self.returns.get(name):
                return self.returns[name]
            fill(self, *(argument._obj if hasattr(argument, "_obj") else argument for argument in args))
            return int(pynvml.NVML_SUCCESS)

        return function

    def _nvmlInitWithFlags(self, flags: int) -> None: ...

    def _nvmlShutdown(self) -> None: ...

    def _nvmlDeviceGetHandleByUUID(self, uuid: ctypes.c_char_p, device: Any) -> None:
        assert uuid.value == UUID.encode()

    def _nvmlDeviceGetUtilizationRates(self, device: Any, out: Any) -> None:
        out.gpu, out.memory = 83, 41

    def _nvmlDeviceGetMemoryInfo(self, device: Any, out: Any) -> None:
        out.total, out.used = 150_000_000_000, 90_000_000_000

    def _nvmlDeviceGetPowerUsage(self, device: Any, out: Any) -> None:
        out.value = 612_500

    def _nvmlDeviceGetEnforcedPowerLimit(self, device: Any, out: Any) -> None:
        out.value = 700_000

    def _nvmlDeviceGetClockInfo(self, device: Any, kind: Any, out: Any) -> None:
        out.value = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}[kind.value]

    def _nvmlDeviceGetTemperatureV(self, device: Any, out: Any) -> None:
        assert out.sensorType == pynvml.NVML_TEMPERATURE_GPU
        out.temperature = 61

    def _nvmlDeviceGetTemperature(self, device: Any, sensor: Any, out: Any) -> None:
        out.value = 61

    def _nvmlDeviceGetPcieThroughput(self, device: Any, counter: Any, out: Any) -> None:
        out.value = {pynvml.NVML_PCIE_UTIL_TX_BYTES: 10, pynvml.NVML_PCIE_UTIL_RX_BYTES: 20}[counter.value]

    def _nvmlDeviceGetCurrentClocksEventReasons(self, device: Any, out: Any) -> None:
        out.value = self.reasons

    def _nvmlDeviceGetCurrentClocksThrottleReasons(self, device: Any, out: Any) -> None:
        out.value = self.reasons

    def _nvmlGpmQueryDeviceSupport(self, device: Any, out: Any) -> None:
        assert out.version == pynvml.NVML_GPM_SUPPORT_VERSION
        out.isSupportedDevice = self.supports_activity

    def _nvmlGpmSampleAlloc(self, out: Any) -> None: ...

    def _nvmlGpmSampleGet(self, device: Any, sample: Any) -> None: ...

    def _nvmlGpmSampleFree(self, sample: Any) -> None: ...

    def _nvmlGpmMetricsGet(self, asked: Any) -> None:
        assert asked.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value, metric.nvmlReturn = metric.metricId + 0.5, pynvml.NVML_SUCCESS


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(pynvml, "nvmlLib", driver)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return driver


def read(driver: Driver) -> dict[str, Any]:
    """The first sample of its one GPU, by the names after `gpu/0/`."""
    notes: list[str] = []
    gpus = find_gpus([UUID], notes.append)
    assert gpus is not None, notes
    return {key.removeprefix("gpu/0/"): value for key, value in gpus().items()}


def test_a_sample_has_every_reading_in_its_unit(driver: Driver) -> None:
    sample = read(driver)
    assert sample.keys() == READINGS.keys() | ACTIVITY.keys()
    assert sample == {
        "utilization_percent": 83,
        "memory_utilization_percent": 41,
        "memory_used_bytes": 90_000_000_000,
        "memory_total_bytes": 150_000_000_000,
        "power_w": 612.5,
        "power_limit_w": 700.0,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "temperature_c": 61,
        "pcie_sent_bytes_per_s": 10_240,
        "pcie_received_bytes_per_s": 20_480,
        "throttle_reasons": ["power_cap"],
        "sm_activity_percent": pynvml.NVML_GPM_METRIC_SM_UTIL + 0.5,
        "sm_occupancy_percent": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY + 0.5,
        "tensor_activity_percent": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL + 0.5,
        "memory_bandwidth_percent": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL + 0.5,
    }


def test_what_a_gpu_cannot_tell_is_asked_once(driver: Driver) -> None:
    driver.returns["nvmlDeviceGetPowerUsage"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    gpus = find_gpus([UUID], pytest.fail)
    assert gpus is not None
    for _ in range(3):
        assert gpus().keys() == {f"gpu/0/{name}" for name in (READINGS.keys() | ACTIVITY.keys()) - {"power_w"}}
    assert driver.calls.count("nvmlDeviceGetPowerUsage") == 1


def test_what_failed_once_is_asked_again(driver: Driver) -> None:
    gpus = find_gpus([UUID], pytest.fail)
    assert gpus is not None
    driver.returns["nvmlDeviceGetUtilizationRates"] = pynvml.NVML_ERROR_TIMEOUT
    assert "gpu/0/utilization_percent" not in gpus()
    del driver.returns["nvmlDeviceGetUtilizationRates"]
    assert gpus()["gpu/0/utilization_percent"] == 83


def test_an_older_gpu_has_no_activity(driver: Driver) -> None:
    driver.supports_activity = 0
    assert read(driver).keys() == READINGS.keys()


@pytest.mark.parametrize("name", ["nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksEventReasons"])
def test_an_older_driver_has_calls_by_their_former_names(driver: Driver, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Driver, f"_{name}")
    assert read(driver).keys() == READINGS.keys() | ACTIVITY.keys()


def test_what_was_allocated_is_freed_when_it_closes(driver: Driver) -> None:
    gpus = find_gpus([UUID], pytest.fail)
    assert gpus is not None
    gpus()
    gpus.close()
    assert driver.calls.count("nvmlGpmSampleFree") == driver.calls.count("nvmlGpmSampleAlloc") == 2
    assert driver.calls[-1] == "nvmlShutdown"


# ── where there is none ────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_gpu_nothing_is_said() -> None:
    assert find_gpus([], pytest.fail) is None


def test_a_gpu_without_the_library_gets_a_note_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    notes: list[str] = []
    assert find_gpus([UUID], notes.append) is None
    assert notes == ["no GPU samples: nvidia-ml-py is not installed; pip install 'redline-rl[gpu]'"]


def test_a_gpu_without_a_driver_gets_a_note_with_its_reason(driver: Driver) -> None:
    driver.returns["nvmlInitWithFlags"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    notes: list[str] = []
    assert find_gpus([UUID], notes.append) is None
    assert "Driver Not Loaded" in notes[0]
