"""Objects of the user's own, named in a recipe by import path. Every mistake in the name or the parameters is a `TaskError`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from redline.errors import RedlineError, TaskError, boundary
from redline.rollouts.user_code.modules import FolderImports

IMPORTS = {section: FolderImports(section) for section in ("rollouts.task", "rollouts.environment")}
"""There is one `sys.modules` in a process, and each of these sections may have a folder in it."""


@dataclass(slots=True, frozen=True)
class ImportPath:
    """`package.module:Name` in a recipe."""

    path: str
    key: str
    """The recipe's key that has it, such as `rollouts.task.path`."""
    folder: Path | None = None
    """Where the module is looked for when it is not an installed package; None is the folder in which redline is called."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for it."""

    @property
    def section(self) -> str:
        """`rollouts.task`: the section of its key."""
        return self.key.rpartition(".")[0]

    def find(self) -> Any:
        """The class or function itself."""
        module_name, _, names = self.path.partition(":")
        found: Any = self._import_module(module_name)
        for name in names.split("."):
            if not hasattr(found, name):
                raise TaskError(
                    f"{self.key} = {self.path!r}: {module_name} ({_file_of(module_name)}) has no {name}", _names_in(found, name)
                )
            found = getattr(found, name)
        return found

    def make(self, factory: Callable[..., Any], seed: int) -> Any:
        """What `factory(seed=seed, **params)` returns."""
        with boundary() as caught:
            made = factory(seed=seed, **self.params)
        if isinstance(caught.error, RedlineError):
            raise caught.error
        if caught.error is not None:
            raise TaskError(
                f"{self.path} could not be made: {type(caught.error).__name__}: {caught.error}", self._calling(factory, seed)
            ) from caught.error
        return made

    def _import_module(self, name: str) -> Any:
        folder = (self.folder or Path()).absolute()
        with boundary() as caught:
            module = IMPORTS[self.section].load(name, folder)
        if caught.error is None:
            return module
        if isinstance(caught.error, RedlineError):
            raise caught.error
        if isinstance(caught.error, ModuleNotFoundError) and name.endswith(".py"):
            written = self.path.replace(".py:", ":", 1)
            raise TaskError(
                f"{self.key}: no module {name!r}", f"a module is named without .py: write {written}"
            ) from caught.error
        if isinstance(caught.error, ModuleNotFoundError) and f"{name}.".startswith(f"{caught.error.name}."):
            raise TaskError(
                f"{self.key}: no module {caught.error.name!r}",
                f"start redline where {name.replace('.', '/')}.py is (it was looked for in {folder}), or install the package",
            ) from caught.error
        raise TaskError(
            f"{self.key}: importing {name} raised {type(caught.error).__name__}: {caught.error}",
            f"`python -c 'import {name}'` must work in {folder}",
        ) from caught.error

    def _calling(self, factory: Any, seed: int) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.params.items())
        call = f"it is called as {self.path.rpartition(':')[2]}(seed={seed}{given}) with {self.section}.params"
        try:
            return f"{call}; it takes {inspect.signature(factory)}"
        except (TypeError, ValueError):
            return call


def _names_in(place: Any, wanted: str) -> str:
    """The name that was meant, or else all that a module or class has, without what a module imports from elsewhere."""
    public = {name: made for name, made in vars(place).items() if not name.startswith("_")}
    if near := get_close_matches(wanted, public, n=1):
        return f"did you mean {near[0]}?"
    home = getattr(place, "__name__", "")
    own = [name for name, made in public.items() if getattr(made, "__module__", home) == home]
    return f"it has {', '.join(own or public) or 'no public names'}"


def _file_of(module_name: str) -> str:
    return getattr(sys.modules[module_name], "__file__", None) or "built in"
