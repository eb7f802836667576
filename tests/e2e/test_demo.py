from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.paths import ROOT
from support.processes import REDLINE, assert_finite, only_run, rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from redline.rollouts.rewards.parts import extract_answer

RECIPE = ROOT / "recipes" / "demo.yaml"
TEN_MINUTES_S = 600
SAME = ("step", "trainer/loss", "trainer/grad_norm", "rollouts/reward_mean", "trainer/trained_tokens")


@pytest.mark.slow
@pytest.mark.timeout(3700)
@pytest.mark.usefixtures("users_cache")
def test_the_demo_learns_sums_within_ten_minutes_and_accounts_for_its_time(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [REDLINE, "train", RECIPE, "--json"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=3600
    )
    document, folder = json.loads(done.stdout.splitlines()[-1]), only_run(tmp_path)

    before, *_, after = rows(folder.evaluations)
    assert before["step"] == 0
    assert 0.0 < before["evaluation/reward_mean"] < 0.3
    assert after["evaluation/reward_mean"] > 0.85
    assert document["finished"]
    assert len(before["evaluation/samples"]) == len(after["evaluation/samples"]) == 3

    steps = rows(folder.metrics)
    assert [row["step"] for row in steps] == list(range(1, document["steps"] + 1))
    for row in steps:
        assert_finite(row)

    main = json.loads(folder.ledger.read_text())["lanes"]["main"]
    assert sum(main["rows"].values()) + main["unaccounted_ns"] == main["wall_ns"]
    assert main["unaccounted_ns"] < 0.02 * main["wall_ns"]
    assert main["wall_ns"] < TEN_MINUTES_S * 1e9

    assert share_of_sums_right(folder.model) > 0.7


@pytest.mark.slow
@pytest.mark.timeout(3700)
@pytest.mark.usefixtures("users_cache")
@pytest.mark.parametrize("place", ["torchrun", "ray"])
def test_the_demo_recipe_has_the_losses_of_one_process_wherever_it_runs(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    keys = [str(RECIPE), "run.steps=3", "rollouts.evaluation.num_tasks=2", "model.dtype=float32"]
    if place == "ray":
        pytest.importorskip("ray")
        there = [REDLINE, "train", *keys, "placement.cluster=ray", "placement.address=local"]
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        there = [*launcher, "-m", "redline", "train", *keys]
    found = {}
    for name, command in {"one process": [REDLINE, "train", *keys], place: there}.items():
        (tmp_path / name).mkdir()
        subprocess.run(command, cwd=tmp_path / name, check=True, timeout=1800)
        found[name] = [[row[key] for key in SAME] for row in rows(only_run(tmp_path / name).metrics)]
    assert len(found[place]) == 3
    np.testing.assert_allclose(found[place], found["one process"], rtol=2e-3, atol=1e-5)


def share_of_sums_right(model_folder: Path) -> float:
    """By transformers alone, greedily, after the words that the recipe gives every answer."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    right = []
    for a, b in itertools.product(range(1, 6), repeat=2):
        messages = [
            {"role": "system", "content": "You are a calculator."},
            {"role": "user", "content": f"Calculate {a} + {b}."},
        ]
        asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) + "That makes"
        prompt = tokenizer(asked, add_special_tokens=False, return_tensors="pt")
        out = model.generate(**prompt, do_sample=False, max_new_tokens=6)
        text = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        right.append(extract_answer(text, "last_number") == str(a + b))
    return sum(right) / len(right)
