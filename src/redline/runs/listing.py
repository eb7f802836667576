"""The runs that a dashboard shows: found in folders, read as they grow, listed by what has changed."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from redline.errors import RunFolderError
from redline.runs.columns import Json
from redline.runs.reader import Explain, RunReader
from redline.runs.trajectories import Trajectories

_DEPTH = 2
"""Folders below the one given in which a run may lie: `runs/demo-001`, or `runs/` of several projects."""


class Runs:
    """Safe to use from several threads."""

    def __init__(self, paths: Sequence[Path], explain: Explain | None = None) -> None:
        """Each path is a run, or a folder with runs in it, now or later."""
        self._explain = explain
        for path in paths:
            if not path.is_dir():
                raise RunFolderError(f"{path}: no such folder", "give a run folder, or a folder that holds some")
        self._paths = [path.resolve() for path in paths]
        self._lock = threading.Lock()
        self._readers: dict[str, RunReader] = {}
        self._trajectories: dict[str, Trajectories] = {}
        self._ids: dict[Path, str] = {}
        self._epoch = uuid.uuid4().hex
        self._changes = 0
        self._listed: dict[str, tuple[int, dict[str, Json]]] = {}
        """Name → the number of its last change, and how it was listed."""
        self._gone: dict[str, int] = {}

    def names(self) -> list[str]:
        """Look for runs that have come, and let go of those that are gone."""
        with self._lock:
            found = [folder for path in self._paths for folder in _runs_in(path, _DEPTH)]
            for folder in found:
                if folder not in self._ids:
                    self._ids[folder] = name = self._free_name(folder)
                    self._readers[name] = RunReader(folder, self._explain)
            for folder in self._ids.keys() - set(found):
                name = self._ids.pop(folder)
                del self._readers[name]
                self._trajectories.pop(name, None)
            return list(self._ids.values())

    def reader(self, name: str) -> RunReader | None:
        if name not in self._readers:
            self.names()
        return self._readers.get(name)

    def trajectories(self, name: str) -> Trajectories | None:
        reader = self.reader(name)
        if reader is None:
            return None
        with self._lock:
            if name not in self._trajectories:
                self._trajectories[name] = Trajectories(reader.run)
            return self._trajectories[name]

    def changes(self, after: str) -> dict[str, Json]:
        """The lines of the list that are new to the holder of a cursor."""
        names = self.names()
        lines = {name: {"id": name, **reader.summary()} for name in names if (reader := self.reader(name))}
        with self._lock:
            self._note(lines)
            epoch, _, count = after.partition(".")
            is_known = epoch == self._epoch and count.isdecimal()
            since = int(count) if is_known else -1
            return {
                "cursor": f"{self._epoch}.{self._changes}",
                "whole": not is_known,
                "now": time.time(),
                "runs": [line for change, line in self._listed.values() if change > since],
                "gone": [name for name, change in self._gone.items() if change > since],
            }

    def _note(self, lines: dict[str, dict[str, Json]]) -> None:
        for name, line in lines.items():
            if name not in self._listed or self._listed[name][1] != line:
                self._changes += 1
                self._listed[name] = (self._changes, line)
                self._gone.pop(name, None)
        for name in self._listed.keys() - lines.keys():
            self._changes += 1
            self._gone[name] = self._changes
            del self._listed[name]

    def _free_name(self, folder: Path) -> str:
        """The folder's, or with a number where another of that name is shown already."""
        own = folder.name.encode(errors="replace").decode()  # an address of a page has no half of a letter
        taken, name, number = set(self._ids.values()), own, 1
        while name in taken:
            number += 1
            name = f"{own}~{number}"
        return name


def _runs_in(path: Path, depth: int) -> list[Path]:
    if (path / "config.json").is_file():
        return [path]
    if depth == 0 or not path.is_dir():
        return []
    try:
        inside = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError:
        return []
    return [run for child in inside for run in _runs_in(child, depth - 1)]
