"""YAML recipe + `section.key=value` overrides → `Config`, or one `ConfigError` that names every mistake with its fix."""

from __future__ import annotations

import copy
import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError

from redline.config.earlier import as_of_now
from redline.config.elsewhere import ELSEWHERE
from redline.config.engine_recipe import EngineRecipe
from redline.config.problems import entries_of_bare_value, explain, locate, sections_with_key
from redline.config.schema import Config
from redline.config.section import Section
from redline.errors import ConfigError

Recipe = TypeVar("Recipe", bound=Section)
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe, apply the overrides in order, validate the whole."""
    if not os.path.isfile(path):
        beside = path.parent.glob("*.y*ml") if os.path.isdir(path.parent) else ()
        near = difflib.get_close_matches(path.name, [p.name for p in beside], n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "give the path of a YAML recipe, such as recipes/demo.yaml"
        if os.path.isfile(path / "config.json"):
            new = f"redline train {path / 'config.json'} starts a new run like it"
            raise ConfigError(f"{path}: a run folder, not a recipe", f"to continue the run, add --resume; {new}")
        raise ConfigError(f"{path}: no such recipe", hint)
    values = _read_mapping(path)
    # What a run recorded is no mistake of a recipe's author, whichever version wrote it.
    return make_config(as_of_now(values) if path.name == "config.json" else values, overrides, str(path))


def recipe_values(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values that a recipe itself gives, with the overrides applied: nothing is filled in."""
    load_recipe(path, overrides)  # says what is wrong with either
    values = as_of_now(_read_mapping(path)) if path.name == "config.json" else _read_mapping(path)
    for override in overrides:
        _apply_override(values, override)
    return values


def read_recorded(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read the `config.json` of a run folder, of this version or an earlier one. A key that an earlier version did not have
    gets its default, whatever the algorithm is: a run that has begun is not filled in half-way."""
    config = make_config(as_of_now(_read_mapping(path)), overrides, str(path))
    return validate(config.model_dump(mode="json"), str(path))


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file: {error}", "save the recipe as UTF-8") from error
    recorded = _parse_json(text) if path.name == "config.json" else None
    return values_of(text, str(path)) if recorded is None else recorded


def _parse_json(text: str) -> dict[str, Any] | None:
    """Return what a run recorded, to the letter: YAML reads most JSON, but some line breaks inside a text as spaces. None where
    somebody changed it into what is no JSON, or has a key twice: YAML says what is wrong with it."""
    try:
        values = json.loads(text, object_pairs_hook=_each_key_once, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is there twice")
    return values


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def values_of(text: str, name: str) -> dict[str, Any]:
    """Return what the text of a recipe says, unchecked. `name` is what errors call it."""
    values = parse_yaml(text, name)
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: a recipe is a mapping of sections", "start with `model:` and `rollouts:`")
    return values


def make_config(values: Mapping[str, Any], overrides: Sequence[str] = (), name: str = "recipe") -> Config:
    """Apply the overrides, in order, to a copy of a recipe's values, and validate the whole. `name` says whose mistakes they
    are."""
    changed = copy.deepcopy(dict(values))
    for override in overrides:
        _apply_override(changed, override)
    return validate(changed, name)


def validate(values: Mapping[str, Any], name: str = "recipe") -> Config:
    """Check a nested mapping; every mistake in it is reported at once. `name` says whose mistakes they are."""
    is_file = name.endswith((".yaml", ".yml", ".json"))  # and not a mapping that a program gave
    hint = (
        f"`redline train {name} --dry-run` checks again without loading anything" if is_file else "mend them where it is made"
    )
    return _validate(Config, values, name, hint)


def validate_engine(values: Mapping[str, Any], name: str) -> EngineRecipe:
    """Check the recipe of an engine alone; every mistake in it is reported at once."""
    return _validate(EngineRecipe, values, name, "change each of them")


def _validate(schema: type[Recipe], values: Mapping[str, Any], name: str, hint: str) -> Recipe:
    # An absent section is an empty one, so that the error names the key that is missing (model.path), not its section.
    required = {section: None for section, field in schema.model_fields.items() if field.is_required()}
    try:
        return schema.model_validate({**required, **values})
    except ValidationError as error:
        problems = [explain(problem, schema) for problem in error.errors(include_url=False)]
    if len(problems) == 1:
        raise ConfigError(f"{name}: {problems[0].what}", problems[0].hint)
    lines = "".join(f"\n  {problem}" for problem in problems)
    raise ConfigError(f"{name}: {len(problems)} problems{lines}", hint)


# ── YAML ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_yaml(text: str, name: str) -> Any:
    """Return what YAML says, except that a key given twice is refused and 1e-5 is a number. `name` is what errors call it."""
    loader = yaml.SafeLoader(text)
    loader.name = name
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_node(root, name, seen=set())
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{name}: {line}not valid YAML: {error.problem}", "fix it there, or quote the value") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}", "save it as plain UTF-8 text") from error
    except (ValueError, KeyError, AttributeError) as error:  # a value looks like a date or a number, and is none
        raise ConfigError(f"{name}: not valid YAML: {error}", "put the value in quotes") from error
    finally:
        loader.dispose()


def _check_node(node: yaml.Node, name: str, seen: set[int]) -> None:
    if id(node) in seen:  # an alias: the node is shared, or even its own child
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        _read_exponents(node)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_node(item, name, seen)
    elif isinstance(node, yaml.MappingNode):
        _refuse_duplicates(node, name)
        for _, value in node.value:
            _check_node(value, name, seen)


def reads_as_number(text: str) -> bool:
    """Whether a recipe that has this text without quotes has a number, although plain YAML has text."""
    return _EXPONENT.fullmatch(text) is not None


def _read_exponents(node: yaml.ScalarNode) -> None:
    """YAML 1.1 reads an unquoted 1e-5 as text (it wants 1.0e-5); people mean the number. Quoted text stays text."""
    if node.style is None and node.tag == "tag:yaml.org,2002:str" and reads_as_number(node.value):
        node.tag = "tag:yaml.org,2002:float"


def _refuse_duplicates(node: yaml.MappingNode, name: str) -> None:
    """YAML parsers keep the last of two equal keys, and the run is not the one its author reads."""
    lines: dict[str, int] = {}
    for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
        line = key.start_mark.line + 1
        if key.value in lines:
            raise ConfigError(f"{name}: line {line}: {key.value} is already set on line {lines[key.value]}", "keep one of them")
        lines[key.value] = line


# ── overrides ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or len(parts) < 2 or not all(parts):
        near = [f"did you mean {section}.{override}?" for section in sections_with_key(key) if equals]
        near += [f"did you mean {ELSEWHERE[key]}={text}?"] if equals and key in ELSEWHERE else []
        if key in Config.model_fields:
            near = [f"{key} is a section; `redline keys {key}` lists its keys"]
        hint = near[0] if near else "for example run.steps=20"
        raise ConfigError(f"override {override!r} is not of the form section.key=value", hint)
    put(values, parts, _text(text, override, parts) if _is_text(parts) else _parsed(text, override), override)


def put(values: dict[str, Any], parts: Sequence[str], value: Any, override: str) -> None:
    """Set a key below `values`. A bare value sets the entries that it stands for, and others of the same mapping stay; null and
    a mapping replace all of them."""
    node, name = _open_section(values, parts[:-1], override), parts[-1]
    is_bare = value is not None and not isinstance(value, dict)
    if is_bare and isinstance(node.get(name), dict) and (entries := entries_of_bare_value(parts, value)):
        node[name] |= entries
    else:
        node[name] = value


def _open_section(values: dict[str, Any], parts: Sequence[str], override: str) -> dict[str, Any]:
    """The mapping at a place below `values`, made where it is missing. A bare value there becomes the entries it stands for;
    any other value is refused, in the name of the override that looks for a section."""
    for depth, part in enumerate(parts, start=1):
        inside = {} if values.get(part) is None else values[part]
        if not isinstance(inside, dict):
            entries, place = entries_of_bare_value(parts[:depth], inside), ".".join(parts[:depth])
            if entries is None:
                raise ConfigError(f"override {override!r}: {place} is a value, not a section", f"set {place} itself")
            inside = entries
        values[part] = inside
        values = inside
    return values


def _is_text(parts: Sequence[str]) -> bool:
    """Whether the schema wants text here. Keys of a task depend on its kind, and stay as YAML reads them."""
    field = locate(parts).field
    if field is None or get_origin(field.annotation) is dict:
        return False  # the arguments of a mapping's type begin with that of its names
    return field.annotation is str or str in get_args(field.annotation)


def _text(text: str, override: str, parts: Sequence[str]) -> Any:
    """The value of a key that wants text, as it stands: YAML would take off the spaces around it, put its lines together and
    cut it where a comment begins. Only what is in quotes, or null, is read as YAML."""
    field = locate(parts).field
    if not text and field is not None and type(None) in get_args(field.annotation):
        key = override.removesuffix("=")
        raise ConfigError(f"override {override!r} has no value", f"{key}=null leaves it out, {key}='\"\"' is an empty text")
    is_yaml = text.lstrip().startswith(("'", '"')) or text.strip().lower() in ("null", "~")
    return _parsed(text, override) if is_yaml else text


def _parsed(text: str, override: str) -> Any:
    return parse_yaml(text, f"override {override!r}")
