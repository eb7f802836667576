"""`redline doctor`: a run with a known fault has that fault as its first finding, with a command that proves the remedy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.processes import (
    REDLINE,
    num_rows,
    only_run,
    redline,
    started,
    succeed,
    wait_for_run,
    wait_until,
    write_letters,
)

SLOW = """
import time
from redline import Task


class Slow:
    def __init__(self, seed=0):
        pass

    def train(self, index):
        return Task(f"slow/{index}", [{"role": "user", "content": f"say {index}"}])

    def held_out(self, count):
        return []

    def score(self, task, text):
        until = time.perf_counter() + 0.02  # of computing: lockstep makes calls that wait while others are sampled
        while time.perf_counter() < until:
            pass
        return float(len(text) % 3)
"""


def test_a_slow_reward_is_the_first_finding_of_the_verb_and_of_the_report(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    task = {"kind": "import", "path": "slow:Slow", "folder": "."}
    write_letters(tmp_path, run={"steps": 7}, rollouts={"task": task, "evaluation": {"num_tasks": 0}})
    succeed("train", "letters.yaml", cwd=tmp_path)
    folder = only_run(tmp_path)
    found = json.loads(succeed("doctor", folder.path, "--json", cwd=tmp_path))
    first = next(finding for finding in found["findings"] if finding["cause"] != "noisy_neighbour")  # other tests may run
    assert first["cause"] == "slow_reward"
    assert first["share"] > 0.01  # half of the run on a machine of its own
    said = succeed("doctor", folder.path.relative_to(tmp_path), cwd=tmp_path)
    assert "Rewards hold up the run." in said
    assert "prove: redline compare runs/" in said
    succeed("report", folder.path, cwd=tmp_path)
    assert "Rewards hold up the run." in (folder.path / "report.html").read_text()


@pytest.mark.slow  # what it finds rests on how long steps take: a machine that is busy with others may hide it
def test_texts_that_repeat_are_told_to_be_guessed_and_others_are_not(tmp_path: Path) -> None:
    """Near temperature 0 a random network repeats itself and its siblings."""
    sizes = {"groups_per_step": 1, "group_size": 4, "max_new_tokens": 200, "evaluation": {"num_tasks": 0}}
    rollouts = {**sizes, "system_prompt": "Say letters. " * 20}  # whose pass tells what a token costs
    write_letters(tmp_path, run={"steps": 8}, rollouts=rollouts)

    def found(name: str, *overrides: str) -> dict[str, dict[str, Any]]:
        succeed("train", "letters.yaml", f"run.name={name}", *overrides, cwd=tmp_path)
        findings = json.loads(succeed("doctor", f"runs/{name}-001", "--json", cwd=tmp_path))["findings"]
        return {finding["cause"]: finding for finding in findings}

    repeats = found("repeats", "rollouts.temperature=0.05")["speculation_off"]
    assert repeats["change"] == {"engine.speculation": "auto"}
    assert repeats["prove"].endswith("--b engine.speculation=auto")
    assert repeats["share"] > 0.1  # half of the run on a machine of its own; at least nothing, with a network this small
    assert {"guesses", "tokens a step"} <= {evidence["name"] for evidence in repeats["evidence"]}
    assert "speculation_off" not in found("guessed", "rollouts.temperature=0.05", "engine.speculation=auto")
    assert "speculation_off" not in found("differs")


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    refused = redline("doctor", tmp_path, cwd=tmp_path)
    assert refused.returncode == 2
    assert "not a run folder" in refused.stderr


@pytest.mark.slow
def test_a_probe_of_a_run_that_goes_on_bears_its_finding_out_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The first probe is killed in the middle of its delays, which end by themselves; the second is not."""
    (tmp_path / "slow.py").write_text(SLOW)
    task = {"kind": "import", "path": "slow:Slow", "folder": "."}
    write_letters(tmp_path, run={"steps": 2000}, rollouts={"task": task, "evaluation": {"num_tasks": 0}})
    with started("train", "letters.yaml", cwd=tmp_path) as training:
        folder = wait_for_run(tmp_path, training)
        assert wait_until(lambda: num_rows(folder.metrics) >= 8, training)
        with subprocess.Popen([REDLINE, "doctor", folder.path, "--probe"], cwd=tmp_path, stderr=subprocess.DEVNULL) as probe:
            assert wait_until(lambda: b"delays/total_s" in folder.metrics.read_bytes(), training)
            probe.kill()
        assert wait_until(lambda: b"delays/plan" not in folder.metrics.read_bytes().splitlines()[-1], training)
        found = json.loads(succeed("doctor", folder.path, "--probe", "--json", "--price", "2.5", cwd=tmp_path))
        assert found["cost"]["price_per_device_hour"] == 2.5
        assert not (folder.path / "delays.json").exists()
    parts = {part["part"]: part for part in found["probe"]["parts"]}
    assert parts["rewards"]["says"] != "hidden"  # in lockstep nothing that computes is
    assert "slow_reward" in found["probe"]["findings"]
    assert json.loads(succeed("doctor", folder.path, "--json", cwd=tmp_path))["delayed_steps"] > 0
