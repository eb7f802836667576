"""What a recipe says otherwise than a run that was begun with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from redline.config.paths import with_absolute_paths
from redline.config.problems import locate, spell
from redline.config.schema import Config
from redline.config.section import Thresholds

_AUTO = ("auto", None)
"""Values that are filled in when a run begins."""
_BOUNDED = "run.num_threads"
"""A run has at most as many as there are cores."""


def changes(recipe: Config, run: Config) -> list[str]:
    """`run.steps = 200, the run has 100` for every key that the recipe sets and that the run, which goes on as it began, has
    otherwise."""
    written = dict(_flat(recipe.model_dump(mode="json", exclude_unset=True)))
    says, has = (dict(_flat(with_absolute_paths(config).model_dump(mode="json"))) for config in (recipe, run))
    return [
        f"{key} = {spell(says[key])}, the run has {spell(has[key]) if key in has else 'none'}"
        for key in written
        if key != _BOUNDED and not _is_open(key, says[key]) and has.get(key, _AUTO) != says[key]
    ]


def _is_open(key: str, value: Any) -> bool:
    """Whether the recipe leaves the value to us. A threshold that is off is null, and not left to anyone; nor is what is auto
    only where a recipe says so (`engine.speculation`)."""
    place = locate(key.split("."))
    if value not in _AUTO or place.section is None:
        return value in _AUTO
    is_chosen = value == "auto" and place.field is not None and place.field.default != value
    return not is_chosen and not issubclass(place.section, Thresholds)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`section.key` and its value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
