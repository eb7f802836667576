"""Options that would do nothing beside others are refused."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from redline.cli import app
from redline.errors import ConfigError


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
