from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.paths import ROOT

import redline
from redline.config import validate
from redline.config.sections.tasks import ImportTask
from redline.ports import TaskSource
from redline.rollouts.tasks.sources import make_task_source

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def _examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def reverse_word(seed: int = 0, **params: Any) -> TaskSource:
    return make_task_source(ImportTask(kind="import", path="custom_task:ReverseWord", folder=EXAMPLES, params=params), seed)


def test_the_gold_answer_scores_one() -> None:
    source = reverse_word()
    for task in [*source.held_out(20), *map(source.train, range(20))]:
        assert source.score(task, f"{task.answer.upper()}.") == {"letters_in_place": 1.0}
        assert task.answer[::-1] in task.messages[-1]["content"]


@pytest.mark.parametrize(
    ("text", "expected"), [("", 0.0), ("42", 0.0), ("olup", 1.0), ("olap", 0.75), ("It is ol", 0.5), ("olupolup", 0.5)]
)
def test_a_wrong_answer_scores_its_letters_in_place(text: str, expected: float) -> None:
    source = reverse_word()
    task = next(task for task in map(source.train, range(9000)) if task.answer == "olup")
    assert source.score(task, text) == {"letters_in_place": expected}


def test_no_held_out_word_is_trained_on() -> None:
    source = reverse_word(length=3, held_out_fraction=0.25)
    held_out = {task.id for task in source.held_out(10_000)}
    train = {source.train(index).id for index in range(4000)}
    assert not held_out & train
    assert (len(held_out), len(train)) == (500, 1500)


def test_the_seed_decides_the_order_and_nothing_else() -> None:
    one, two, again = reverse_word(1), reverse_word(2), reverse_word(1)
    first_tasks = [[source.train(index).id for index in range(100)] for source in (one, two, again)]
    assert first_tasks[0] == first_tasks[2] != first_tasks[1]
    assert one.held_out(50) == two.held_out(50)


def test_the_recipe_lines_in_its_docstring_name_it() -> None:
    docstring = ast.get_docstring(ast.parse((EXAMPLES / "custom_task.py").read_text())) or ""
    lines = docstring[docstring.index("    rollouts:") : docstring.index("Start redline")]
    recipe = yaml.safe_load(textwrap.dedent(lines))
    config = validate({"model": {"path": "builtin:tiny"}, **recipe})
    assert make_task_source(config.rollouts.task, 0).train(0).answer


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_imports_nothing_of_ours_but_the_public_surface(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    names = {
        alias.name for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "redline" for alias in node.names
    }
    assert [module for module in modules if module.startswith("redline.")] == []
    assert names <= set(redline.__all__)
