"""A run of many steps takes no more memory, files or disk at its end than at its beginning."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.crashing_runs import end_of, forked, newest_run, output, wait_until
from support.processes import num_rows, rows, write_letters

from redline.buffer.store.group_store import GroupState
from redline.buffer.store.index import GroupIndex

MAX_BYTES = 1 << 18
MIB = 1 << 20


@dataclass(slots=True, frozen=True)
class Footprint:
    """What a process takes."""

    step: int
    rss_mib: float
    num_files: int
    """Open descriptors."""
    num_maps: int
    num_threads: int

    @classmethod
    def of(cls, pid: int, cwd: Path) -> Footprint:
        process = Path(f"/proc/{pid}")
        resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return cls(
            step=num_rows(newest_run(cwd).metrics),
            rss_mib=resident / MIB,
            num_files=len(list((process / "fd").iterdir())),
            num_maps=len((process / "maps").read_text().splitlines()),
            num_threads=len(list((process / "task").iterdir())),
        )


def soak(cwd: Path, steps: int, warm: int) -> tuple[Footprint, Footprint]:
    """The footprint once it is warm, and near the end."""
    write_letters(
        cwd,
        run={"steps": steps, "checkpoint_every": 50},
        rollouts={"groups_per_step": 2, "group_size": 2, "max_new_tokens": 4, "evaluation": {"num_tasks": 1, "every": 100}},
        buffer={"max_lag": 1, "max_bytes": MAX_BYTES},
    )
    with forked(cwd, "train", "letters.yaml", is_profiled=False) as process:
        assert process.pid is not None

        def reached(step: int) -> bool:
            return any(cwd.glob("runs/*/metrics.jsonl")) and num_rows(newest_run(cwd).metrics) >= step

        wait_until(lambda: reached(warm), process)
        first = Footprint.of(process.pid, cwd)
        wait_until(lambda: reached(steps - 5), process, timeout_s=3000)
        last = Footprint.of(process.pid, cwd)
        assert end_of(process, cwd) == 0, output(cwd)
    print(f"\n{first}\n{last}")
    return first, last


def assert_bounded(first: Footprint, last: Footprint, more_mib: float) -> None:
    assert last.rss_mib < first.rss_mib + more_mib, (first, last)
    assert last.num_files <= first.num_files + 4, (first, last)
    assert last.num_threads <= first.num_threads + 1, (first, last)
    assert last.num_maps <= first.num_maps + 64, (first, last)


def assert_all_were_trained(cwd: Path, steps: int) -> None:
    folder = newest_run(cwd)
    assert [row["step"] for row in rows(folder.metrics)] == list(range(1, steps + 1))
    index = GroupIndex(folder.trajectories)
    trained = [row.trained_version or 0 for row in index.rows() if row.state is GroupState.TRAINED]
    index.close()
    assert sorted(trained) == sorted(list(range(steps)) * 2)


def test_a_hundred_steps_take_no_more_than_twenty(tmp_path: Path) -> None:
    assert_bounded(*soak(tmp_path, 100, warm=20), more_mib=32)
    assert_all_were_trained(tmp_path, 100)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_steps_take_no_more_than_a_hundred(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        first, last = soak(tmp_path, 2000, warm=100)
    assert_bounded(first, last, more_mib=64)
    assert sum(path.stat().st_size for path in newest_run(tmp_path).trajectories.glob("segment-*")) < 1.25 * MAX_BYTES
    assert_all_were_trained(tmp_path, 2000)
