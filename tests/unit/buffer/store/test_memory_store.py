from __future__ import annotations

from pathlib import Path

import pytest

from redline.buffer.store.memory_store import MemoryStore
from redline.errors import RunFolderError


@pytest.mark.parametrize("content", ["", "garbage", "[1]", '{"two": {}}', '{"2": 5}'])
def test_a_damaged_file_of_numbers_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "numbers.json"
    path.write_text(content)
    for use in (lambda: MemoryStore(numbers=path).resume(2), MemoryStore(numbers=path).flush):
        with pytest.raises(RunFolderError, match=r"numbers.json: damaged"):
            use()
    assert path.read_text() == content
