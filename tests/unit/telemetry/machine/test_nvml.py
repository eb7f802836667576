"""The adapter, through the real library, on a driver made here: functions of C that fill in what they are pointed at."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pynvml
import pytest

from redline.config.installation import how_to_install
from redline.telemetry.machine.nvml import ACTIVITY, FIELDS, SLOW_EVERY_S, find_all_gpus, find_gpus

UUID = "GPU-5b3e1a9c-0000-1111-2222-333344445555"


class Driver:
    """An H200. `nvmlDevice…` are called with a handle and a reference to what they shall write."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.returns: dict[str, int] = {}
        """Function → what it returns instead of success."""
        self.reasons = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonGpuIdle
        self.supports_activity = 1
        self.count = 2
        self.untold: set[int] = set()
        """Performance counters that it has not."""

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

    def _nvmlDeviceGetCount_v2(self, out: Any) -> None:
        out.value = self.count

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> None: ...

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
            told = metric.metricId not in self.untold
            metric.value = metric.metricId + 0.5 if told else 0.0
            metric.nvmlReturn = pynvml.NVML_SUCCESS if told else pynvml.NVML_ERROR_NOT_SUPPORTED


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
    assert sample.keys() == FIELDS
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
        "pcie_sent_bytes_per_s": (pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC + 0.5) * 2**20,
        "pcie_received_bytes_per_s": (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC + 0.5) * 2**20,
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
        assert gpus().keys() == {f"gpu/0/{name}" for name in FIELDS - {"power_w"}}
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
    assert read(driver).keys() == FIELDS - {name for name in ACTIVITY if not name.startswith("pcie")}


@pytest.mark.parametrize("name", ["nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksEventReasons"])
def test_an_older_driver_has_calls_by_their_former_names(driver: Driver, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Driver, f"_{name}")
    assert read(driver).keys() == FIELDS


# ── what it costs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_sample_asks_each_thing_once_and_never_what_makes_the_driver_wait(driver: Driver) -> None:
    gpus = find_gpus([UUID], pytest.fail)
    assert gpus is not None
    driver.calls.clear()
    gpus()
    assert driver.calls.count("nvmlDeviceGetClockInfo") == 2, "one for each clock"
    others = [name for name in driver.calls if name != "nvmlDeviceGetClockInfo"]
    assert sorted(others) == sorted(set(others))
    assert "nvmlDeviceGetPcieThroughput" not in others


@pytest.mark.parametrize("supports_activity", [0, 1])
def test_where_no_counter_tells_the_traffic_on_the_bus_the_driver_is_asked_now_and_then(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, supports_activity: int
) -> None:
    driver.supports_activity = supports_activity
    driver.untold = {pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC}
    seconds = 1000.0
    monkeypatch.setattr("redline.telemetry.machine.nvml.time.monotonic", lambda: seconds)
    gpus = find_gpus([UUID], pytest.fail)
    assert gpus is not None
    sample = gpus()
    assert sample["gpu/0/pcie_sent_bytes_per_s"] == 10_240
    assert sample["gpu/0/pcie_received_bytes_per_s"] == 20_480
    seconds += 0.9 * SLOW_EVERY_S
    assert not [name for name in gpus() if "pcie" in name]
    seconds += 0.2 * SLOW_EVERY_S
    assert "gpu/0/pcie_sent_bytes_per_s" in gpus()
    assert driver.calls.count("nvmlDeviceGetPcieThroughput") == 4


def test_counters_are_compared_with_those_of_the_sample_before(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = iter(range(1, 10))
    moments: dict[int, int] = {}
    compared: list[tuple[int, int]] = []

    def allocate(driver: Driver, out: Any) -> None:
        ctypes.cast(ctypes.byref(out), ctypes.POINTER(ctypes.c_void_p))[0] = next(handles)

    def take(driver: Driver, device: Any, sample: Any) -> None:
        moments[address(sample)] = driver.calls.count("nvmlGpmSampleGet")

    def compare(driver: Driver, asked: Any) -> None:
        compared.append((moments[address(asked.sample1)], moments[address(asked.sample2)]))

    monkeypatch.setattr(Driver, "_nvmlGpmSampleAlloc", allocate)
    monkeypatch.setattr(Driver, "_nvmlGpmSampleGet", take)
    monkeypatch.setattr(Driver, "_nvmlGpmMetricsGet", compare)
    gpus = find_gpus([UUID], pytest.fail)
    assert gpus is not None
    for _ in range(3):
        gpus()
    assert compared == [(1, 2), (2, 3), (3, 4)]


def address(pointer: Any) -> int:
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)


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
    assert notes == [f"no GPU samples: nvidia-ml-py is not installed; {how_to_install('gpu')}"]


def test_a_gpu_without_a_driver_gets_a_note_with_its_reason(driver: Driver) -> None:
    driver.returns["nvmlInitWithFlags"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    notes: list[str] = []
    assert find_gpus([UUID], notes.append) is None
    assert "Driver Not Loaded" in notes[0]


def test_all_gpus_of_a_machine_are_those_that_the_driver_shows(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = find_all_gpus()
    assert gpus is not None
    assert {name.split("/")[1] for name in gpus()} == {"0", "1"}
    gpus.close()
    driver.count = 0
    assert find_all_gpus() is None
    driver.returns["nvmlInitWithFlags"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    assert find_all_gpus() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_all_gpus() is None
