"""A folder by a name that somebody chose: whole or not at all, and nobody else's files are touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from redline.telemetry.files.durable import making_folder


class Killed(BaseException):
    """Stands for Ctrl-C."""


def _raise_killed() -> None:
    raise Killed


PUT: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: [path.mkdir(), (path / "mine").write_text("kept")],
    "file": lambda path: path.write_text("kept"),
    "link": lambda path: path.symlink_to("nowhere"),
}


def make(path: Path, meanwhile: Callable[[], object], text: str = "new") -> None:
    with making_folder(path) as folder:
        (folder / "file").write_text(text)
        meanwhile()


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_takes_its_name_when_it_is_full_also_in_place_of_an_empty_one(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "above" / "out"
    if is_there:
        path.mkdir(parents=True)
    with making_folder(path) as folder:
        (folder / "in").mkdir()
        (folder / "in" / "file").write_text("new")
        assert content(path) == {}
    assert content(tmp_path) == {"above/out/in/file": "new"}
    assert list(path.parent.iterdir()) == [path]


def test_a_block_that_is_ended_takes_away_its_own_folder_alone(tmp_path: Path) -> None:
    for name in (".out.partial", ".out.old", ".out.12345678.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("kept")
    before = content(tmp_path)
    with pytest.raises(Killed):
        make(tmp_path / "out", _raise_killed)
    assert content(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == len(before)


@pytest.mark.parametrize("kind", PUT)
def test_what_has_the_name_by_the_end_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out"
    with pytest.raises(FileExistsError, match="out"):
        make(path, lambda: PUT[kind](path))
    assert list(tmp_path.iterdir()) == [path]
    assert list(content(tmp_path).values()) == ([] if kind == "link" else ["kept"])


def test_of_two_at_once_the_first_to_end_has_the_name(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(FileExistsError):
        make(path, lambda: make(path, lambda: None, "early"), "late")
    assert content(tmp_path) == {"out/file": "early"}
    assert list(tmp_path.iterdir()) == [path]
