"""`redline train` with other algorithms, an adapter and a reward model: it ends, says what it did, and resumes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.processes import digest, only_run, redline, rows, succeed, without_times, write_letters
from support.small_models import randomize
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from redline.models.files.sources import model_folder
from redline.models.files.tiny import tiny_tokenizer
from redline.telemetry import RunFolder

STEPS, CHECKPOINT = 6, 3
SEVERAL_UPDATES = {"trainer/updates", "trainer/grad_norm_max"}
CRITIC_KEYS = {"value_loss", "explained_variance", "value_clip_fraction", "critic_grad_norm"}

pytestmark = pytest.mark.slow


@dataclass
class Recipe:
    trainer: dict[str, Any]
    rollouts: dict[str, Any]
    keys: set[str]
    """Metrics that only such a run has."""


RECIPES: dict[str, Recipe] = {
    "dapo": Recipe({"algorithm": "dapo"}, {}, {"rollouts/reward_overlong_mean", *SEVERAL_UPDATES}),
    "ppo": Recipe(
        {"algorithm": "ppo", "kl_coef": 0.05, "critic": {"learning_rate": 1e-3, "warmup_steps": 2}},
        {},
        {"trainer/kl", *SEVERAL_UPDATES} | {f"trainer/{key}" for key in CRITIC_KEYS},
    ),
    "adapter": Recipe({"lora": {"rank": 4}, "kl_coef": 0.05}, {}, {"trainer/kl"}),
    "reward model": Recipe(
        {"optimizer_states": "int8", "mismatch": "token_mask"},
        {"reward_model": {"path": "judge"}, "reward_weights": {"reward_model": 0.5}},
        {"rollouts/reward_reward_model_mean", "trainer/masked"},
    ),
    "ppo, adapter, reward model": Recipe(
        {"algorithm": "ppo", "lora": {"rank": 4}, "kl_coef": 0.05, "gradient_checkpointing": "selective"},
        {"reward_model": {"path": "judge"}},
        {"rollouts/reward_reward_model_mean", "trainer/kl", *SEVERAL_UPDATES} | {f"trainer/{key}" for key in CRITIC_KEYS},
    ),
}


def prepare(cwd: Path, recipe: Recipe) -> None:
    write_reward_model(cwd / "judge")
    write_letters(
        cwd,
        run={"steps": STEPS, "checkpoint_every": CHECKPOINT, "name": "letters", "num_threads": 1},
        rollouts=recipe.rollouts | {"group_size": 4},
        trainer={"learning_rate": 3e-3, "max_tokens_per_micro_batch": 256, **recipe.trainer},
    )


def write_reward_model(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForSequenceClassification(config)
    randomize(model, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module", params=RECIPES)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, RunFolder]:
    """A run of each recipe, to the end without a pause."""
    recipe, cwd = RECIPES[request.param], tmp_path_factory.mktemp("train")
    prepare(cwd, recipe)
    document = json.loads(succeed("train", "letters.yaml", "--json", cwd=cwd))
    assert (document["steps"], document["finished"]) == (STEPS, True)
    return recipe, only_run(cwd)


def test_metrics_say_what_the_algorithm_did(finished: tuple[Recipe, RunFolder]) -> None:
    recipe, folder = finished
    found = rows(folder.metrics)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    special = set().union(*(other.keys for other in RECIPES.values()))
    for row in found:
        assert row.keys() & special == recipe.keys
        assert {"trainer/imbalance", "trainer/padding_tokens", "trainer/skipped"} <= row.keys()
        assert not row["trainer/skipped"]
        assert all(math.isfinite(row[key]) for key in recipe.keys)
    assert any(row["trainer/grad_norm"] > 0 for row in found)
    if recipe.keys > SEVERAL_UPDATES:
        assert max(row["trainer/updates"] for row in found) > 1
        assert max(row["trainer/clip_fraction"] or 0 for row in found) > 0, "the paper's clip never had an effect"
    if "kl" in str(recipe.keys):
        assert found[0]["trainer/kl"] == pytest.approx(0, abs=1e-6), "the reference is the policy before the first step"
        assert found[-1]["trainer/kl"] != 0


def test_a_run_that_stops_and_resumes_is_the_same_run(finished: tuple[Recipe, RunFolder], tmp_path: Path) -> None:
    recipe, straight = finished
    prepare(tmp_path, recipe)
    succeed("train", "letters.yaml", f"run.steps={CHECKPOINT}", cwd=tmp_path)
    succeed("train", "letters.yaml", f"run.steps={STEPS}", "--resume", cwd=tmp_path)
    resumed = only_run(tmp_path)
    assert digest(resumed.model / "model.safetensors") == digest(straight.model / "model.safetensors")
    name = f"step-{STEPS:06d}"
    checkpoints = [folder.checkpoints / name / "trainer.safetensors" for folder in (resumed, straight)]
    assert digest(checkpoints[0]) == digest(checkpoints[1])
    assert list(map(without_times, rows(resumed.metrics))) == list(map(without_times, rows(straight.metrics)))


def test_an_adapter_has_a_folder_of_its_own_that_peft_merges_into_the_model(finished: tuple[Recipe, RunFolder]) -> None:
    recipe, folder = finished
    assert folder.adapter.exists() == ("lora" in recipe.trainer)
    if not folder.adapter.exists():
        return
    adapter = json.loads((folder.adapter / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 32.0)
    base = AutoModelForCausalLM.from_pretrained(model_folder("builtin:tiny", seed=0))
    merged = PeftModel.from_pretrained(base, folder.adapter).merge_and_unload()
    trained = dict(AutoModelForCausalLM.from_pretrained(folder.model).named_parameters())
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("trainer.sharding=full", "leave it out"),
        ("trainer.offload_optimizer=true", "set trainer.offload_optimizer=false"),
        ("trainer.sequence_parallel_size=2", "set it to 1"),
        ("rollouts.reward_model.path=builtin:tiny", "a sequence classifier with one label"),
    ],
)
def test_what_cannot_be_done_here_is_refused_with_the_fix(override: str, hint: str, tmp_path: Path) -> None:
    prepare(tmp_path, RECIPES["dapo"])
    done = redline("train", "letters.yaml", override, "run.device=cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
