"""`redline keys`: the reference of keys, and the page that is made of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.paths import ROOT
from typer.testing import CliRunner

from redline.cli import app
from redline.cli.explain import chosen, groups, recipe_page
from redline.config.problems import locate
from redline.errors import ConfigError
from redline.lab.bench.settings import SETTINGS


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["keys", *arguments])
    assert result.exit_code == 0
    return result.stdout


def names(prefix: str) -> list[str]:
    return [key.name for group in chosen(prefix) for key in group.keys]


def test_a_key_has_its_default_its_type_and_what_it_does() -> None:
    assert printed("trainer.learning_rate") == (
        "A recipe, and redline train RECIPE KEY=VALUE\n\n"
        "trainer.learning_rate = 1e-06  ·  number > 0\n"
        "    Learning rate of AdamW, once warm; all updates of a step have the same.\n"
    )


def test_a_mapping_has_its_entries_below_it() -> None:
    text = printed("telemetry.alerts")
    assert "telemetry.alerts  ·  mapping\n" in text
    assert "\n    kv_saturation = 0.98  ·  number > 0 and ≤ 1 | off\n        Share of the KV cache" in text


def test_nothing_is_wider_than_80_columns() -> None:
    assert [line for line in printed().splitlines() if len(line) > 80] == []


def test_a_pipe_gets_the_same_text_without_colours_or_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "redline.cli", "keys"], capture_output=True, text=True, check=True
    )
    assert done.stdout == printed()
    assert "\x1b" not in done.stdout
    assert " torch\n" not in done.stderr


def test_a_stdout_that_the_shell_closed_is_no_terminal() -> None:
    command = [sys.executable, "-m", "redline.cli", "keys", "trainer.lora"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("prefix", "found"),
    [
        ("trainer.lora", ["trainer.lora.rank", "trainer.lora.alpha", "trainer.lora.rslora", "trainer.lora.targets"]),
        ("trainer.schedule.kind", ["trainer.schedule"]),
        ("kv_sat", ["telemetry.alerts"]),
        ("model_len", ["engine.max_model_len"]),
        ("engine.max_loras", ["engine.max_loras"]),
        ("bench.transfer.sizes", ["bench.transfer.sizes"]),
    ],
)
def test_a_prefix_or_a_part_of_a_name_chooses(prefix: str, found: list[str]) -> None:
    assert names(prefix) == found


def test_a_section_is_its_own_keys_alone() -> None:
    assert {name.partition(".")[0] for name in names("buffer")} == {"buffer"}
    assert {name.partition(".")[0] for name in names("bench")} == {"bench"}


def test_a_name_that_nothing_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no key has 'learnin_rate' in its name") as caught:
        chosen("learnin_rate")
    assert caught.value.hint == "did you mean trainer.learning_rate?"
    for asked, meant in {"trainer.lr": "trainer.learning_rate", "group_sise": "rollouts.group_size"}.items():
        with pytest.raises(ConfigError) as caught:
            chosen(asked)
        assert caught.value.hint == f"did you mean {meant}?"


def test_every_key_of_a_recipe_and_every_setting_of_a_bench_is_there() -> None:
    recipe, _, *cases = groups()
    assert all(locate(key.name.split(".")).field or key.name.startswith("rollouts.task.") for key in recipe.keys)
    assert {key.name for key in recipe.keys if locate(key.name.split(".")).field} > {"run.steps", "trainer.mismatch"}
    for case, settings in zip(cases, SETTINGS.values(), strict=True):
        assert [key.name.rpartition(".")[2] for key in case.keys] == list(settings.model_fields)


def test_every_key_says_what_it_does() -> None:
    silent = [
        key.name for group in groups() for key in (*group.keys, *(e for k in group.keys for e in k.entries)) if not key.meaning
    ]
    assert silent == []


def test_each_kind_of_a_section_has_a_table_of_its_own_on_the_page() -> None:
    _, _, of_files = recipe_page().partition("### rollouts.task with `kind: file`\n")
    table, _, _ = of_files.partition("\n#")
    assert "| `rollouts.task.prompt_field` | text | `prompt` | Holds a string" in table
    assert "rollouts.task.dataset" not in table
    assert "kind:" not in table


def test_the_page_is_what_the_schema_gives() -> None:
    assert (ROOT / "docs" / "recipe.md").read_text() == recipe_page(), "run: redline keys --markdown > docs/recipe.md"
