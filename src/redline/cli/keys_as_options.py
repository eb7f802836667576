"""A key of a recipe that somebody wrote as an option: refused with the way it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from typer.core import TyperCommand

from redline.errors import ConfigError


class RecipeCommand(TyperCommand):
    """A verb that takes `SECTION.KEY=VALUE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _refuse_keys(args, {name for option in self.params for name in (*option.opts, *option.secondary_opts)} | {"--help"})
        return super().parse_args(ctx, args)


def command_class(verb: Callable[..., Any]) -> type[TyperCommand] | None:
    """What typer is to make of a verb; None leaves it to typer."""
    return RecipeCommand if "overrides" in verb.__annotations__ else None


def _refuse_keys(args: Sequence[str], known: set[str]) -> None:
    for index, argument in enumerate(args):
        name, equals, value = argument.partition("=")
        if argument == "--":
            return
        if name in known or not name.startswith("--"):
            continue
        if key := _key_of(name.removeprefix("--").replace("-", "_")):
            following = args[index + 1] if index + 1 < len(args) and not args[index + 1].startswith("--") else "..."
            written = f"{key}={value if equals else following}"
            raise ConfigError(f"no such option: {name}", f"keys of a recipe are written without dashes: write {written}")


def _key_of(name: str) -> str | None:
    """The key of a recipe that is called so, in full; None where there is none."""
    from redline.config.elsewhere import ELSEWHERE
    from redline.config.problems import locate, sections_with_key

    if "." in name:
        return name if locate(name.split(".")).field is not None else None
    sections = sections_with_key(name)
    return f"{sections[0]}.{name}" if sections else ELSEWHERE.get(name)
