"""No key of a recipe is a door onto nothing: code of a run, outside config/, reads every one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from support.key_reads import Reads, attribute_reads
from support.paths import ROOT

from redline.config.problems import kinds_of, section_of
from redline.config.schema import Config
from redline.telemetry.summary.targets import METRICS

SOURCE = ROOT / "src"
NOT_OF_A_RUN = ("environments", "kernels", "lab", "web")
"""Rooms that see no recipe, or only measure and show what a run does: to check their types as well takes twice as long."""
READ_BY_CONFIG = {
    "trainer.algorithm": "config/algorithms.py fills other keys with what it stands for",
}
"""Keys that have done their work once a recipe is resolved, and where they do it."""
BY_NAME = {f"telemetry.targets.{metric.key}" for metric in METRICS if metric.key} | {"telemetry.alerts.stall"}
"""Read with `getattr`: `METRICS` has the names of targets, and `Alerts` asks `telemetry.alerts.off` for kinds without a
detector."""


def modules(folder: Path) -> list[tuple[str, Path]]:
    """Name and file of every module below a folder."""
    return [
        (".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"), file)
        for file in sorted(folder.rglob("*.py"))
    ]


def keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key and entry, with the full name of the field that holds it."""
    for name, field in schema.model_fields.items():
        inner = [section for section in (section_of(field), *kinds_of(field).values()) if section]
        for section in inner:
            yield from keys(section, f"{prefix}{name}.")
        if not inner and name != "kind":
            owner = next(base for base in reversed(schema.__mro__) if name in getattr(base, "__annotations__", {}))
            yield f"{prefix}{name}", f"{owner.__module__}.{owner.__qualname__}.{name}"


@pytest.fixture(scope="module")
def reads() -> Reads:
    of_a_run = [module for module in modules(SOURCE) if module[0].split(".")[1:2] not in [[room] for room in NOT_OF_A_RUN]]
    return attribute_reads(of_a_run, "redline.config")


def readers(reads: Reads, field: str) -> set[str]:
    inside = str(SOURCE / "redline" / "config") + "/"
    return {path for path in reads.get(field, set()) if not str(Path(path).absolute()).startswith(inside)}


def test_every_key_is_read_outside_config(reads: Reads) -> None:
    unread = [key for key, field in keys(Config) if not readers(reads, field)]
    assert set(unread) - BY_NAME == set(READ_BY_CONFIG)


def test_a_key_is_not_read_because_something_else_has_its_name(tmp_path: Path) -> None:
    """The check itself: it sees a read through a local name, and no docstring, string or class of another kind."""
    (tmp_path / "schema.py").write_text("class Section:\n    steps: int = 1\n    seed: int = 2\n    folder: str = ''\n")
    (tmp_path / "reader.py").write_text(
        '"""section.seed is only talked of."""\n'
        "from schema import Section\n\n\n"
        "class Other:\n    folder: str = ''\n\n\n"
        "def use(section: Section, other: Other) -> int:\n"
        "    alias = section\n    print('section.seed', other.folder)\n    return alias.steps\n"
    )
    found = attribute_reads(modules(tmp_path), "schema")
    assert {field for field, paths in found.items() if str(tmp_path / "reader.py") in paths} == {"schema.Section.steps"}
