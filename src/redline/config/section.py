"""The bases of the sections of a recipe, and of keys that hold a mapping. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from redline.config.as_json import refuse_what_json_changes

FreeMapping = Annotated[dict[str, Any], AfterValidator(refuse_what_json_changes)]
"""What somebody else's code is given, under names of its own. A run that goes on reads it from its config.json: it holds only
what is the same after that."""
LocalPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]
"""`~` is the user's folder: no shell sees a recipe."""


class Section(BaseModel):
    """Frozen, strict about unknown keys, documented by the string under each field."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_means_defaults(cls, values: Any) -> Any:
        """YAML reads a section whose keys are all commented out as null."""
        return {} if values is None else values

    @model_validator(mode="before")
    @classmethod
    def _true_and_false_are_what_was_meant(cls, values: Any) -> Any:
        """YAML reads an unquoted `on` as true and `off` as false: a key whose values are such words gets the word. `true` for a
        number, which would be taken for 1, becomes a text, which is refused."""
        if not isinstance(values, Mapping):
            return values
        return {key: cls._meant(key, value) if isinstance(value, bool) else value for key, value in values.items()}

    @classmethod
    def _meant(cls, key: Any, value: bool) -> Any:
        kinds = _kinds(cls.model_fields[key].annotation) if key in cls.model_fields else set()
        word = "on" if value else "off"
        if value in kinds or bool in kinds:
            return value
        if word in kinds:
            return word
        return "true" if value and not {int, float}.isdisjoint(kinds) else value


class Entries(Section):
    """One key of a recipe that holds a mapping of a few names: `schedule: {kind: cosine, warmup_steps: 10}`.

    A bare value stands for the entry `short`, where a subclass names one: `schedule: cosine`.
    """

    short: ClassVar[str] = ""

    @classmethod
    def of_bare_value(cls, value: Any) -> dict[str, Any] | None:
        """The entries that a bare value stands for; None where it stands for none."""
        return {cls.short: value} if cls.short else None

    @model_validator(mode="before")
    @classmethod
    def _a_bare_value_is_one_entry(cls, values: Any) -> Any:
        return {cls.short: values} if cls.short and values is not None and not isinstance(values, Mapping | cls) else values


class Thresholds(Entries):
    """A number for each name. `off` (or null) switches a name off, `on` gives it its default; a bare `off` is all of them."""

    @classmethod
    def of_bare_value(cls, value: Any) -> dict[str, Any] | None:
        return dict.fromkeys(cls.model_fields) if _is_off(value) else None

    @model_validator(mode="before")
    @classmethod
    def _read_on_and_off(cls, values: Any) -> Any:
        """YAML reads an unquoted `off` as false, and `on` as true."""
        if not isinstance(values, Mapping):
            return cls.of_bare_value(values) or values
        read: dict[str, Any] = {}
        for key, value in values.items():
            name = "off" if key is False else "on" if key is True else key
            if _is_off(value):
                read[name] = None
            elif not (value is True or value == "on") or name not in cls.model_fields:  # an unknown name is refused later
                read[name] = value
            elif cls.model_fields[name].default is None:
                raise ValueError(f"{name} = on: it is off by default; give a number")
        return read


def _is_off(value: Any) -> bool:
    return value is False or value == "off"


def _kinds(annotation: Any) -> set[Any]:
    """The types that a key takes, one by one, and the values of those that are a choice of some."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for one in get_args(annotation) for kind in _kinds(one)}
    return {annotation}
