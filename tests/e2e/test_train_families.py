"""`redline train` on families beside Llama's: what is sampled, trained, saved and read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.generic_models import SMALL, family
from support.processes import assert_finite, only_run, rows, succeed, write_letters
from support.small_models import EXPERTS, SHAPE, random_model
from transformers import AutoModelForCausalLM, PretrainedConfig

from redline.models.files.hf import load_decoder
from redline.models.files.tiny import tiny_tokenizer

STEPS = 3
VOCABULARY = {"vocab_size": len(tiny_tokenizer())}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3_moe": family("qwen3_moe", **SHAPE | EXPERTS | VOCABULARY, norm_topk_prob=True),
    "gemma2": family("gemma2", **SMALL | VOCABULARY, sliding_window=16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_ends_with_a_model_that_transformers_reads(name: str, tmp_path: Path) -> None:
    random_model(FAMILIES[name], std=0.02).save_pretrained(tmp_path / "start")
    tiny_tokenizer().save_pretrained(tmp_path / "start")
    recipe = write_letters(
        tmp_path,
        model={"path": str(tmp_path / "start"), "dtype": "float32"},
        run={"name": "letters", "num_threads": 1, "steps": STEPS},
    )
    succeed("train", recipe.name, "--json", cwd=tmp_path)
    folder = only_run(tmp_path)
    found = rows(folder.metrics)
    assert len(found) == STEPS
    learnt = [row for row in found if row["trainer/trained_tokens"]]
    assert learnt, "no group had a signal"
    for row in found:
        assert_finite(row)
    for row in learnt:
        assert row["trainer/mismatch_kl"] < 1e-6, "the trainer computes what the engine sampled from"
        assert ("trainer/router_busiest" in row) == (name == "qwen3_moe")
    trained, ours = AutoModelForCausalLM.from_pretrained(folder.model, dtype=torch.float32), load_decoder(folder.model)
    assert trained.config.model_type == ours.spec.family == name
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32).state_dict()
    changed = [key for key, tensor in trained.state_dict().items() if not torch.equal(tensor, before[key])]
    assert len(changed) == len(before)
