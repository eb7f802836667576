"""`redline bench e2e --against trl`: who takes turns with us, and what is said of both."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from rich.console import Console
from support.fakes import trajectory

from redline.config.sections.engine import EngineConfig
from redline.errors import CompareError, ConfigError
from redline.lab.bench.cases import e2e_against
from redline.lab.bench.settings import E2ESettings, make_settings
from redline.lab.bench.table import render
from redline.lab.evidence.document import Document
from redline.lab.peers.trl_process import reward_letters, reward_sums
from redline.lab.peers.trl_side import TrlSide
from redline.types import TrajectoryGroup

SMALL = ["model=builtin:tiny", "device=cpu", "num_threads=1", "groups_per_step=2", "group_size=2", "max_new_tokens=4"]
STAND_IN = """#!{python}
import json, sys
work = json.loads(sys.argv[3])
tasks = json.load(open(work["tasks"]))
print(json.dumps({{"ready": "9.9"}}), flush=True)
for number, line in enumerate(sys.stdin):
    if number == {steps}:
        sys.exit("no more")
    groups = work["groups_per_step"]
    assert tasks[number * groups]["prompt"][-1]["content"].startswith("Letters, %d of" % (number * groups))
    print(json.dumps({{"step_s": 4.0, "rollouts_s": 3.0, "reward": 0.5, "mean_tokens": 4.0}}), flush=True)
"""


def stand_in(folder: Path, steps: int = 1000) -> Path:
    """Speaks as `trl_process.py` does, and trains nothing."""
    program = folder / "python"
    program.write_text(STAND_IN.format(python=sys.executable, steps=steps))
    program.chmod(0o755)
    return program


def settings(folder: Path, *overrides: str, steps: int = 1000) -> E2ESettings:
    python = stand_in(folder, steps)
    made = make_settings("e2e", [*SMALL, "pairs=6", "against=trl", f"trl_python={python}", "warmup_s=0", *overrides])
    assert isinstance(made, E2ESettings)
    return made


def test_steps_are_compared_whole_and_in_their_two_parts(tmp_path: Path) -> None:
    measured = e2e_against.measure(settings(tmp_path), Console(file=io.StringIO()))
    results = {result.name: result for result in measured.results}
    assert list(results) == [
        "a step",
        "rollouts",
        "trainer",
        "samples",
        "a million samples",
        "a step, per token of an attempt",
    ]
    assert [results[name].peer.value for name in ("a step", "rollouts", "trainer")] == [4.0, 3.0, 1.0]
    assert results["samples"].peer.value == 4 * 3600 / 4.0
    assert measured.peers == {"trl": "9.9"}
    assert measured.warm_ups.keys() == {"redline", "trl"}
    for sample in results["a step"].samples:
        ours = sample["redline"]
        assert 0 < ours["rollouts_s"] < ours["step_s"]
        assert 0 < ours["least_rollouts_s"] < ours["rollouts_s"]
        assert 0 <= ours["least_trainer_s"] < ours["step_s"] - ours["rollouts_s"]
    assert all(json.dumps(result.as_json(), allow_nan=False) for result in results.values())


def test_every_figure_of_a_step_is_at_the_same_fraction_of_its_rounds_bounds(tmp_path: Path) -> None:
    """Answers of other lengths have another bound, and medians of different things are of different rounds."""
    results = {r.name: r for r in e2e_against.measure(settings(tmp_path), Console(file=io.StringIO())).results}
    step = results["a step"]
    runs = [sample["redline"] for sample in step.samples]
    least = [run["least_rollouts_s"] + run["least_trainer_s"] for run in runs]
    assert list(step.fractions) == pytest.approx([bound / run["step_s"] for bound, run in zip(least, runs, strict=True)])
    for name in ("samples", "a million samples", "a step, per token of an attempt"):
        assert results[name].fraction_of_bound == pytest.approx(step.fraction_of_bound)
    assert step.as_json()["fractions_of_bound"] == list(step.fractions)


def test_the_bound_counts_the_prompts_the_steps_of_the_longest_answer_and_each_answers_tokens() -> None:
    groups = [
        TrajectoryGroup(
            f"letters/{index}", [trajectory([5, 6, 7], [9] * length) for length in lengths], np.zeros(2, np.float32)
        )
        for index, lengths in enumerate(((2, 9), (4, 5)))
    ]
    load = e2e_against.load_of(groups, EngineConfig(max_num_seqs=8))
    assert (load.prompts, load.prompt_tokens, load.n) == (2, 3, 2)
    assert (load.tokens, load.steps) == (20, 8)
    assert load.rows == pytest.approx(16 / 8)
    assert not load.guesses
    assert e2e_against.load_of(groups, EngineConfig(speculation="auto")).guesses


def test_both_sides_take_as_many_steps_before_the_first_pair(tmp_path: Path) -> None:
    """The peer is known to be warm at its third step at the earliest; the other side may be before or after it."""
    console = Console(file=io.StringIO(), width=300)
    measured = e2e_against.measure(settings(tmp_path, "warmup_s=60", "pairs=2"), console)
    ours, theirs = (measured.warm_ups[name] for name in ("redline", "trl"))
    assert len(ours.seconds) == len(theirs.seconds) >= 3


def test_a_side_that_had_not_settled_is_named_beside_every_ratio(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=300)
    made = settings(tmp_path, "pairs=2")
    document = Document.of("e2e", "cpu", e2e_against.measure(made, console))
    assert "trl has not settled after 1 steps" in console.file.getvalue()
    assert all(result["peer"]["not_settled"] == ["redline", "trl"] for result in document.as_json()["results"])
    console.print(render(document))
    assert console.file.getvalue().count("not settled: redline, trl") == len(document.results)


def test_all_cores_work_for_both_and_nobody_is_ahead(tmp_path: Path) -> None:
    made = settings(tmp_path, "num_threads=2")
    assert made.lags == (0,)
    assert e2e_against.recipe(made, 0, 0).run.num_threads == 2


def test_a_peer_that_ends_is_told_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match="no more"):
        e2e_against.measure(settings(tmp_path, steps=2), Console(file=io.StringIO()))


def test_a_peer_that_cannot_start_is_told_with_an_environment_that_can(tmp_path: Path) -> None:
    with pytest.raises(CompareError) as caught:
        TrlSide(Path(sys.executable), [], {"model": str(tmp_path)}, num_threads=1)
    assert "trl==" in caught.value.hint


def test_no_such_python_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        make_settings("e2e", [*SMALL, "against=trl", "trl_python=/nowhere/python"])
    with pytest.raises(ConfigError, match="lengths has no effect with --against trl"):
        make_settings("e2e", [*SMALL, "against=trl", "lengths=log-normal"])


def test_both_sides_reward_the_same() -> None:
    said = [[{"role": "assistant", "content": text}] for text in ("ab1", "", "It is 12, no: -3", "1,000")]
    assert reward_letters(said) == pytest.approx([2 / 3, 0, 6 / 16, 0])
    assert reward_sums(said, answer=["1", "2", "-3", "1000"]) == [1.0, 0.0, 1.0, 1.0]


@pytest.mark.slow
def test_trl_itself_takes_turns() -> None:
    pytest.importorskip("trl")
    made = make_settings("e2e", [*SMALL, "pairs=1", "against=trl", "warmup_s=0"])
    measured = e2e_against.measure(made, Console(file=io.StringIO()))  # type: ignore[arg-type]
    assert measured.results[0].peer.value > 0


def test_a_step_of_trl_ends_with_the_benchmark_that_was_killed() -> None:
    child = """
import os, threading, time
from redline.lab.peers.trl_process import end_with_parent
threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
print(os.getpid(), flush=True)
time.sleep(60)
"""
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    deadline = time.monotonic() + 20
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)
