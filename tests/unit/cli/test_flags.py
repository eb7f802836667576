"""Options that would do nothing beside others are refused."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from redline.cli import app
from redline.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train a.yaml --learning-rate 1e-3", "trainer.learning_rate=1e-3"),
        ("train a.yaml --lr=1e-3 --dry-run", "trainer.learning_rate=1e-3"),
        ("train a.yaml --trainer.lora.rank 8", "trainer.lora.rank=8"),
        ("plan a.yaml --group-size --json", "rollouts.group_size=..."),
    ],
)
def test_a_key_of_a_recipe_that_is_written_as_an_option_is_refused_with_the_way_to_write_it(line: str, said: str) -> None:
    error = CliRunner().invoke(app, line.split()).exception
    assert isinstance(error, ConfigError)
    assert error.message == f"no such option: {line.split()[2].partition('=')[0]}"
    assert error.hint == f"keys of a recipe are written without dashes: write {said}"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("show run --ledger --step 3", "--ledger is of the whole run"),
        ("show run --ledger --failures", "--ledger is of the whole run"),
        ("show run --step 1 --group 1", "exclude each other"),
        ("report run --json --output page.html", "--output names a page"),
        ("env play guess_number --temperature 0", "and you play"),
        ("env play guess_number --model builtin:tiny --served-model-name tiny", "what a server calls its model"),
        ("compare a.json b.json run.steps=3", "saved results are read"),
        ("compare a.json b.json --guard memory=0.2", "saved results are read"),
        ("compare a.json b.json --rounds 4", "saved results are read"),
        ("train recipe.yaml --from-scratch", "begins an existing run again"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(line: str, said: str) -> None:
    error = CliRunner().invoke(app, line.split()).exception
    assert isinstance(error, ConfigError)
    assert said in error.message
    assert error.hint
