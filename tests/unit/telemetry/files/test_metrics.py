from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from redline.telemetry import MetricsLog
from redline.telemetry.files.metrics import rows_from_the_last


def log_of(path: Path, steps: int) -> MetricsLog:
    log = MetricsLog(path)
    for step in range(1, steps + 1):
        log.append(step, {"trainer/loss": step / 2})
    return log


def test_a_row_has_its_step_first_and_its_keys_in_order(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append(1, {"trainer/loss": 0.5, "engine/tokens_per_s": 12})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "engine/tokens_per_s": 12, "trainer/loss": 0.5}\n'


def test_a_number_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append(1, {"a/nan": math.nan, "a/inf": np.float32("inf"), "a/one": np.float32(1), "a/two": np.int64(2)})
    assert list(MetricsLog.read(log.path)) == [{"step": 1, "a/inf": None, "a/nan": None, "a/one": 1.0, "a/two": 2}]


def test_a_key_without_a_section_is_refused(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log, pytest.raises(AssertionError, match="section/name_unit"):
        log.append(1, {"loss": 0.5})


def test_a_row_can_be_read_while_the_log_is_open(tmp_path: Path) -> None:
    with log_of(tmp_path / "metrics.jsonl", 2) as log:
        assert [row["step"] for row in MetricsLog.read(log.path)] == [1, 2]


def test_rewinding_drops_the_rows_after_a_step_and_appending_goes_on(tmp_path: Path) -> None:
    with log_of(tmp_path / "metrics.jsonl", 5) as log:
        log.rewind(3)
        log.append(4, {"trainer/loss": 9.0})
    assert [(row["step"], row["trainer/loss"]) for row in MetricsLog.read(log.path)] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 9.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rewinding_to_the_start_leaves_an_empty_log(tmp_path: Path) -> None:
    with log_of(tmp_path / "metrics.jsonl", 2) as log:
        log.rewind(0)
    assert log.path.read_bytes() == b""


def test_a_log_cut_at_any_byte_keeps_its_whole_rows_and_takes_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_of(path, 3).close()
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        whole = content[:length].count(b"\n")
        assert len(list(MetricsLog.read(path))) == whole
        with MetricsLog(path) as log:
            log.append(99, {})
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*range(1, whole + 1), 99]


def test_a_torn_line_longer_than_one_read_is_dropped_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "a/b": "' + b"x" * 200_000)
    MetricsLog(path).close()
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_long_log_is_rewound_without_reading_all_of_it(tmp_path: Path) -> None:
    """Four GiB that nobody wrote lie before the last rows."""
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.write(b'{"step": 1}\n')
        file.seek(1 << 32)
        file.write(b"\n" + b"".join(b'{"step": %d, "a/b": "%s"}\n' % (step, b"x" * 5000) for step in range(2, 1000)))
    before = psutil.Process().io_counters().read_chars
    with MetricsLog(path) as log:
        log.rewind(500)
        log.append(501, {"a/b": 1})
    assert psutil.Process().io_counters().read_chars - before < 1 << 28
    with path.open("rb") as file:
        file.seek(-6000, os.SEEK_END)
        assert [json.loads(line)["step"] for line in file.read().splitlines()[1:]] == [500, 501]


def test_a_row_longer_than_a_block_can_be_rewound(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for step in range(1, 5):
            log.append(step, {"a/b": "x" * 3_000_000})
        log.rewind(2)
    assert [row["step"] for row in MetricsLog.read(log.path)] == [1, 2]


def test_the_sum_of_a_number_over_all_rows(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for step in range(1, 4):
            log.append(step, {"rollouts/groups": 8 * step, "rollouts/groups_with_signal": 5})
        log.append(4, {"trainer/loss": 1.0})
    assert MetricsLog.total(log.path, "rollouts/groups") == 48


@pytest.mark.parametrize("damage", [b"\0" * 20, b'{"step": 3, "tra', b'"text"', b"\xff\xfe"])
def test_a_damaged_row_is_left_out_and_hides_no_other(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    log_of(path, 5).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage + b"\n", *lines[3:]]))
    assert [row["step"] for row in MetricsLog.read(path)] == [1, 2, 4, 5]
    assert MetricsLog.last_step(path) == 5
    with MetricsLog(path) as log:
        log.rewind(4)
        assert [row["step"] for row in MetricsLog.read(path)] == [1, 2, 4]
        log.rewind(2)
    assert [row["step"] for row in MetricsLog.read(path)] == [1, 2]


def test_rows_come_from_the_last_on_and_a_torn_or_damaged_one_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_of(path, 5).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\xff\xfe\n", *lines[3:], b'{"step": 6, "tra']))
    assert [row["step"] for row in rows_from_the_last(path)] == [5, 4, 2, 1]
    assert list(rows_from_the_last(tmp_path / "nothing.jsonl")) == []
