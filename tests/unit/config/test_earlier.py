"""Keys of earlier versions: refused in a recipe with what became of them, read in the config of a run that has begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redline.config import Config, load_recipe, read_recorded, resolve, validate
from redline.config.earlier import EARLIER, as_of_now
from redline.config.problems import locate
from redline.config.sections.environment import EnvironmentConfig
from redline.errors import ConfigError

RECORDED = Path(__file__).parent / "recorded"
"""Files that the version with 168 keys wrote: of recipes/smoke.yaml, and of a recipe that sets every key that has changed."""
VALUES: dict[str, Any] = {
    "model": {"path": "builtin:tiny"},
    "rollouts": {"task": {"kind": "import", "path": "letters:Letters"}},
}


def recipe_with(key: str, value: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(VALUES))
    place = values
    *sections, name = key.split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[name] = value
    return values


@pytest.mark.parametrize("key", EARLIER)
def test_a_key_of_an_earlier_version_is_refused_with_what_became_of_it(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(recipe_with(key, 1))
    now, advice = EARLIER[key].now, EARLIER[key].advice
    assert caught.value.message == (f"recipe: {key} is now {now}" if now else f"recipe: {key}: no longer a key")
    assert caught.value.hint == (advice or f"write {now}")


@pytest.mark.parametrize("key", [key for key, earlier in EARLIER.items() if earlier.now])
def test_the_new_name_of_a_key_is_one(key: str) -> None:
    assert locate(EARLIER[key].now.split(".")).field is not None
    assert locate(key.split(".")).field is None or key.count(".") > 1


@pytest.mark.parametrize("name", ["everything", "smoke"])
def test_a_config_that_an_earlier_version_recorded_is_read(name: str) -> None:
    path = RECORDED / f"{name}.json"
    recorded = json.loads(path.read_text())
    config = read_recorded(path)
    untouched = ("run", "model", "rollouts")
    read = config.model_dump(mode="json")
    assert EnvironmentConfig(**read["rollouts"].pop("environment")) == EnvironmentConfig(), "a section that came later"
    later = {key: read["rollouts"].pop(key) for key in ("reward_run_in", "min_workers", "worker_idle_s")}
    assert later == {"reward_run_in": "threads", "min_workers": 1, "worker_idle_s": 300.0}, "keys that came later"
    assert {section: read[section] for section in untouched} == {s: recorded[s] for s in untouched}


@pytest.mark.parametrize("name", ["everything", "smoke"])
def test_a_config_that_an_earlier_version_recorded_is_a_recipe_of_a_new_run(tmp_path: Path, name: str) -> None:
    """As the hint of `redline train RUN_FOLDER` says."""
    path = tmp_path / "config.json"
    path.write_text((RECORDED / f"{name}.json").read_text())
    config = load_recipe(path, ["run.name=again"])
    assert config.run.name == "again"
    assert (config.trainer, config.telemetry) == (read_recorded(path).trainer, read_recorded(path).telemetry)


def test_nothing_that_an_earlier_version_recorded_is_lost() -> None:
    config = read_recorded(RECORDED / "everything.json")
    schedule, mismatch, alerts = config.trainer.schedule, config.trainer.mismatch, config.telemetry.alerts
    assert (schedule.kind, schedule.warmup_steps, schedule.decay_steps, schedule.min_ratio) == ("cosine", 4, 36, 0.1)
    assert (mismatch.kind, mismatch.low, mismatch.high, mismatch.correct_lag) == ("sequence_mask", 0.5, 3.0, False)
    assert (config.telemetry.profile.what, config.telemetry.profile.steps) == ("trainer", (2, 4))
    assert (config.telemetry.trace, config.buffer.keep_trajectories) == (False, False)
    assert (config.telemetry.targets.steps_per_hour, config.telemetry.targets.mfu_percent) == (None, 30.0)
    assert config.telemetry.alert_webhook == "env:HOOK"
    assert alerts.off == ("length_bias", "dead_worker")
    assert (alerts.stalled_rollouts, alerts.long_wait, alerts.throughput_drop, alerts.staleness_rise) == (30.0, 20.0, 0.5, 1.0)
    assert (alerts.kv_saturation, alerts.host_memory_slope, alerts.reward_collapse) == (0.9, 2.0, 0.25)
    assert (alerts.not_learning, alerts.abort_storm) == (5, 0.5)


def test_a_run_that_fell_over_no_steps_had_a_constant_rate() -> None:
    config = read_recorded(RECORDED / "smoke.json")
    assert config.trainer.schedule.kind == "constant"
    assert (config.telemetry.trace_max_bytes, config.buffer.max_bytes) == (256 << 20, 8 << 30)


def test_a_config_of_this_version_stays_as_it_is(tmp_path: Path) -> None:
    config = resolve(validate(VALUES | {"trainer": {"schedule": "cosine", "mismatch": "token_mask"}})).config
    values = config.model_dump(mode="json")
    assert as_of_now(values) == values
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_recorded(tmp_path / "config.json") == Config.model_validate(values)


def test_a_kind_of_task_has_the_name_that_it_has_now() -> None:
    task = {"kind": "jsonl", "path": "/questions.jsonl", "extract": "last_number"}
    assert as_of_now({"rollouts": {"task": task}}) == {"rollouts": {"task": task | {"kind": "file"}}}


def test_the_values_that_were_given_are_not_changed() -> None:
    recorded = json.loads((RECORDED / "everything.json").read_text())
    as_of_now(recorded)
    assert recorded == json.loads((RECORDED / "everything.json").read_text())


def test_what_recipes_may_no_longer_say_is_still_read_where_a_run_has_said_it() -> None:
    recorded = recipe_with("rollouts.temperature", 1e-7)
    recorded["rollouts"]["evaluation"] = {"temperature": 2e6}
    recorded["trainer"] = {"lora": {"rank": 2, "targets": ["q_proj", "q_proj"]}}
    config = validate(as_of_now(recorded))
    assert (config.rollouts.temperature, config.rollouts.evaluation.temperature) == (1e-6, 1e6)
    assert config.trainer.lora.targets == ("q_proj",)
    assert validate(as_of_now(recipe_with("rollouts.evaluation.temperature", 0))).rollouts.evaluation.temperature == 0
