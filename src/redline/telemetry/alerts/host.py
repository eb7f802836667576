"""Alerts about what the run lives on: host memory that runs out, threads and processes that died."""

from __future__ import annotations

from collections import deque

from redline.telemetry.alerts.detector import Detector, Episode, Finding, Row, number
from redline.telemetry.alerts.robust import median, slope, trend_p_value
from redline.telemetry.stalls.activity import Activity

GIB = 2**30


class HostMemorySlope(Detector):
    """Our processes' memory grows, on some machine of the run, as if it would never stop, and the rest will not last."""

    kind = "host_memory_slope"

    def __init__(self, hours: float) -> None:
        self._hours = hours
        self._machines: dict[str, MachineMemory] = {}

    def sample(self, row: Row) -> Finding | None:
        # Two machines may have one name, but one process samples each; that of rank 0's, which needs no name, is not told.
        machine = f" on {row['host']}, which {row['process']} samples," if "process" in row else ""
        if machine not in self._machines:
            self._machines[machine] = MachineMemory(self._hours)
        return self._machines[machine].sample(row, machine)


class MachineMemory:
    """What the run has of one machine's memory.

    Samples become medians of blocks, so that a step's rise and fall is inside one. The alert takes a rise that is

        certain     Mann-Kendall over the blocks, p < `P_VALUE`
        lasting     the second half and the last quarter rise at least half as fast as the whole: caches that fill up slow
                    down, and a buffer that is taken once, as for the first checkpoint, is a single stair
        large       a share of all memory since the window began
        dangerous   at this slope memory is full within the hours given, and within `FORESIGHT` times what was seen: of a run
                    that has just begun, a leak looks like caches that fill up
    """

    BLOCKS = 24
    P_VALUE = 1e-5
    LARGE = 0.01
    FORESIGHT = 4.0
    FIRST_BLOCK_S = 10.0

    def __init__(self, hours: float) -> None:
        self._horizon_s = 3600 * hours
        self._block_s = self.FIRST_BLOCK_S
        self._open: list[tuple[float, float]] = []
        """(time, bytes) of the block that is being filled."""
        self._blocks: deque[tuple[float, float]] = deque()
        self._episode = Episode(enter=2, leave=self.BLOCKS)

    def sample(self, row: Row, where: str) -> Finding | None:
        """Take a sample. `where` is how a sentence names the machine."""
        own, available, total = (number(row, f"host/{name}_bytes") for name in ("rss", "available", "total"))
        if own is None or available is None or not total:
            return None
        used = own + (number(row, "host/children_rss_bytes") or 0.0)
        self._open.append((row["time"], used))
        if row["time"] - self._open[0][0] < self._block_s:
            return None
        self._blocks.append((median(time for time, _ in self._open), median(used for _, used in self._open)))
        self._open = []
        if len(self._blocks) > 2 * self.BLOCKS:
            self._merge_pairs()
        return self._judge(available, total, where) if len(self._blocks) >= self.BLOCKS else None

    def _merge_pairs(self) -> None:
        """Longer blocks as the run goes on: a leak of a day shows in hours, not in minutes."""
        pairs = [*zip(*[iter(self._blocks)] * 2, strict=False)]
        merged = [((a[0] + b[0]) / 2, (a[1] + b[1]) / 2) for a, b in pairs]
        if 2 * self._block_s * self.BLOCKS <= self._horizon_s / 2:
            self._block_s *= 2
            self._blocks = deque(merged)
        else:  # long enough: let the oldest go
            self._blocks = deque([*self._blocks][-self.BLOCKS :])

    def _judge(self, available: float, total: float, where: str) -> Finding | None:
        times, used = zip(*self._blocks, strict=True)
        whole = slope(times, used)
        late = min(slope(times[-count:], used[-count:]) for count in (len(times) // 2, len(times) // 4))
        grown = whole * (times[-1] - times[0])
        is_rise = whole > 0 and late >= whole / 2 and grown >= self.LARGE * total and trend_p_value(used) < self.P_VALUE
        left_s = available / late if is_rise else float("inf")
        if not self._episode.see(left_s < min(self._horizon_s, self.FORESIGHT * (times[-1] - times[0]))):
            return None
        file = "samples/" if where else "samples.jsonl"
        return Finding(
            seen=f"the run's memory{where} grows by {3600 * late / GIB:.2f} GiB an hour; {available / GIB:.1f} GiB are left,"
            f" for {left_s / 3600:.1f} hours",
            since=f"{(times[-1] - times[0]) / 60:.0f} minutes ago",
            look_at=f"memory/… and process/… in {file} for whose it is; buffer/in_flight and what the task keeps;"
            " buffer.max_bytes where it is trajectories on a memory file system",
        )


class DeadWorkers(Detector):
    """A thread or a process that the run counts on has ended."""

    kind = "dead_worker"

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tick(self, now: Activity) -> Finding | None:
        dead = [worker for worker in now.workers if not worker.is_alive and worker.name not in self._told]
        if not dead:
            return None
        self._told.update(worker.name for worker in dead)
        return Finding(
            seen="; ".join(f"{worker.name} is dead: {worker.end}" for worker in dead),
            since="the last second",
            look_at="the run's last lines of output for its error; `dmesg` where SIGKILL ended it, for it may have run out of"
            " memory",
        )
