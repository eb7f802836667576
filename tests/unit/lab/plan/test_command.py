"""`redline plan` as it is typed, and the pages that are written from saved results."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.paths import ROOT
from typer.testing import CliRunner

from redline.cli import app
from redline.errors import ConfigError
from redline.trainer.loss.logprobs import CHUNK_BYTES, KEPT_BYTES

RECIPE = """
model: {path: random:qwen2.5-7b}
rollouts:
  task: {kind: import, path: "no:tasks"}
  groups_per_step: 8
  group_size: 4
  max_new_tokens: 128
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "seven.yaml"
    path.write_text(RECIPE)
    return str(path)


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_a_plan_that_does_not_fit_says_what_to_change_and_exits_with_1(recipe: str) -> None:
    done = run(recipe, "--gpu", "h100", "--json")
    assert done.exit_code == 1
    assert "does not fit" in done.stderr
    assert "what to cut" in done.stderr
    document = json.loads(done.stdout)
    assert document["fits"] is False
    assert document["room_bytes"] < 0


def test_a_plan_that_fits_exits_with_0_and_takes_overrides_and_prices(recipe: str) -> None:
    done = run(recipe, "trainer.lora.rank=16", "--gpu", "h100", "--price", "h100=8", "--prompt-tokens", "64", "--json")
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert document["cost"]["price_per_hour"] == 8
    assert document["work"]["prompt_tokens"] == 64
    assert document["model"]["trained"] < document["model"]["parameters"]


def test_the_plan_is_on_stdout(recipe: str) -> None:
    done = run(recipe, "trainer.lora.rank=16", "--gpu", "h200")
    assert done.stderr == ""
    said = " ".join(done.stdout.split())  # wherever its lines end
    for words in ("memory of one device", "time of a step", "samples/hour", "bottleneck", "fitted to"):
        assert words in said


@pytest.mark.parametrize("columns", [80, 60])
def test_a_narrow_terminal_shows_every_number_of_a_plan(recipe: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (recipe, "--gpu", "h200")
    wide = run(*arguments).stdout
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = run(*arguments).stdout
    assert max(map(len, narrow.splitlines())) <= columns
    assert "…" not in narrow
    assert set(re.findall(r"\d[\d.,]*", wide)) <= set(re.findall(r"\d[\d.,]*", narrow))


def test_mistakes_are_refused_with_the_fix(recipe: str) -> None:
    unknown = run(recipe, "--gpu", "h101")
    assert isinstance(unknown.exception, ConfigError)
    assert "did you mean h1" in unknown.exception.hint
    missing = run(recipe.replace("seven", "sevn"), "--gpu", "h100")
    assert isinstance(missing.exception, ConfigError)
    assert "did you mean" in missing.exception.hint
    shape = run(recipe, "model.path=random:gpt-9", "--gpu", "h100")
    assert isinstance(shape.exception, ConfigError)
    assert "random:qwen2.5-7b" in shape.exception.hint


# ── pages ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "plan" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def saved_document() -> dict[str, object]:
    row = {"point": "p", "phase": "generation", "planned": 2e9, "measured": 1e9, "error": 1.0}
    rows = [
        {**row, "kind": "memory", "tolerance": 0.08, "within": False},
        {**row, "kind": "time", "planned": 1.0, "measured": 1.1, "error": -0.09, "tolerance": 0.25, "within": True},
    ]
    identity = {
        "gpus": [{"name": "NVIDIA H200"}],
        "packages": {"torch": "2.0"},
        "source": {"commit": "abcdef0123"},
        "started": "2030-01-02T03:04:05",
    }
    return {"rows": rows, "points": [{"name": "q", "phase": "training", "error": "out of memory"}], "identity": identity}


def test_the_validation_table_shows_misses_and_failures(tmp_path: Path) -> None:
    render = script("render")
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "plan.json").write_text(json.dumps(saved_document()))
    page = "a\n<!-- validation: h200 -->\nold\n<!-- end -->\nb\n<!-- validation: l4 -->\n<!-- end -->\n"
    text = render.filled(page, tmp_path)
    assert "old" not in text
    assert "0 of 1 figures of memory within 8%; 1 of 1 figures of time within 25% (NVIDIA H200" in text
    assert "| p | generation, memory | 2 GB | 1 GB | +100.0% | **miss** (± 8%) |" in text
    assert "**failed**: out of memory" in text
    assert "Not measured yet." in text
    assert render.filled(text, tmp_path) == text


def test_the_page_names_the_bytes_of_logits_that_the_trainer_keeps() -> None:
    page = (ROOT / "docs" / "planning.md").read_text()
    kept, chunk = ({kind: sizes[kind] // 2**20 for kind in ("cuda", "cpu")} for sizes in (KEPT_BYTES, CHUNK_BYTES))
    assert f"Logits are kept up to {kept['cuda'] // 1024} GiB (CPU {kept['cpu']} MiB)" in page
    assert f"a chunk of at most {chunk['cuda'] // 1024} GiB ({chunk['cpu']} MiB in float32)" in page


@pytest.mark.slow
def test_the_page_of_reference_figures_is_what_results_and_planner_give() -> None:
    figures = script("reference_figures")
    assert figures.page() == figures.PAGE.read_text(), "run benchmarks/plan/reference_figures.py, and say why it moved"


def test_every_reference_figure_is_marked() -> None:
    figures = script("reference_figures")
    found = dict(figures.sections())
    assert sum(len(rows) for rows in found.values()) > 60
    for rows in found.values():
        for figure in rows:
            assert figure.mark in ("measured", "planned", "not comparable")
            assert figure.ours or figure.note, figure
            assert figure.ours or figure.mark == "not comparable", figure
    assert any("91 GB" in figure.theirs for figure in found["Memory of 7B on 80 GB"])
