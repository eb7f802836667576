"""`redline env warm`: files of states, whole or gone on with."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import pytest

from redline.environments.states import StateCache
from redline.errors import ConfigError, TaskError
from redline.lab.environments import warm as warm_module
from redline.lab.environments.made import Made
from redline.lab.environments.warm import Wish, warm

MADE: list[int] = []


class Numbers:
    state_kind = "numbers 1"

    def __init__(self, seed: int, stop_at: int | None = None) -> None:
        self._stop_at = stop_at

    def make_state(self, seed: int) -> bytes:
        if seed == self._stop_at:
            raise KeyboardInterrupt
        MADE.append(seed)
        return str(seed // 2).encode()  # every state comes twice

    async def play(self, task, policy):
        return 0.0


class NoStates:
    def __init__(self, seed: int) -> None:
        pass

    async def play(self, task, policy):
        return 0.0


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_warm", sys.modules[__name__])
    MADE.clear()


def states_of(path: Path) -> list[bytes]:
    cache = StateCache(path, Numbers.state_kind, "make it again")
    return [cache[index] for index in range(len(cache))]


def test_a_file_holds_as_many_different_states_as_were_asked_for(tmp_path: Path) -> None:
    out, told = tmp_path / "folder" / "states.bin", []
    header = warm(Made("test_warm:Numbers"), Wish(20, out), told.append)
    assert (header.count, header.held_out) == (20, 2)
    assert sorted(map(int, states_of(out))) == list(range(20))
    assert told == list(range(1, 21))
    assert not out.with_name("states.bin.part").exists()


def test_a_call_that_was_stopped_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "states.bin"
    monkeypatch.setattr(Numbers, "make_state", stopping(30))
    with pytest.raises(KeyboardInterrupt):
        warm(Made("test_warm:Numbers"), Wish(20, out), lambda count: None)
    assert not out.exists()
    assert list(range(30)) == MADE
    MADE.clear()
    with out.with_name("states.bin.part").open("a") as part:
        part.write("31 YW")  # the machine stopped here
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "test_warm", sys.modules[__name__])
    warm(Made("test_warm:Numbers"), Wish(20, out), lambda count: None)
    assert min(MADE) == 30
    assert sorted(map(int, states_of(out))) == list(range(20))


def stopping(at: int):
    make = Numbers.make_state

    def make_state(self, seed: int) -> bytes:
        if seed == at:
            raise KeyboardInterrupt
        return make(self, seed)

    return make_state


def test_several_processes_make_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_module, "CHUNK", 8)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    one, two = tmp_path / "one.bin", tmp_path / "two.bin"
    warm(Made("test_warm:Numbers"), Wish(20, one), lambda count: None)
    MADE.clear()
    warm(Made("test_warm:Numbers"), Wish(20, two, workers=2), lambda count: None)
    assert states_of(one) == states_of(two)
    assert MADE == []  # all in other processes


def test_what_was_begun_with_other_settings_is_not_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "states.bin"
    out.with_name("states.bin.part").write_text('{"kind": "numbers 1", "params": {"stop_at": 3}, "seed": 0}\n')
    with pytest.raises(TaskError, match="begun with other settings"):
        warm(Made("test_warm:Numbers"), Wish(20, out), lambda count: None)


def test_an_environment_without_states_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="makes no states"):
        warm(Made("test_warm:NoStates"), Wish(20, tmp_path / "states.bin"), lambda count: None)


@pytest.mark.parametrize("damage", ["junk\n", "x YQ== 0\n", "3 !!!! 0\n", "3 YWJj\n", "\0\0\0\n", "\xff\n"])
def test_damaged_lines_are_dropped_with_a_word(tmp_path: Path, damage: str) -> None:
    out, told = tmp_path / "states.bin", []
    part = out.with_name("states.bin.part")
    head = '{"kind": "numbers 1", "params": {}, "seed": 0}\n'
    part.write_bytes((head + warm_module._line(0, b"0") + damage).encode("latin-1"))
    warm(Made("test_warm:Numbers"), Wish(20, out), lambda count: None, told.append)
    assert told == [f"{part}: 1 damaged line(s) dropped; their states are made again"]
    assert min(MADE) == 1
    assert sorted(map(int, states_of(out))) == list(range(20))


def test_a_damaged_beginning_is_refused(tmp_path: Path) -> None:
    (tmp_path / "states.bin.part").write_bytes(b"\0garbage\n")
    with pytest.raises(TaskError, match="or is damaged"):
        warm(Made("test_warm:Numbers"), Wish(20, tmp_path / "states.bin"), lambda count: None)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "states.bin.part").open("a") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        with pytest.raises(TaskError, match="another process makes these states"):
            warm(Made("test_warm:Numbers"), Wish(20, tmp_path / "states.bin"), lambda count: None)


def test_a_folder_and_a_place_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out, words in ((tmp_path, "is a folder"), (tmp_path / "file" / "states.bin", "cannot be written")):
        with pytest.raises(ConfigError, match=words):
            warm(Made("test_warm:Numbers"), Wish(20, out), lambda count: None)
