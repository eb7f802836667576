"""No door onto nothing: every module is reached from the command line or from `import redline`.

An import counts wherever it stands, also inside a function, unless it is for type checkers only. So does a string that names a
module: a row of the public surface's table, a child's `-m redline…`, a recipe's `redline…:Tasks`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import redline

SOURCE = Path(redline.__file__).parent
ROOTS = ("redline", "redline.__main__", "redline.cli")
"""`import redline`, `python -m redline`, and the command that pyproject.toml installs."""
STARTED = {
    "redline.lab.bench.every": ("redline.cli.__main__",),
    "redline.lab.compare.worker": ("redline.lab.compare.process",),
    "redline.lab.peers.trl_side": ("redline.lab.peers.trl_process",),
    "redline.lab.peers.vllm_side": ("redline.lab.peers.vllm_process",),
    "redline.telemetry.sinks": tuple(
        f"redline.telemetry.sinks.{name}"
        for name in ("mlflow", "opentelemetry", "prometheus", "tensorboard", "trackio", "wandb")
    ),
}
"""Module → modules that it starts or loads by a name that is no whole string: programs beside it, and rows of a table."""
WAITING = {}
"""Modules that no verb reaches yet, and what each is for. They pass the contract suite of engines and wait for runs whose
stages are in several processes; until then no recipe key, hint or page offers them. One that is reached has to leave this
table."""


def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = ("redline", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def named_in(tree: ast.AST) -> Iterator[str]:
    """Everything below the node that may be the name of a module."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]
        is_for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        left += node.orelse if is_for_types else ast.iter_child_nodes(node)


@cache
def used_by(module: str) -> set[str]:
    """Modules that this one loads, with the packages that hold them."""
    names = {*named_in(ast.parse(MODULES[module].read_text())), *STARTED.get(module, ())}
    return {parent for name in names if name in MODULES for parent in (name, *parents(name))}


def parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def reached_from(*roots: str) -> set[str]:
    reached, left = set[str](), list(roots)
    while left:
        module = left.pop()
        if module not in reached:
            reached.add(module)
            left += used_by(module)
    return reached


def test_every_module_is_reached_or_waits_with_a_reason() -> None:
    unreached = MODULES.keys() - reached_from(*ROOTS)
    assert sorted(unreached - WAITING.keys()) == [], "no verb and no public name leads there"
    assert sorted(WAITING.keys() - unreached) == [], "these are reached now: take them out of the table"


@pytest.mark.parametrize("starter", STARTED)
def test_what_is_started_by_name_is_named_there(starter: str) -> None:
    text = MODULES[starter].read_text()
    for started in STARTED[starter]:
        assert started in MODULES
        name = started.rpartition(".")[2]
        assert name in text or started.removesuffix(".__main__") in text, started


def test_nothing_that_is_reached_loads_what_waits() -> None:
    """Also not for the sake of a hint: a user who follows one must arrive somewhere."""
    offered = [module for module in reached_from(*ROOTS) for name in WAITING if name in MODULES[module].read_text()]
    assert offered == []


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (SOURCE.parents[1] / "docs").glob("*.md"))])
def test_no_page_sends_a_reader_to_what_waits(page: str) -> None:
    text = (SOURCE.parents[1] / page).read_text()
    files = [MODULES[name].relative_to(SOURCE.parents[1]).as_posix() for name in WAITING]
    assert [name for name in (*WAITING, *files) if name in text] == []
