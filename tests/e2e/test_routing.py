"""`redline train` on a mixture of experts: the engine's choices in the trajectories, reported and replayed by the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.generic_models import family
from support.processes import assert_finite, digest, only_run, redline, rows, succeed, write_letters
from support.small_models import EXPERTS, SHAPE, random_model
from transformers import AutoModelForCausalLM

from redline import Run
from redline.models.files.tiny import tiny_tokenizer
from redline.telemetry import RunFolder

LAYERS, CHOICES = SHAPE["num_hidden_layers"], EXPERTS["num_experts_per_tok"]


def prepare(folder: Path, **sections: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    config = family("qwen3_moe", **SHAPE | EXPERTS | {"vocab_size": len(tiny_tokenizer())}, norm_topk_prob=True)
    random_model(config, std=0.05).save_pretrained(folder / "start")
    tiny_tokenizer().save_pretrained(folder / "start")
    sections["run"] = {"steps": 3, **sections.get("run", {})}
    sections["rollouts"] = {"evaluation": {"num_tasks": 0}, **sections.get("rollouts", {})}
    model = {"path": str(folder / "start"), "dtype": "float32"}
    return write_letters(folder, model=model, **sections)


def trained(folder: Path, *arguments: str, **sections: dict[str, Any]) -> RunFolder:
    recipe = prepare(folder, **sections)
    succeed("train", recipe.name, *arguments, cwd=folder)
    found = only_run(folder)
    for row in rows(found.metrics):
        assert_finite(row)
    return found


def mismatches(folder: RunFolder) -> list[float]:
    """Of the steps that computed anything."""
    return [row["trainer/routing_mismatch"] for row in rows(folder.metrics) if row["trainer/trained_tokens"]]


@pytest.mark.slow
def test_the_engines_choices_are_stored_and_the_trainers_routers_agree_in_float32(tmp_path: Path) -> None:
    found = trained(tmp_path, engine={"record_routing": True})
    assert mismatches(found), "no group had a signal"
    assert max(mismatches(found)) < 0.01, "only what is too close to call may differ"
    first = Run.open(found.path).trajectories(step=1)
    tokens, routing = (
        np.array([len(values) for values in first.column(name).to_pylist()]) for name in ("token_ids", "routing")
    )
    np.testing.assert_array_equal(routing, tokens * LAYERS * CHOICES)
    row = first.slice(0, 1).to_pylist()[0]
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32)
    with torch.no_grad():
        logits = oracle(torch.tensor(row["token_ids"])[None], output_router_logits=True).router_logits
    chosen = np.array(row["routing"]).reshape(-1, LAYERS, CHOICES)[:-1]
    expected = torch.stack([each.topk(CHOICES).indices for each in logits], dim=1)[:-1].numpy()
    assert (np.sort(chosen) == np.sort(expected)).all(axis=-1).mean() > 0.99


@pytest.mark.slow
def test_routers_that_learn_part_from_what_was_sampled_and_replay_follows_it(tmp_path: Path) -> None:
    """Two updates of a step at a high learning rate: in the second the routers are others than those that sampled."""
    keys: dict[str, Any] = {"mini_batches": 2, "learning_rate": 3e-2}
    told = trained(tmp_path / "told", engine={"record_routing": True}, trainer=keys)
    replayed = trained(tmp_path / "replayed", engine={"record_routing": True}, trainer=keys | {"replay_routing": True})
    plain = trained(tmp_path / "plain", trainer=keys)
    assert max(mismatches(told)) > 0
    assert max(mismatches(replayed)) > 0
    assert "trainer/routing_mismatch" not in rows(plain.metrics)[0]
    weights = [digest(run.path / "model/model.safetensors") for run in (plain, told, replayed)]
    assert weights[0] == weights[1], "to report is to change nothing"
    assert weights[1] != weights[2]


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False], ids=["stored", "in memory"])
def test_replay_goes_with_a_lag_an_engine_of_its_own_and_a_resume(keeps: bool, tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {
        "engine": {"record_routing": True},
        "trainer": {"replay_routing": True, "learning_rate": 1e-2},
        "buffer": {"max_lag": 1, **({} if keeps else {"max_bytes": 0})},
        "placement": {"engines": 1},
        "run": {"checkpoint_every": 1},
    }
    found = trained(tmp_path, **sections)
    succeed("train", found.path, "--resume", "run.steps=5", cwd=tmp_path)
    assert len(rows(found.metrics)) == 5
    assert mismatches(found)
    assert all(0 <= share < 1 for share in mismatches(found))


def test_replay_without_a_record_and_a_record_without_experts_are_refused_before_the_run(tmp_path: Path) -> None:
    recipe = prepare(tmp_path, trainer={"replay_routing": True})
    refused = redline("train", recipe.name, "--dry-run", cwd=tmp_path)
    assert refused.returncode != 0
    assert "trainer.replay_routing = true: without effect here" in refused.stderr
    assert "engine.record_routing to true" in refused.stderr
    dense = redline("train", recipe.name, "--dry-run", "model.path=builtin:tiny", "engine.record_routing=true", cwd=tmp_path)
    assert dense.returncode != 0
    assert "engine.record_routing: the model has no experts" in dense.stderr
    others = redline("train", recipe.name, "--dry-run", "engine.kind=transformers", "engine.record_routing=true", cwd=tmp_path)
    assert others.returncode != 0
    assert "engine.record_routing = true: without effect here" in others.stderr
