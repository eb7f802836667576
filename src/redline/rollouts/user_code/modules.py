"""Importing a module of the user's from a folder, also where an earlier run of this process imported one of the same name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from redline.errors import TaskError

Stamp = tuple[int, int] | None
"""When a file was written, in ns, and its bytes; None where there is none."""


class FolderImports:
    """What was imported from the folder that a section of the recipe named last: it makes way for another folder, and for a
    file that has changed. Modules that somebody else imported stay what they are."""

    def __init__(self, section: str) -> None:
        """`section` has the key `folder`, such as `rollouts.task`."""
        self._section = section
        self._folder: Path | None = None
        self._there_before: set[str] | None = None
        """Modules there were when the folder was put on `sys.path` here; None where it is there for another reason."""
        self._entry: str | None = None
        """The very object that was put on `sys.path` here."""
        self._names: set[str] = set()
        """Modules and packages at the top of the folder."""
        self._stamps: dict[str, Stamp] = {}
        """By file, as it was imported."""

    def load(self, name: str, folder: Path) -> ModuleType:
        """The module as it is in the folder now, or an installed one. Raises what its code raises."""
        importlib.invalidate_caches()
        if folder != self._folder or any(_stamp(file) != stamp for file, stamp in self._stamps.items()):
            self._forget()
        self._refuse_two(name.partition(".")[0], folder)
        self._folder = folder
        # Last, not first: a folder called `datasets` beside the recipe must not hide the package of that name.
        if str(folder) not in sys.path:
            self._entry = str(folder)
            sys.path.append(self._entry)
            self._there_before = set(sys.modules)
        before = set(sys.modules)
        try:
            return importlib.import_module(name)
        finally:
            self._remember(before)

    def _remember(self, before: set[str]) -> None:
        self._names |= self._new_since(before)
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name.partition(".")[0] in self._names and file is not None:
                self._stamps.setdefault(file, _stamp(file))

    def _new_since(self, before: set[str]) -> set[str]:
        assert self._folder is not None
        new = {name for name in sys.modules if "." not in name} - before
        return {name for name in new if _lies_in(sys.modules[name], self._folder)}

    def _forget(self) -> None:
        if self._folder is not None:
            ours = {name for name in self._names if _lies_in(sys.modules.get(name), self._folder)}
            if self._there_before is not None:
                ours |= self._new_since(self._there_before)  # with what a method of the task imported later
                sys.path[:] = [entry for entry in sys.path if entry is not self._entry]  # and not somebody else's of that name
            for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
                del sys.modules[name]
        self._folder, self._there_before, self._names, self._stamps = None, None, set(), {}

    def _refuse_two(self, name: str, folder: Path) -> None:
        """An installed package comes before a module in the folder. Of any other two it cannot be known which is meant."""
        in_folder = PathFinder.find_spec(name, [str(folder)])
        if in_folder is None or in_folder.origin is None or name in sys.stdlib_module_names:
            return
        if name in sys.modules:
            other, why = getattr(sys.modules[name], "__file__", None) or "a module without a file", "is imported already"
        else:
            found = importlib.util.find_spec(name)
            other, why = (found and found.origin) or in_folder.origin, "comes first on sys.path"
        is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(other).parts)
        if is_installed or Path(other).resolve() == Path(in_folder.origin).resolve():
            return
        raise TaskError(
            f"{self._section}: there are two {name!r}: {other} {why}, and {in_folder.origin} is in {self._section}.folder",
            f"rename one of them, or set {self._section}.folder to the folder of the one that is meant",
        )


def _lies_in(module: ModuleType | None, folder: Path) -> bool:
    """Whether a module or package without a dot in its name is directly in the folder."""
    paths = list(getattr(module, "__path__", ())) or [getattr(module, "__file__", None)]
    return any(path is not None and Path(path).resolve().parent == folder.resolve() for path in paths)


def _stamp(file: str) -> Stamp:
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
