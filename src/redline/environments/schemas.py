"""JSON schemas of tools, made from typed Python functions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, get_type_hints

from redline.errors import TaskError

SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.+?)(?=^\s*\w+(?:\s*\([^)]*\))?:|\Z)", re.MULTILINE | re.DOTALL)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a function as `policy.say(tools=…)` takes it: its name, its docstring, and the types of its arguments. What
    stands under `Args:` in the docstring describes them, or the words of `Annotated[int, "in euros"]`. Raises TaskError where a
    type or the docstring is missing."""
    name = getattr(function, "__name__", type(function).__name__)
    doc = inspect.getdoc(function)
    if not doc:
        raise TaskError(f"the tool {name} has no docstring", "say in it what the function does: the model reads it")
    what, described = _read(doc)
    return {
        "type": "function",
        "function": {"name": name, "description": what, "parameters": _parameters(function, name, described)},
    }


def _parameters(function: Callable[..., Any], name: str, described: dict[str, str]) -> dict[str, Any]:
    from pydantic import Field, create_model
    from pydantic.errors import PydanticUserError

    fields: dict[str, Any] = {}
    hints = get_type_hints(function, include_extras=True)
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or key not in hints:
            raise TaskError(f"the argument {key} of the tool {name} has no single type", f"write {key}: int, or another type")
        default = ... if parameter.default is parameter.empty else parameter.default
        notes = [note for note in getattr(hints[key], "__metadata__", ()) if isinstance(note, str)]
        fields[key] = (hints[key], Field(default, description=described.get(key) or " ".join(notes) or None))
    try:
        schema = create_model(name, **fields).model_json_schema()
    except PydanticUserError as error:
        raise TaskError(
            f"the arguments of the tool {name} have no JSON schema: {error.message}", "use int, float, str, bool, list, dict"
        ) from error
    return {"type": "object", "properties": {}} | _without_titles(schema)


def _without_titles(schema: Any, is_property: bool = False) -> Any:
    """A schema without pydantic's titles, which repeat the names. An argument may itself be called `title`."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value, key == "properties" and not is_property)
            for key, value in schema.items()
            if is_property or key != "title"
        }
    return [_without_titles(value) for value in schema] if isinstance(schema, list) else schema


def _read(doc: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each argument."""
    what, *sections = SECTION.split(doc)
    texts = dict(zip(sections[::2], sections[1::2], strict=True))
    arguments = next((texts[title] for title in ("Args", "Arguments", "Parameters") if title in texts), "")
    described = {key: " ".join(text.split()) for key, text in ARGUMENT.findall(arguments)}
    return what.strip(), described
