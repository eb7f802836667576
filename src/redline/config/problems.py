"""What pydantic found wrong with a recipe, in the recipe's own words: the key as it is written there, the reason, the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from redline.addresses import without_login
from redline.config.earlier import EARLIER, EARLIER_TASK_KINDS
from redline.config.elsewhere import ELSEWHERE
from redline.config.schema import Config
from redline.config.section import Entries
from redline.errors import boundary


@dataclass(slots=True, frozen=True)
class Problem:
    """One mistake."""

    what: str
    """`key = value: reason`."""
    fix: str = ""
    """What to write instead, where that is more than the reason says."""
    meaning: str = ""
    """What the key is for, in the schema's words."""
    hint: str = ""
    """The fix as it reads alone, when this is the only mistake."""

    def __str__(self) -> str:
        if self.fix:
            return f"{self.what}; {self.fix}"
        return f"{self.what} ({self.meaning})" if self.meaning else self.what


@dataclass(slots=True, frozen=True)
class Place:
    """Where in the schema a key is."""

    key: str
    """As a recipe spells it: `rollouts.task.path`, `trainer.betas[0]`."""
    section: type[BaseModel] | None = None
    """The section the last part of the key belongs to; None inside a list or a free mapping."""
    field: FieldInfo | None = None
    """The field that is, or that holds, the key; None when the schema has no such key."""

    @property
    def meaning(self) -> str:
        return _as_clause(self.field.description or "") if self.field else ""


def explain(problem: Mapping[str, Any], schema: type[BaseModel] = Config) -> Problem:
    """One entry of pydantic's `errors()`, in our words."""
    place = locate(problem["loc"], schema)
    kind = problem["type"]
    if kind in ("extra_forbidden", "invalid_key"):
        return _unknown_key(place)
    if place.field is not None and place.field.discriminator:
        return _wrong_kind(place, problem)
    if kind == "missing":
        return Problem(f"{place.key}: required", meaning=place.meaning, hint=f"set {place.key}: {place.meaning}")
    reason, fix = _reason(problem)
    if kind in ("model_type", "model_attributes_type") and (section := section_of(place.field)):
        fix = _keys_of_section(place.key, section, problem["input"])
    if kind == "literal_error":
        fix = _did_you_mean(problem["input"], re.findall(r"'([^']*)'", problem["ctx"]["expected"]))
    what = f"{place.key} = {spell(problem['input'])}: {reason}" if place.key else reason
    return Problem(what, fix, place.meaning, hint=fix or f"change {place.key}: {place.meaning}")


def locate(location: Sequence[Any], schema: type[BaseModel] = Config) -> Place:
    """Follow a location through the schema, dropping what pydantic adds to it."""
    key, section, field = "", None, None
    inside: type[BaseModel] | None = schema
    kinds: dict[str, type[BaseModel]] = {}
    for part in location:
        if part in kinds:
            # The kind of a task appears in pydantic's location (rollouts.task.jsonl.path) but in no recipe.
            inside, kinds = kinds[part], {}
            continue
        key += f"[{part}]" if isinstance(part, int) and inside is None else f".{part}" if key else str(part)
        section = inside
        if section is not None:
            field = section.model_fields.get(str(part))
            inside = section_of(field)
            kinds = kinds_of(field)
    return Place(key, section, field)


def sections_with_key(key: str) -> list[str]:
    """The sections of a recipe that have such a key."""
    found = {name: section_of(field) for name, field in Config.model_fields.items()}
    return [name for name, section in found.items() if section and key in section.model_fields]


def entries_of_bare_value(parts: Sequence[str], value: Any) -> dict[str, Any] | None:
    """The entries that a bare value stands for at a key that holds a mapping (`trainer.schedule: cosine`, `telemetry.alerts:
    off`); None where it stands for none."""
    section = section_of(locate(parts).field)
    return section.of_bare_value(value) if section and issubclass(section, Entries) else None


def section_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """The section that a field holds; None for a value, and where the section depends on its `kind`."""
    annotation = field.annotation if field else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def kinds_of(field: FieldInfo | None) -> dict[str, type[BaseModel]]:
    """Kind → section, for a field whose section depends on its `kind`."""
    if field is None or not field.discriminator:
        return {}
    sections = [model for model in get_args(field.annotation) if model is not type(None)]
    return {get_args(model.model_fields["kind"].annotation)[0]: model for model in sections}


def earlier_key(key: str) -> Problem | None:
    """What is wrong with a key of an earlier version, or with a section that only had such keys; None for any other."""
    found = next((name for name in EARLIER if name == key or name.startswith(f"{key}.")), None)
    if found is None:
        return None
    what, fix = EARLIER[found].told(found)
    return Problem(what, fix, hint=fix)


def _unknown_key(place: Place) -> Problem:
    if earlier := earlier_key(place.key):
        return earlier
    parent, _, last = place.key.rpartition(".")
    known = sorted(place.section.model_fields) if place.section else []
    near = difflib.get_close_matches(last, known, n=1)
    elsewhere = sections_with_key(last)
    if last in ELSEWHERE:
        fix = f"did you mean {ELSEWHERE[last]}?"
    elif near:
        fix = f"did you mean {parent}.{near[0]}?" if parent else f"did you mean {near[0]}?"
    elif elsewhere:
        fix = f"did you mean {elsewhere[0]}.{last}?"
    else:
        fix = f"known {'keys' if parent else 'sections'}: {', '.join(known)}"
    return Problem(f"{place.key}: unknown {'key' if parent else 'section'}", fix, hint=fix)


def _keys_of_section(key: str, section: type[BaseModel], value: Any) -> str:
    """What to write where a section was given a value."""
    if (meant := _BARE_VALUES.get(key)) and isinstance(value, int) and value is not True:
        return f"write {meant}={spell(value)}"
    return f"put its keys under it: {', '.join(section.model_fields)}"


def _wrong_kind(place: Place, problem: Mapping[str, Any]) -> Problem:
    """A section whose keys depend on its `kind` cannot be read any further without one."""
    kinds = list(kinds_of(place.field))
    fix = f"one of {', '.join(kinds)}"
    if problem["type"] != "union_tag_invalid":
        return Problem(f"{place.key}.kind: required", fix, hint=f"set {place.key}.kind: {fix}")
    tag = problem["ctx"]["tag"]
    if tag in EARLIER_TASK_KINDS:
        now = EARLIER_TASK_KINDS[tag]
        return Problem(f"{place.key}.kind = {tag!r}: it is {now!r} now", f"write kind: {now}", hint=f"write kind: {now}")
    fix = _did_you_mean(tag, kinds) or fix
    return Problem(f"{place.key}.kind = {tag!r}: no such kind", fix, hint=fix)


_PATTERNS = {r"^[\w.]+:[\w.]+$": "names no class of a module; write module:Class, such as vowels:Vowels for vowels.py"}
"""Reason and fix, where an expression would not say it."""
_BARE_VALUES = {"trainer.lora": "trainer.lora.rank"}
"""Sections that a bare value stands for something in: the key that it was meant for."""

_REASONS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than_equal": lambda ctx: f"must be at least {ctx['ge']}",
    "greater_than": lambda ctx: f"must be more than {ctx['gt']}",
    "less_than_equal": lambda ctx: f"must be at most {ctx['le']}",
    "less_than": lambda ctx: f"must be less than {ctx['lt']}",
    "finite_number": lambda ctx: "must be a finite number",
    "literal_error": lambda ctx: f"must be {ctx['expected']}",
    "string_pattern_mismatch": lambda ctx: _PATTERNS.get(ctx["pattern"], f"must match {ctx['pattern']}"),
    "string_type": lambda ctx: "must be text; put it in quotes",
    "path_type": lambda ctx: "must be text; put it in quotes",
    "model_type": lambda ctx: "must be a section; put its keys under it",
    "model_attributes_type": lambda ctx: "must be a section; put its keys under it",
    "dict_type": lambda ctx: "must be a mapping; write {} for an empty one",
    "list_type": lambda ctx: "must be a list; put its values in brackets: [a, b]",
    "tuple_type": lambda ctx: "must be a list; put its values in brackets: [a, b]",
    "too_long": lambda ctx: f"must have {ctx['max_length']} values",
}
_REASONS |= dict.fromkeys(("int_type", "int_parsing", "int_from_float"), lambda ctx: "must be a whole number")
_REASONS |= dict.fromkeys(("float_type", "float_parsing"), lambda ctx: "must be a number")
_REASONS |= dict.fromkeys(("bool_type", "bool_parsing"), lambda ctx: "must be true or false")


def _reason(problem: Mapping[str, Any]) -> tuple[str, str]:
    """Reason and fix; what follows a semicolon, here and in the schema's own validators, is the fix."""
    in_our_words = _REASONS.get(problem["type"])
    text = in_our_words(problem.get("ctx", {})) if in_our_words else problem["msg"].removeprefix("Value error, ")
    reason, _, fix = text.partition("; ")
    return reason[0].lower() + reason[1:], fix


def _did_you_mean(word: Any, known: Sequence[str]) -> str:
    # Values are short: at difflib's usual 0.6, someone who asks for a gpu is offered a cpu.
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else ""


def spell(value: Any) -> str:
    """As a recipe would have it, cut to what fits a line, without the passwords of addresses."""
    words = {None: "null", True: "true", False: "false"}
    text = f"a {type(value).__name__}"
    with boundary():  # a value from Python may have no words, and a number too many digits
        text = words[value] if value is None or isinstance(value, bool) else without_login(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _as_clause(description: str) -> str:
    """A docstring as the end of a sentence: one line, no full stop, lower case unless it opens with an acronym."""
    text = " ".join(description.split()).removesuffix(".")
    return text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text
