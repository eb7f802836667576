"""A file of states: whole or refused, and held-out ones apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from redline.environments.states import Header, StateCache, write_states
from redline.errors import TaskError

REMEDY = "make them anew"


class Counting:
    """Makes the squares of its seeds, each several times in a row."""

    state_kind = "squares"

    def __init__(self, repeats: int = 1, fails_at: int = -1) -> None:
        self.repeats, self.fails_at = repeats, fails_at

    def make_state(self, seed: int) -> bytes:
        if seed == self.fails_at:
            raise KeyboardInterrupt
        return str((seed // self.repeats) ** 2).encode()


def opened(path: Path, kind: str = "squares") -> StateCache:
    return StateCache(path, kind, REMEDY)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "squares.states"


def test_what_is_written_is_read(path: Path) -> None:
    seen: list[int] = []
    header = write_states(path, Counting(), 10, progress=seen.append)
    states = opened(path)
    assert [states[index] for index in range(10)] == [str(n * n).encode() for n in range(10)]
    assert (states.num_train, states.num_held_out, len(states)) == (9, 1, 10)
    assert isinstance(header, Header)
    assert states.header == header
    assert seen == list(range(1, 11))


def test_no_state_is_there_twice(path: Path) -> None:
    write_states(path, Counting(repeats=5), 8, held_out_share=0.5)
    states = opened(path)
    assert len({states[index] for index in range(8)}) == 8
    assert states.num_held_out == 4


def test_an_environment_with_too_few_states_says_so(path: Path) -> None:
    with pytest.raises(TaskError, match="only 4 different states"):
        write_states(path, Counting(repeats=50), 10)
    assert not path.exists()


@pytest.mark.parametrize("place", [3, 30, -40, -1])
def test_a_changed_byte_is_found(path: Path, place: int) -> None:
    write_states(path, Counting(), 10)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(TaskError, match=r"damaged|no file of states") as refused:
        opened(path)
    assert refused.value.hint == REMEDY


@pytest.mark.parametrize("length", [0, 5, 20, 200])
def test_a_file_that_was_cut_is_refused(path: Path, length: int) -> None:
    write_states(path, Counting(), 30)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(TaskError, match="cannot be used"):
        opened(path)


def test_states_of_another_kind_are_refused(path: Path) -> None:
    write_states(path, Counting(), 10)
    with pytest.raises(TaskError, match="'squares', and this environment needs 'cubes'"):
        opened(path, "cubes")


def test_a_file_of_another_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.environments.states.VERSION", 2)
    write_states(path, Counting(), 10)
    monkeypatch.undo()
    with pytest.raises(TaskError, match="version 2"):
        opened(path)


def test_an_interrupted_write_leaves_the_earlier_file_and_nothing_else(path: Path) -> None:
    write_states(path, Counting(), 10)
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write_states(path, Counting(fails_at=7), 20)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_is_replaced_stays_as_it_was_for_who_reads_it(path: Path) -> None:
    write_states(path, Counting(), 10)
    states = opened(path)
    write_states(path, Counting(), 10, seed=100)
    assert states[1] == b"1"
    assert opened(path)[1] == b"10201"


def test_one_state_is_too_few(path: Path) -> None:
    with pytest.raises(TaskError, match="at least two"):
        write_states(path, Counting(), 1)


def test_a_folder_is_no_file_of_states(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot be read"):
        opened(tmp_path)
