"""`redline compare` on the machine that the tests run on, however busy it is. A wrong verdict fails; none at all is allowed
where the noise explains it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.processes import REDLINE, redline, started, wait_until, write_letters

import redline as package

PATIENCE_S = 880
MINUTES = 12
"""Of one comparison: within the time a test may take, with room for the pair that is under way."""
WORK = ("model=builtin:small", "device=cpu", "dtype=float32", "num_threads=1", "sequences=4", "tokens=48")
PLANT = '''

import time as _time

_step = PolicyTrainer.step


def _slowed(self, batch):
    """As much again as {share} of the CPU time of the step."""
    began = _time.process_time()
    report = _step(self, batch)
    until = _time.process_time() + {share} * (_time.process_time() - began)
    while _time.process_time() < until:
        pass
    return report


PolicyTrainer.step = _slowed
'''


def git(folder: Path, *arguments: str) -> str:
    person = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
    done = subprocess.run(["git", *person, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def planted(folder: Path, share: float) -> Path:
    """A repository of this source with a second commit that slows the trainer down; one that changes nothing with 0."""
    shutil.copytree(Path(package.__file__).parent, folder / "src" / "redline", ignore=shutil.ignore_patterns("__pycache__"))
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "as it is")
    trainer = folder / "src" / "redline" / "trainer" / "trainer.py"
    trainer.write_text(trainer.read_text() + (PLANT.format(share=share) if share else "\n# nothing\n"))
    git(folder, "commit", "--quiet", "-am", "planted")
    return folder


def compared(folder: Path) -> dict[str, Any]:
    """The document of HEAD~1 against HEAD by the CPU time of a step."""
    command = ["compare", "git:HEAD~1", "git:HEAD", "--case", "trainer", *WORK, "--metric", "cpu_s", "--json"]
    done = subprocess.run(
        [REDLINE, *command, "--effect", "0.03", "--max-minutes", str(MINUTES)],
        cwd=folder,
        env=os.environ | {"NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == document["exit_code"]
    assert len(git(folder, "worktree", "list").splitlines()) == 1
    return document


def assert_noise_explains_it(document: dict[str, Any]) -> None:
    result = document["results"][0]
    pairs = len(result["samples"])
    assert document["verdict"] == "abstained", document["sentence"]
    assert document["reasons"]
    assert pairs < 8 or result["noise"] > 0.015, document["sentence"]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.usefixtures("users_cache")
def test_a_planted_slowdown_of_three_percent_is_found(tmp_path: Path) -> None:
    document = compared(planted(tmp_path, 0.03))
    if document["verdict"] == "slower":
        low, high = document["results"][0]["peer"]["interval_95"]
        assert low <= 1 / 1.03 <= high or abs(1 / document["results"][0]["peer"]["ratio"] - 1.03) < 0.02
    else:
        assert_noise_explains_it(document)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.usefixtures("users_cache")
def test_a_change_of_nothing_is_no_difference(tmp_path: Path) -> None:
    document = compared(planted(tmp_path, 0))
    if document["verdict"] == "no different":
        assert document["exit_code"] == 0
    else:
        assert_noise_explains_it(document)


@pytest.mark.slow
def test_a_comparison_of_recipes_without_time_measures_nothing_and_says_so(tmp_path: Path) -> None:
    recipe = write_letters(tmp_path, rollouts={"evaluation": {"num_tasks": 0}})
    arguments = ("--b", "trainer.max_tokens_per_micro_batch=256", "--max-minutes", "0", "--json")
    done = redline("compare", recipe, recipe, *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert (
        "trainer.max_tokens_per_micro_batch=256: one pair to warm up, 8 pairs of A with itself" in done.stderr.splitlines()[0]
    )
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["case"] == "compare"
    assert document["identity"]["config"]["b_overrides"] == ["trainer.max_tokens_per_micro_batch=256"]
    assert document["results"][0]["name"] == "run/step_s"
    assert document["sentence"] == "no verdict: the time was up before a pair of A and B was measured"
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.alone
def test_steps_of_a_run_are_compared_with_their_guards(tmp_path: Path) -> None:
    """With rollouts ahead of the trainer on one side: the step is the same work, and memory, reward and KL are watched."""
    recipe = write_letters(tmp_path, rollouts={"evaluation": {"num_tasks": 0}})
    arguments = (
        "--b",
        "buffer.max_lag=1",
        "--rounds",
        "4",
        "--max-pairs",
        "8",
        "--metric",
        "rollouts/completion_tokens_mean",
        "--json",
    )
    done = redline("compare", recipe, recipe, *arguments, cwd=tmp_path)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert [guard["name"] for guard in document["guards"]] == ["memory", "reward", "KL"]
    assert len(document["results"][0]["samples"]) == 8
    assert len(document["results"][0]["against_itself"]) == 8
    first = document["results"][0]["samples"][0]["rounds"]
    assert [each["first"] for each in first].count("A") == 2


@pytest.mark.slow
def test_whoever_stops_it_leaves_no_worktree_and_no_process(tmp_path: Path) -> None:
    folder = planted(tmp_path / "repository", 0)
    with started("compare", "git:HEAD~1", "git:HEAD", "--case", "trainer", *WORK, cwd=folder) as process:
        assert wait_until(lambda: len(list((folder / ".git" / "worktrees").glob("*/HEAD"))) == 2, process)
        process.terminate()
        assert process.wait(PATIENCE_S) == 130
    assert len(git(folder, "worktree", "list").splitlines()) == 1


def test_a_side_that_fails_is_named_with_what_it_said(tmp_path: Path) -> None:
    tree = tmp_path / "broken" / "src" / "redline"
    program = tree / "lab" / "compare" / "process.py"
    program.parent.mkdir(parents=True)
    shutil.copy(ROOT / "src" / "redline" / "lab" / "compare" / "process.py", program)
    (tree / "__init__.py").write_text("raise RuntimeError('a broken revision')\n")
    done = redline("compare", tmp_path / "broken", tmp_path / "broken", "--case", "trainer", cwd=tmp_path)
    assert done.returncode == 2
    assert "broken ended with exit code 1" in done.stderr
    assert "a broken revision" in done.stderr
