"""Where the time of a run goes: every lane accounts for itself, and what is made slow on purpose is found under its name."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from support.paths import ROOT
from support.processes import LETTERS, REDLINE, only_run, rows, succeed, write_letters

from redline.telemetry.ledger import Ledger

DEMO = ROOT / "recipes" / "demo.yaml"
MOST_UNACCOUNTED = 0.02
SLOW_LETTERS = '''
import atexit
import json
import time
from pathlib import Path

import redline
from letters import Letters

slept = {"reward": 0.0, "pause": 0.0}
atexit.register(lambda: Path("slept.json").write_text(json.dumps(slept)))


def sleep(name, seconds):
    started = time.perf_counter()
    time.sleep(seconds)
    slept[name] += time.perf_counter() - started


class SlowLetters(Letters):
    """Scores slowly, and pauses for a while in a span of its own."""

    def score(self, task, text):
        sleep("reward", 0.06)
        with redline.span("pause"):
            sleep("pause", 0.06)
        return super().score(task, text)
'''
# How long a run must be for its ends, which no span covers, to be a small part of it: some milliseconds of the interpreter.
STEPS = 30


def run(folder: Path, max_lag: int, steps: int = STEPS, **rollouts: object) -> Ledger:
    write_letters(
        folder,
        run={"steps": steps, "checkpoint_every": 10},
        rollouts={"evaluation": {"num_tasks": 4}, **rollouts},
        buffer={"max_lag": max_lag},
    )
    succeed("train", "letters.yaml", cwd=folder)
    return Ledger.from_json(json.loads(only_run(folder).ledger.read_text()))


def totals(ledger: Ledger) -> Counter[str]:
    """ns per span, over all lanes."""
    return sum((Counter(lane.rows) for lane in ledger.lanes.values()), Counter[str]())


@pytest.mark.parametrize("max_lag", [pytest.param(0, marks=pytest.mark.slow), 2])  # test_train.py looks at a lockstep run
def test_every_lane_accounts_for_its_time(tmp_path: Path, max_lag: int) -> None:
    ledger = run(tmp_path, max_lag)
    assert ("rollouts" in ledger.lanes) == (max_lag > 0)
    if max_lag:
        assert ledger.lanes["rollouts"].rows["wait.for_evaluation"] > ledger.lanes["main"].rows["run.evaluate"]
    for name, lane in ledger.lanes.items():
        assert sum(lane.rows.values()) + lane.unaccounted_ns == lane.wall_ns, name
        assert lane.unaccounted_fraction < MOST_UNACCOUNTED, (name, lane)
    for row in rows(only_run(tmp_path).metrics):
        by_section = sum(value for key, value in row.items() if key.startswith("time/"))
        by_phase = sum(value for key, value in row.items() if key.startswith("timeline/"))
        assert by_section == pytest.approx(row["run/step_s"])
        assert by_phase == pytest.approx(row["run/step_s"])


@pytest.mark.slow
@pytest.mark.usefixtures("users_cache")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("max_lag", [0, 2])
def test_every_lane_of_the_demo_accounts_for_its_time(tmp_path: Path, max_lag: int) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [REDLINE, "train", DEMO, "run.steps=8", f"buffer.max_lag={max_lag}"]
    subprocess.run(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, check=True, timeout=1700)
    ledger = Ledger.from_json(json.loads(only_run(tmp_path).ledger.read_text()))
    assert ("rollouts" in ledger.lanes) == (max_lag > 0)
    for name, lane in ledger.lanes.items():
        assert lane.unaccounted_fraction < MOST_UNACCOUNTED, (name, lane)


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_sleep_of_known_length_is_found_under_its_name(tmp_path: Path, max_lag: int) -> None:
    (tmp_path / "slow_letters.py").write_text(SLOW_LETTERS)
    assert "class Letters" in LETTERS
    task = {"kind": "import", "path": "slow_letters:SlowLetters"}
    # Without evaluations, whose caller waits for its rewards beside the threads that compute them.
    alone = {"evaluation": {"num_tasks": 0}, "groups_per_step": 2, "group_size": 4}
    found = totals(run(tmp_path, max_lag, steps=2, task=task, **alone))
    slept = json.loads((tmp_path / "slept.json").read_text())
    assert found["user.pause"] / 1e9 == pytest.approx(slept["pause"], rel=0.02)
    # Beside its sleep a reward has a little work, for which it may have to wait until the engine's thread lets it. Beside the
    # trainer the thread that has the group makes its calls.
    scoring = "user.score" if max_lag == 0 else "rollouts.reward"
    assert 0.98 < found[scoring] / 1e9 / slept["reward"] < (1.02 if max_lag == 0 else 1.25)
