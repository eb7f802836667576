"""The library of planted bottlenecks: its recipes are valid, its causes known, its arithmetic right. `redline bench doctor`
runs it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from support.processes import redline

from redline.config import make_config, refuse_without_effect, resolve
from redline.errors import ConfigError
from redline.lab.doctor.doctor import RULES
from redline.lab.doctor.planted.library import Library, Outcome, Share, _judged, run_library, saved_share
from redline.lab.doctor.planted.plants import PLANTS, RECIPE


@pytest.mark.parametrize("name", PLANTS)
def test_every_plant_is_a_recipe_that_a_run_takes(name: str) -> None:
    for keys in (PLANTS[name].keys, {**PLANTS[name].keys, **(PLANTS[name].fix or {})}):
        config = make_config(RECIPE, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
        refuse_without_effect(resolve(config).config)


def test_there_are_two_dozen_plants_of_known_causes_and_healthy_runs_among_them() -> None:
    causes = [plant.cause for plant in PLANTS.values()]
    assert len([cause for cause in causes if cause]) >= 24
    assert {cause for cause in causes if cause} <= set(RULES)
    assert causes.count(None) >= 3


def finding(cause: str, likely_s: float) -> dict:
    return {"cause": cause, "title": "", "change": {}, "gain": {"low_s": 0.0, "likely_s": likely_s, "high_s": 2 * likely_s}}


def test_what_was_predicted_and_measured_are_shares_of_the_planted_run() -> None:
    before = {"findings": [finding("slow_reward", 4.0)], "neighbours_s": 0.0, "step_s": [1.0] * 10, "attempts": 100}
    after = {"findings": [], "step_s": [0.5] * 10, "attempts": 100}
    outcome = _judged("reward-waits", PLANTS["reward-waits"], before, saved_share([before, before], after), {})
    assert outcome.is_right
    assert outcome.predicted == Share(0.0, 0.4, 0.8)
    assert outcome.measured == Share(0.5, 0.5, 0.5)


def test_time_is_measured_by_attempts_that_did_not_fail() -> None:
    before, after = ({"step_s": [1.0] * 10, "attempts": count} for count in (60, 100))
    assert saved_share([before], after).likely == pytest.approx(0.4)


def test_a_machine_that_slows_down_widens_the_interval_of_what_was_measured() -> None:
    first, after, last = ({"step_s": [seconds] * 10, "attempts": 100} for seconds in (1.0, 0.6, 1.4))
    measured = saved_share([first, last], after)
    assert measured.likely == pytest.approx(0.5)
    assert (measured.low, measured.high) == (pytest.approx(0.4167, abs=1e-3), pytest.approx(0.5833, abs=1e-3))


def test_neighbours_that_were_not_planted_are_said_with_the_verdict() -> None:
    before = {"findings": [], "neighbours_s": 5.0, "step_s": [1.0] * 10, "attempts": 100}
    outcome = _judged("healthy", PLANTS["healthy"], before, None, {})
    assert outcome.is_right
    assert "up to 50% of the time" in Library([outcome]).verdict


def test_the_library_fails_where_a_tenth_is_wrong_or_a_healthy_run_has_a_finding(tmp_path: Path) -> None:
    right = [Outcome(f"p{i}", "", "slow_reward", "slow_reward", 0.0, []) for i in range(9)]
    healthy = Outcome("h", "", None, None, 0.0, [])
    wrong = Outcome("w", "", "slow_reward", "long_tail", 0.0, [])
    assert Library([*right, healthy, wrong]).exit_code == 0
    assert Library([*right[:8], healthy, wrong, wrong]).exit_code == 1
    assert Library([*right, Outcome("h", "", None, "long_tail", 0.0, [])]).exit_code == 1


def test_a_saved_library_has_its_document_and_its_picture(tmp_path: Path) -> None:
    point = Outcome("p", "", "slow_reward", "slow_reward", 0.0, [], Share(0.1, 0.2, 0.3), Share(0.15, 0.2, 0.25))
    path = Library([point]).save(tmp_path)
    assert json.loads(path.read_text())["results"][0]["is_right"]
    assert len(ET.parse(tmp_path / "doctor.svg").getroot().findall(".//{*}circle")) == 1


def test_a_plant_that_there_is_not_is_refused_with_the_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no plant"):
        run_library(["rose"], lambda line: None)


@pytest.mark.slow
def test_the_verb_runs_a_plant_and_its_fix(tmp_path: Path) -> None:
    done = redline("bench", "doctor", "reward-delayed", "--json", "--save", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [result] = json.loads(done.stdout)["results"]
    assert result["found"] == "slow_reward"
    assert result["measured"]["likely"] > 0
    assert (tmp_path / "doctor.svg").exists()
