"""`redline --help` and the help of each verb, as a newcomer reads it."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from redline.cli import VERBS, app

ROOT = typer.main.get_command(app)
NAMES = [verb.__name__ for verbs in VERBS.values() for verb in verbs]
ODD = ("whoever", "nobody", "somebody", "Of ")
"""Words that save letters and cost readers."""


def help_of(*verb: str, columns: int = 80) -> str:
    done = CliRunner().invoke(app, [*verb, "--help"], env={"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns)})
    assert done.exit_code == 0
    return done.stdout


def test_verbs_stand_in_the_order_in_which_people_need_them() -> None:
    text = help_of()
    places = [text.index(f"│ {name} ") for name in NAMES]
    assert places == sorted(places)
    assert NAMES[0] == "train"
    assert list(ROOT.commands) == [*NAMES, "env"]
    assert "redline train recipes/demo.yaml" in text


@pytest.mark.parametrize("name", NAMES)
def test_every_verb_argument_and_option_says_what_it_does(name: str) -> None:
    command = ROOT.commands[name]
    said = [command.help, *(parameter.help for parameter in command.params if parameter.name != "help")]
    assert all(text and text[0].isupper() and text.rstrip(" `").endswith(".") for text in said), said
    assert not any(word in text for text in said for word in ODD)


@pytest.mark.parametrize("name", NAMES)
def test_help_fits_eighty_columns(name: str) -> None:
    text = help_of(name)
    assert "…" not in text.replace("l40s, …", "")
    assert max(map(len, text.splitlines())) <= 80
