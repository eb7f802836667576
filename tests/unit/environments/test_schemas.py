"""Schemas of tools, from typed functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from transformers.utils import get_json_schema

from redline.environments.schemas import schema_of
from redline.errors import TaskError


def move(
    where: Literal["north", "south"],
    steps: int,
    fast: bool,
    weights: list[float],
    title: str = "walk",
) -> str:
    """Walks somewhere.

    It takes a while.

    Args:
        where: The direction,
            as on a map.
        steps: How far.
        fast: Whether to run.
        weights: What is carried.
        title: A name for it.

    Returns:
        What is there.
    """
    return f"{where} {steps} {fast} {weights} {title}"


class Map:
    def look(self, steps: Annotated[int, "at least one"]) -> str:
        """Looks ahead."""
        return str(steps)


def without_defaults(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: without_defaults(value) for key, value in schema.items() if key not in ("default", "return")}
    return schema


def test_a_typed_function_with_a_docstring_has_the_schema_that_transformers_makes() -> None:
    ours = schema_of(move)
    assert without_defaults(ours) == without_defaults(get_json_schema(move))
    assert ours["function"]["parameters"]["properties"]["title"]["default"] == "walk"


def test_a_method_has_the_schema_of_its_own_arguments_and_needs_no_words_on_each() -> None:
    assert schema_of(Map().look) == {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks ahead.",
            "parameters": {
                "type": "object",
                "properties": {"steps": {"type": "integer", "description": "at least one"}},
                "required": ["steps"],
            },
        },
    }


def untyped(x):  # type: ignore[no-untyped-def]
    """Does something."""


def many(*args: int) -> None:
    """Does something."""


def silent(x: int) -> None:
    pass


def strange(x: Callable[[], int]) -> None:
    """Does something."""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (untyped, "x of the tool untyped has no single type"),
        (many, "args of the tool many has no single type"),
        (silent, "the tool silent has no docstring"),
        (strange, "the arguments of the tool strange have no JSON schema"),
    ],
)
def test_a_function_of_which_the_model_could_know_too_little_is_refused(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(TaskError, match=said) as caught:
        schema_of(function)
    assert caught.value.hint
