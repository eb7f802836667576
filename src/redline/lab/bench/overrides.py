"""`key=value` from the command line, on top of a workload → the settings of a case, or what is wrong with them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from redline.config.load import parse_yaml, put
from redline.config.problems import earlier_key
from redline.errors import ConfigError
from redline.lab.material.workloads import WORKLOADS

Settings = TypeVar("Settings", bound=BaseModel)

EXAMPLES = {"engine": "prompts=16 or engine.max_num_seqs=64", "trainer": "tokens=256 or trainer.learning_rate=1e-5"}
"""By the section of a recipe that a case has."""


def read_overrides(case: str, kind: type[Settings], overrides: Sequence[str]) -> Settings:
    sections = [section for section in EXAMPLES if section in kind.model_fields]
    given: dict[str, Any] = {}
    for override in overrides:
        _put(given, override, sections)
    values = _over(_preset(case, given.get("workload")), given, sections)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(case, kind, error) from error


def _put(values: dict[str, Any], override: str, allowed: Sequence[str]) -> None:
    key, equals, text = override.partition("=")
    key = key.removeprefix("--").replace("-", "_")  # as other programs spell their options
    *sections, name = key.split(".")
    if not equals or not name or (sections and sections[0] not in allowed):
        example = EXAMPLES[allowed[0]] if allowed else "pairs=6"
        raise ConfigError(f"{override!r} is not of the form key=value", f"for example {example}")
    put(values, [*sections, name], parse_yaml(text, repr(override)), override)


def _preset(case: str, name: Any) -> Mapping[str, Any]:
    if name is None:
        return {}
    known = WORKLOADS.get(case, {})
    if not known:
        raise ConfigError(f"workload = {str(name)!r}: {case} has no workloads", "leave it out, and give sizes")
    if str(name).upper() not in known:
        raise ConfigError(f"workload = {str(name)!r}: {case} has no such workload", f"one of {', '.join(known)}")
    return {**known[str(name).upper()], "workload": str(name).upper()}


def _over(preset: Mapping[str, Any], given: Mapping[str, Any], sections: Sequence[str]) -> dict[str, Any]:
    merged = {section: {**preset.get(section, {}), **given.get(section, {})} for section in sections}
    named = {"workload": preset["workload"]} if preset else {}
    return {**preset, **given, **named, **merged}


def _refusal(case: str, kind: type[BaseModel], error: ValidationError) -> ConfigError:
    """The first mistake, with the key as it was written."""
    problem = error.errors(include_url=False)[0]
    path = [str(part) for part in problem["loc"] if isinstance(part, str)]
    reason = problem["msg"].removeprefix("Value error, ")
    reason = reason[0].lower() + reason[1:]
    if not path:
        return ConfigError(f"redline bench {case}: {reason}", "change one of them")
    fields = _fields_around(path, kind)
    key, name = ".".join(path), path[-1]
    if problem["type"] == "extra_forbidden" and (earlier := earlier_key(key)):
        return ConfigError(f"redline bench {case}: {earlier.what}", earlier.hint)
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(fields)}"
        return ConfigError(f"redline bench {case}: {key}: unknown key", hint)
    meaning = " ".join((fields[name].description or "").split()) if name in fields else ""
    return ConfigError(f"redline bench {case}: {key} = {problem['input']!r}: {reason}", f"{key}: {meaning}")


def _fields_around(path: Sequence[str], section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Those of the section that the last part of `path` is a key of."""
    for part in path[:-1]:
        inner = section.model_fields[part].annotation if part in section.model_fields else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            section = inner
    return section.model_fields
