"""A log that grows, is cut, torn or written anew, read as it stands."""

from __future__ import annotations

from pathlib import Path

from redline.telemetry.files.tail import Tail


def test_a_tail_gives_each_row_once_and_waits_for_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = Tail(path)
    assert tail.read() == (False, [])
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": ')
    assert tail.read() == (False, [{"a": 1}, {"a": 2}])
    assert tail.read() == (False, [])
    with path.open("ab") as file:
        file.write(b'3}\nnot json\n[1]\n{"a": NaN}\n')
    assert tail.read() == (False, [{"a": 3}, {"a": None}])


def test_a_tail_begins_again_where_the_file_did(tmp_path: Path) -> None:
    """As a resumed run cuts its log: rows that were read are gone, and others of the same length stand in their place."""
    path = tmp_path / "rows.jsonl"
    tail = Tail(path)
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n')
    tail.read()
    path.write_bytes(b'{"a": 1}\n')
    assert tail.read() == (True, [{"a": 1}])
    path.write_bytes(b'{"a": 7}\n{"a": 8}\n')
    assert tail.read() == (True, [{"a": 7}, {"a": 8}])
    path.unlink()
    assert tail.read() == (True, [])
    assert tail.read() == (False, [])


def test_a_long_log_is_read_block_by_block(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(b'{"a": %d}\n' % i for i in range(100)) + b'{"a": ')
    tail, rows, blocks = Tail(path, block_bytes=64), [], 0
    while not tail.at_end:
        restarted, found = tail.read()
        assert not restarted
        assert len(found) < 10
        rows += found
        blocks += 1
    assert [row["a"] for row in rows] == list(range(100))
    assert blocks > 10


def test_rows_that_are_there_already_can_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = Tail(path)
    tail.skip()
    assert tail.read() == (False, [])
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": ')
    tail.skip()
    assert tail.read() == (False, [])
    with path.open("ab") as file:
        file.write(b"3}\n")
    assert tail.read() == (False, [{"a": 3}])
    path.write_bytes(b'{"a": 1}\n{"a": 3}\n')
    assert tail.read() == (True, [{"a": 1}, {"a": 3}])
