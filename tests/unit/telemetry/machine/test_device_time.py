from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.telemetry import Recorder, recording, span
from redline.telemetry.machine.device_time import ANCHOR_NS, DeviceTimer


class Device:
    """Works through its queue in its own time: each piece of work takes as long as it says, from when it can begin."""

    def __init__(self) -> None:
        self.host_ns = 1_000_000
        self.free_ns = 1_000_000
        self.events = 0
        self.waits = 0

    def work(self, ns: int) -> None:
        """Asks for it; the host goes on at once."""
        self.free_ns = max(self.free_ns, self.host_ns) + ns

    def make_event(self) -> Event:
        self.events += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._at_ns = -1

    def record(self) -> None:
        self._at_ns = max(self._device.free_ns, self._device.host_ns)

    def query(self) -> bool:
        return self._at_ns <= self._device.host_ns

    def synchronize(self) -> None:
        self._device.waits += 1
        self._device.host_ns = max(self._device.host_ns, self._at_ns)

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query(), "an event was read before the device had come to it"
        return (end._at_ns - self._at_ns) / 1e6


def recorder_on(device: Device, **settings: bool) -> Recorder:
    recorder = Recorder(clock=lambda: device.host_ns)
    recorder.time_device(DeviceTimer(device.make_event, clock=lambda: device.host_ns, **settings))
    return recorder


def test_a_device_span_lasts_as_long_as_the_device_works_and_the_host_span_as_long_as_it_asks() -> None:
    device = Device()
    with recording(recorder_on(device)) as recorder:
        with span("trainer.forward", device=True, version=3):
            device.host_ns += 10
            device.work(5_000)
        device.host_ns += 9_000
    lanes = recorder.ledger().lanes
    assert lanes["main"].rows == {"trainer.forward": 10}
    assert lanes["cuda/main"].rows == {"wait.for_work": 0, "trainer.forward": 5_010}, "from when the host marked its begin"
    on_host, on_device = recorder.drain()
    assert (on_host.lane, on_device.lane) == ("main", "cuda/main")
    assert on_device.args == {"version": 3}
    assert (on_device.start_ns, on_device.end_ns) == (1_000_000, 1_005_010)


def test_nobody_waits_for_the_device_and_times_come_when_it_has_been_there() -> None:
    device = Device()
    with recording(recorder_on(device)) as recorder:
        assert device.waits == 1, "once, to set the clocks"
        with span("trainer.forward", device=True):
            device.work(5_000)
        assert "cuda/main" not in recorder.ledger().lanes
        assert [each.lane for each in recorder.drain()] == ["main"]
        device.host_ns += 5_000
        assert [each.lane for each in recorder.drain()] == ["cuda/main"]
    assert device.waits == 1


def test_nested_device_spans_are_exclusive_and_sum_to_the_lanes_wall_time() -> None:
    device = Device()
    with recording(recorder_on(device)) as recorder:
        with span("trainer.step", device=True):
            device.work(100)
            with span("trainer.forward", device=True):
                device.work(1_000)
            with span("trainer.pack"):  # not on the device
                device.work(10)
        device.work(7)  # nobody asks about it
        with span("trainer.optimizer", device=True):
            device.work(300)
        device.host_ns += 9_000
    lane = recorder.ledger().lanes["cuda/main"]
    assert lane.rows == {"trainer.step": 110, "trainer.forward": 1_000, "trainer.optimizer": 300, "wait.for_work": 7}
    assert (lane.wall_ns, lane.unaccounted_ns) == (1_417, 0)


def test_events_are_used_again() -> None:
    device = Device()
    with recording(recorder_on(device)) as recorder:
        for _ in range(100):
            with span("engine.decode", device=True):
                device.work(50)
            device.host_ns += 50
            recorder.drain()
    assert device.events <= 4


def test_times_stay_exact_for_hours_though_events_count_in_float32() -> None:
    """The anchor moves along, so that no time is measured from long ago."""
    device = Device()
    recorder = recorder_on(device)
    furthest = 0
    measured = Event.elapsed_time

    def elapsed(self: Event, end: Event) -> float:
        nonlocal furthest
        furthest = max(furthest, abs(end._at_ns - self._at_ns))
        return measured(self, end)

    with pytest.MonkeyPatch.context() as patch, recording(recorder):
        patch.setattr(Event, "elapsed_time", elapsed)
        for _ in range(50):
            with span("trainer.forward", device=True):
                device.work(ANCHOR_NS // 3)
            device.host_ns += ANCHOR_NS // 3
            recorder.drain()
    lane = recorder.ledger().lanes["cuda/main"]
    assert furthest < 2 * ANCHOR_NS
    assert lane.rows == {"wait.for_work": 0, "trainer.forward": 50 * (ANCHOR_NS // 3)}


def test_each_thread_has_its_own_device_lane() -> None:
    device = Device()

    def work() -> None:
        with span("engine.decode", device=True):
            device.work(10)

    with recording(recorder_on(device)) as recorder:
        thread = threading.Thread(target=work, name="rollouts")
        thread.start()
        thread.join()
        work()
        device.host_ns += 100
    assert {"cuda/main", "cuda/rollouts"} <= recorder.ledger().lanes.keys()


def test_without_a_device_the_mark_means_nothing() -> None:
    with recording(Recorder()) as recorder, span("trainer.forward", device=True):
        pass
    assert [(each.lane, each.args) for each in recorder.drain()] == [("main", {})]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["open", "close"]), st.integers(0, 50), st.integers(0, 50)), max_size=30))
def test_the_device_lane_adds_up_on_any_nesting(program: list[tuple[str, int, int]]) -> None:
    device = Device()
    with recording(recorder_on(device)) as recorder:
        opened = []
        for action, host_ns, device_ns in program:
            device.host_ns += host_ns
            device.work(device_ns)
            if action == "open":
                opened.append(span(f"trainer.part{len(opened)}", device=True))
                opened[-1].__enter__()
            elif opened:
                opened.pop().__exit__(None, None, None)
        while opened:
            opened.pop().__exit__(None, None, None)
        device.host_ns = max(device.host_ns, device.free_ns)
    for lane in recorder.ledger().lanes.values():  # a lane that does not add up is refused where it is made
        assert sum(lane.rows.values()) + lane.unaccounted_ns == lane.wall_ns
