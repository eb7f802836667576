from __future__ import annotations

import json
from pathlib import Path

import pytest

from redline.buffer.store.memory_store import MemoryStore
from redline.errors import RunFolderError


@pytest.mark.parametrize("content", ["", "garbage", "[1]", '{"two": {}}', '{"2": 5}'])
def test_a_damaged_file_of_indices_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "under_way.json"
    path.write_text(content)
    for use in (lambda: MemoryStore(under_way=path).resume(2), MemoryStore(under_way=path).flush):
        with pytest.raises(RunFolderError, match=r"under_way.json: damaged"):
            use()
    assert path.read_text() == content


def test_the_file_of_an_earlier_version_is_read_and_written_under_its_name_of_today(tmp_path: Path) -> None:
    (tmp_path / "numbers.json").write_text('{"2": {"next_number": 9, "unsettled": [5, 7]}}')
    path = tmp_path / "under_way.json"
    store = MemoryStore(under_way=path)
    assert (store.resume(2), store.next_index) == ([5, 7], 9)
    assert json.loads(path.read_text()) == {"2": {"next_index": 9, "unsettled": [5, 7]}}
    assert MemoryStore(under_way=path).resume(2) == [5, 7]
