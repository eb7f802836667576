"""A recipe of an engine alone becomes the fastest engine that runs its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.generic_models import REFUSED
from support.small_models import write_model
from support.tiny_engines import ask, assert_same

from redline.config import EngineRecipe, resolve_engine, validate_engine
from redline.engine import NativeEngine
from redline.engine.adapters.transformers_engine import TransformersEngine
from redline.errors import ModelError
from redline.kernels.cpu import compiled
from redline.kernels.cpu.products import products
from redline.kernels.cpu.steps import steps_for
from redline.launch.engines import load_engine, make_engine
from redline.models.files.hf import load_decoder
from redline.models.files.sources import model_folder
from redline.models.files.tiny import tiny_tokenizer


def recipe(model: str | Path, **engine: Any) -> EngineRecipe:
    values = {"run": {"device": "cpu"}, "model": {"path": str(model), "dtype": "float32"}, "engine": engine}
    return resolve_engine(validate_engine(values, "a test")).recipe


@pytest.fixture
def bloom(tmp_path: Path) -> Path:
    write_model(tmp_path, REFUSED["bloom"][0])
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_model_of_ours_runs_in_our_engine_and_says_what_one_made_by_hand_says() -> None:
    loaded = load_engine(recipe("builtin:tiny", max_num_seqs=4, max_model_len=64))
    assert isinstance(loaded.engine, NativeEngine)
    assert loaded.max_positions == 64
    assert loaded.why_broken is None
    by_hand = make_engine(load_decoder(model_folder("builtin:tiny")), recipe("builtin:tiny", max_num_seqs=4).engine)
    [found], [expected] = loaded.engine.generate([ask(9)]), by_hand.generate([ask(9)])
    assert_same(found, expected)


def test_a_family_that_our_attention_does_not_run_is_run_by_transformers_and_that_is_told(bloom: Path) -> None:
    told: list[str] = []
    loaded = load_engine(recipe(bloom), tell=told.append)
    assert isinstance(loaded.engine, TransformersEngine)
    assert "transformers' own attention, slowly" in told[0]
    with loaded.session() as session:
        assert session.is_alive


def test_adapters_are_refused_where_the_model_cannot_take_them(bloom: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="LoRA needs a model of the Llama or Qwen families") as refused:
        load_engine(recipe(bloom), {"poet": tmp_path})
    assert refused.value.hint == "leave the adapters out"


def test_a_machine_without_a_compiler_is_told_of_when_an_engine_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    if products() is None:
        pytest.skip("no compiler here, or torch computes with other threads")
    for kept in ("_why_none", "_told"):
        monkeypatch.setattr(compiled, kept, [])
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    for asked in (compiled.library, products, steps_for):
        asked.cache_clear()
    for _ in range(2):
        load_engine(recipe("builtin:tiny", max_num_seqs=4, max_model_len=64), tell=told.append)
    for asked in (compiled.library, products, steps_for):
        asked.cache_clear()
    [line] = told
    assert "install gcc" in line
