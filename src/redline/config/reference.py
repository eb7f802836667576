"""The reference of keys, read off the schema: name, type, default, and the string under the field. Loads no torch.

`redline keys` prints it as text, docs/recipe.md has it as tables.
"""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from redline.config.problems import kinds_of, section_of, spell
from redline.config.section import Entries, Thresholds

_WORDS: dict[Any, str] = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
_SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
_INDENT = "    "


@dataclass(slots=True, frozen=True)
class Key:
    """One key, as a reference shows it."""

    name: str
    """As it is written on a command line: `trainer.learning_rate`."""
    type: str
    """In words: `number > 0`, `clip | gspo | cispo`."""
    default: str | None
    """As a recipe would write it, and empty for a mapping or a section; None where the key is required."""
    meaning: str
    """The string under the field, on one line."""
    entries: tuple[Key, ...] = ()
    """The names that a key may hold which is a mapping."""
    kind: str = ""
    """The `kind` of its section that has it; empty where the section has no kinds."""

    @property
    def in_its_kind(self) -> Key:
        """The key without the words that say of which kind it is."""
        return replace(self, meaning=self.meaning.removeprefix(_of_kind(self.kind)))


def keys_of(schema: type[BaseModel], prefix: str = "", whole: Sequence[str] = ()) -> Iterator[Key]:
    """Every key of a schema, in its order. A section named in `whole` is one key: it is described elsewhere."""
    for name, field in schema.model_fields.items():
        section = section_of(field)
        if section is not None and issubclass(section, Entries):
            yield _mapping(f"{prefix}{name}", field, section)
        elif section is not None and name in whole:
            yield Key(f"{prefix}{name}", "section", "", _one_line(field))
        elif section is not None:
            yield from keys_of(section, f"{prefix}{name}.")
        elif kinds := kinds_of(field):
            yield from _keys_of_kinds(f"{prefix}{name}.", kinds)
        else:
            yield _key(f"{prefix}{name}", field)


def beginning_with(key: Key, prefix: str) -> Key | None:
    """The key, if its name begins with the parts of `prefix`; with one entry alone, if that is what `prefix` names."""
    if f"{key.name}.".startswith(f"{prefix}."):
        return key
    return _with_entries(key, [entry for entry in key.entries if f"{key.name}.{entry.name}" == prefix])


def containing(key: Key, text: str) -> Key | None:
    """The key, if its name contains `text`; with those entries alone whose names do, if only they do."""
    return key if text in key.name else _with_entries(key, [entry for entry in key.entries if text in entry.name])


def _with_entries(key: Key, entries: Sequence[Key]) -> Key | None:
    return replace(key, entries=tuple(entries)) if entries else None


def _mapping(name: str, field: FieldInfo, section: type[Entries]) -> Key:
    off = issubclass(section, Thresholds)
    entries = tuple(_key(entry, inner, off=off) for entry, inner in section.model_fields.items())
    bare = f", or its {section.short}" if section.short else ""
    return Key(name, f"mapping{bare}", "", _one_line(field), entries)


def _keys_of_kinds(prefix: str, kinds: dict[str, type[BaseModel]]) -> Iterator[Key]:
    """Keys of a section that depend on its `kind`: each kind says which are its own."""
    yield Key(f"{prefix}kind", " | ".join(kinds), None, "Which keys the section has besides: those below that name it.")
    for kind, section in kinds.items():
        for key in keys_of(section, prefix):
            if key.name != f"{prefix}kind":
                yield replace(key, meaning=f"{_of_kind(kind)}{key.meaning}", kind=kind)


def _of_kind(kind: str) -> str:
    return f"`kind: {kind}`. "


def _key(name: str, field: FieldInfo, *, off: bool = False) -> Key:
    default = None if field.is_required() else _spelled(name, field.get_default(call_default_factory=True), off=off)
    return Key(name, _type(field.annotation, field.metadata, off=off), default, _one_line(field))


def _one_line(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


# ── words ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _type(annotation: Any, metadata: Sequence[Any] = (), *, off: bool = False) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], [*arguments[1:], *metadata], off=off)
    if origin is Literal:
        return " | ".join(value if isinstance(value, str) else spell(value) for value in arguments)
    if origin in (Union, types.UnionType):
        nothing = "off" if off else "null"
        return " | ".join(nothing if part is type(None) else _type(part, metadata) for part in arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"[{', '.join(_type(part) for part in arguments)}]"
    if origin in (tuple, list):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "mapping"
    return f"{_WORDS.get(annotation, 'text')}{_bounds(metadata)}"


def _bounds(metadata: Sequence[Any]) -> str:
    bounds = [(sign, getattr(bound, name, None)) for bound in metadata for name, sign in _SIGNS.items()]
    found = [f"{sign} {limit}" for sign, limit in bounds if limit is not None]
    return f" {' and '.join(found)}" if found else ""


def _spelled(name: str, value: Any, *, off: bool) -> str:
    """A default as a recipe would have it; sizes also in units that people read."""
    if value is None and off:
        return "off"
    if name.endswith("_bytes") and isinstance(value, int) and value >= 2**20:
        return f"{value} ({value / 2**30:g} GiB)" if value >= 2**30 else f"{value} ({value / 2**20:g} MiB)"
    if isinstance(value, str | Path):
        return str(value) or '""'
    if isinstance(value, tuple | list):
        return f"[{', '.join(str(item) for item in value)}]"
    return f"{value:g}" if isinstance(value, float) else spell(value)


# ── as text and as tables ──────────────────────────────────────────────────────────────────────────────────────────────


def as_text(keys: Iterable[Key], width: int) -> str:
    """Each key with its default and type, and its meaning under it, in lines of at most `width` columns where words allow."""
    return "\n".join(_paragraph(key, width, "") for key in keys)


def _paragraph(key: Key, width: int, indent: str) -> str:
    default = " (required)" if key.default is None else f" = {key.default}" if key.default else ""
    head = f"{key.name}{default}  ·  {key.type}"
    lines = _wrapped(head, width, indent, indent + _INDENT) + _wrapped(key.meaning, width, indent + _INDENT, indent + _INDENT)
    return "\n".join([*lines, *(_paragraph(entry, width, indent + _INDENT) for entry in key.entries)])


def _wrapped(text: str, width: int, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def as_table(keys: Iterable[Key]) -> str:
    """A Markdown table. An entry of a mapping is a row below its key."""
    rows = ["| key | type | default | |", "| --- | --- | --- | --- |"]
    for key in keys:
        rows.append(_row(key, f"`{key.name}`"))
        rows += [_row(entry, f"… `{entry.name}`") for entry in key.entries]
    return "\n".join(rows) + "\n"


def _row(key: Key, name: str) -> str:
    default = "required" if key.default is None else f"`{key.default}`" if key.default else ""
    return f"| {name} | {_cell(key.type)} | {_cell(default)} | {_cell(key.meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
