"""The tuned recipe as a file that `redline train` takes: the recipe's own values, with what was changed and why beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from redline.config.load import reads_as_number, values_of
from redline.errors import ConfigError
from redline.lab.tune.space import Change
from redline.lab.tune.trials import Trial

WIDTH = 128


def written(values: Mapping[str, Any], kept: Change, trials: Sequence[Trial], head: Sequence[str]) -> str:
    """Return the file's text. `values` are those of the recipe, overrides included; `head` are its first comments. Raises
    `ConfigError` where a recipe cannot say these values."""
    merged = _copied(values)
    for key, value in kept.items():
        _put(merged, key.split("."), value)
    reasons = {key: _reason(values, key, trials) for key in kept}
    comments = [_printable(line) for text in head for line in text.splitlines() or [""]]
    text = "\n".join([*(f"# {line}".rstrip() for line in comments), *_lines(merged, reasons)]) + "\n"
    if values_of(text, "the tuned recipe") != merged:
        raise ConfigError("the tuned recipe would not say what was measured", f"give {' '.join(kept)} as overrides instead")
    return text


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in line)


class _Dumper(yaml.SafeDumper):
    """Quotes text that a recipe would read as a number, such as 1e5."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="'" if reads_as_number(text) else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def _dumped(value: Any, **options: Any) -> list[str]:
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True, **options)).splitlines()


def _reason(values: Mapping[str, Any], key: str, trials: Sequence[Trial]) -> str:
    trial = [trial for trial in trials if trial.outcome == "kept" and key in trial.change][-1]
    assert trial.gain is not None
    gain, beside = trial.gain, "; ".join(guard.words for guard in trial.guards if guard.is_told)
    with_it = " ".join(sorted(trial.change.keys() - {key}))
    told = f"{gain.ratio:.2f} times as fast ({gain.low:.2f} to {gain.high:.2f})"
    return f"{_before(values, key)}; {told}{f', with {with_it}' if with_it else ''}{f'; {beside}' if beside else ''}"


def _before(values: Mapping[str, Any], key: str) -> str:
    found: Any = values
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return "was left out"
        found = found[part]
    return f"was {_scalar(found)}"


def _lines(values: Mapping[str, Any], reasons: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    depth = prefix.count(".")
    indent = "  " * depth
    for name, value in values.items():
        key = f"{prefix}{name}"
        if depth == 0 and prefix == "":
            yield ""
        if key in reasons:
            yield f"{indent}# {reasons[key]}"
        if isinstance(value, dict) and any(reason.startswith(f"{key}.") for reason in reasons):
            yield f"{indent}{name}:"
            yield from _lines(value, reasons, f"{key}.")
        else:
            yield from (f"{indent}{line}" for line in _dumped({name: value}))


def _scalar(value: Any) -> str:
    return _dumped(value, default_flow_style=True)[0]


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def _put(values: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    values[parts[-1]] = value
