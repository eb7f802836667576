from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from support.paths import ROOT
from support.processes import REDLINE, assert_finite, only_run, rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from redline.rollouts.rewards.parts import extract_answer

RECIPE = ROOT / "recipes" / "demo.yaml"
TEN_MINUTES_S = 600


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
