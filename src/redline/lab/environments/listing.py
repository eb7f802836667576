"""`redline env list`: the environments that ship and the kinds of tasks, and whether what each needs is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from rich.console import RenderableType
from rich.table import Table

from redline.config.installation import missing_packages
from redline.config.sections.tasks import TaskConfig
from redline.environments.registry import ENVIRONMENTS, Shipped
from redline.telemetry.console.tables import Fitted

TASK_EXTRAS: Mapping[str, str] = {"reasoning_gym": "demo"}
"""Kind of task → the extra that brings what it imports."""


@dataclass(slots=True, frozen=True)
class Entry:
    """One line of the list."""

    name: str
    what: str
    extra: str | None
    missing: tuple[str, ...]
    """Packages of the extra that are not installed."""

    @property
    def needs(self) -> str:
        """What a person reads in the last column."""
        if self.extra is None:
            return ""
        return f"{self.extra} ({'not installed' if self.missing else 'installed'})"


@dataclass(slots=True, frozen=True)
class Listing:
    environments: tuple[Entry, ...]
    task_kinds: tuple[Entry, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "environments": [asdict(entry) | {"installed": not entry.missing} for entry in self.environments],
            "task_kinds": [asdict(entry) | {"installed": not entry.missing} for entry in self.task_kinds],
        }

    def tables(self) -> Iterator[RenderableType]:
        yield _table("rollouts.environment.name", self.environments)
        yield _table("rollouts.task.kind", self.task_kinds)


def listing(shipped: Mapping[str, Shipped] = ENVIRONMENTS) -> Listing:
    """What a recipe may name. Imports none of it."""
    environments = [_entry(name, one.what, one.extra) for name, one in sorted(shipped.items())]
    kinds = [_entry(name, what, TASK_EXTRAS.get(name)) for name, what in _task_kinds()]
    return Listing(tuple(environments), tuple(kinds))


def _entry(name: str, what: str, extra: str | None) -> Entry:
    return Entry(name, what, extra, missing_packages(extra) if extra else ())


def _task_kinds() -> Iterator[tuple[str, str]]:
    """Each kind with the first sentence of what it is."""
    union = get_args(TaskConfig)[0]
    for section in get_args(union):
        if hasattr(section, "model_fields"):
            field = section.model_fields["kind"]
            yield get_args(field.annotation)[0], (field.description or "").partition("\n")[0]


def _table(title: str, entries: tuple[Entry, ...]) -> RenderableType:
    table = Table(title=title, title_justify="left", show_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("what it is")
    table.add_column("extra", no_wrap=True)
    for entry in entries:
        table.add_row(entry.name, entry.what, entry.needs)
    return Fitted(table)
