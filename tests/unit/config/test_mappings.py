"""Keys that hold a mapping: one value stands for its main entry, thresholds may be off."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from redline.config import Config, load_recipe, validate
from redline.config.changes import changes
from redline.config.sections.alerts import AlertKind
from redline.errors import ConfigError

RECIPE = """\
model: {path: builtin:tiny}
rollouts: {task: {kind: import, path: letters:Letters}}
"""


def load(folder: Path, extra: str = "", *overrides: str) -> Config:
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE + extra)
    return load_recipe(recipe, overrides)


def test_a_bare_value_is_the_main_entry(tmp_path: Path) -> None:
    config = load(tmp_path, "trainer: {schedule: cosine, mismatch: token_mask}\n", "telemetry.profile=e2e")
    assert (config.trainer.schedule.kind, config.trainer.mismatch.kind) == ("cosine", "token_mask")
    assert (config.telemetry.profile.what, config.telemetry.profile.steps) == ("e2e", (3,))


def test_an_override_adds_to_a_bare_value(tmp_path: Path) -> None:
    config = load(tmp_path, "trainer: {schedule: cosine}\n", "trainer.schedule.warmup_steps=5")
    assert (config.trainer.schedule.kind, config.trainer.schedule.warmup_steps) == ("cosine", 5)


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.mismatch=token_truncate", "trainer.mismatch.low=0.5"],
        ["trainer.mismatch.low=0.5", "trainer.mismatch=token_truncate"],
    ],
)
def test_a_bare_override_changes_the_main_entry_alone(tmp_path: Path, overrides: list[str]) -> None:
    mismatch = load(tmp_path, "trainer: {mismatch: {kind: token_mask, high: 5.0}}\n", *overrides).trainer.mismatch
    assert (mismatch.kind, mismatch.low, mismatch.high) == ("token_truncate", 0.5, 5.0)


def test_every_mapping_with_a_main_entry_keeps_the_others_below_a_bare_override(tmp_path: Path) -> None:
    extra = "trainer: {schedule: {kind: cosine, warmup_steps: 2, min_ratio: 0.1}}\ntelemetry: {profile: {steps: [1, 2]}}\n"
    config = load(tmp_path, extra, "trainer.schedule=linear", "telemetry.profile=trainer")
    schedule, profile = config.trainer.schedule, config.telemetry.profile
    assert (schedule.kind, schedule.warmup_steps, schedule.min_ratio) == ("linear", 2, 0.1)
    assert (profile.what, profile.steps) == ("trainer", (1, 2))


@pytest.mark.parametrize("value", ["null", "{}"])
def test_null_and_a_mapping_replace_all_entries(tmp_path: Path, value: str) -> None:
    config = load(tmp_path, "trainer: {mismatch: {kind: token_mask, high: 5.0}}\n", f"trainer.mismatch={value}")
    assert config.trainer.mismatch == load(tmp_path).trainer.mismatch


def test_a_wrong_bare_value_is_refused_with_the_entry_it_stands_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.schedule\.kind = 'cosin'") as caught:
        load(tmp_path, "", "trainer.schedule=cosin")
    assert caught.value.hint == "did you mean cosine?"


def test_an_unknown_entry_is_refused_with_the_one_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.alerts\.kv_saturaton: unknown key") as caught:
        load(tmp_path, "", "telemetry.alerts.kv_saturaton=0.9")
    assert caught.value.hint == "did you mean telemetry.alerts.kv_saturation?"


@pytest.mark.parametrize("off", ["off", "'off'", "null", "false"])
def test_a_threshold_may_be_off(tmp_path: Path, off: str) -> None:
    """YAML reads an unquoted off as false."""
    config = load(tmp_path, f"telemetry: {{alerts: {{length_bias: {off}}}, targets: {{steps_per_hour: {off}}}}}\n")
    assert config.telemetry.alerts.off == ("length_bias",)
    assert config.telemetry.targets.steps_per_hour is None
    assert load(tmp_path, "", f"telemetry.alerts.not_finite={off}").telemetry.alerts.off == ("not_finite",)


def test_all_of_them_may_be_off(tmp_path: Path) -> None:
    config = load(tmp_path, "telemetry: {alerts: off}\n", "telemetry.targets=off")
    assert config.telemetry.alerts.off == get_args(AlertKind)
    assert set(config.telemetry.targets.model_dump().values()) == {None}


def test_on_is_the_default(tmp_path: Path) -> None:
    config = load(tmp_path, "telemetry: {alerts: {length_bias: on, stall: on}}\n")
    assert config.telemetry.alerts == validate(config.model_dump(mode="json")).telemetry.alerts
    assert (config.telemetry.alerts.length_bias, config.telemetry.alerts.stall) == (0.02, "on")


def test_one_may_be_on_where_all_are_off(tmp_path: Path) -> None:
    kinds = set(get_args(AlertKind))
    alerts = load(tmp_path, "", "telemetry.alerts=off", "telemetry.alerts.stall=on").telemetry.alerts
    assert set(alerts.off) == kinds - {"stall"}
    alerts = load(tmp_path, "telemetry: {alerts: off}\n", "telemetry.alerts.long_wait=5").telemetry.alerts
    assert (set(alerts.off), alerts.long_wait) == (kinds - {"long_wait"}, 5.0)
    assert load(tmp_path, "", "telemetry.alerts.stall=on", "telemetry.alerts=off").telemetry.alerts.off == get_args(AlertKind)


@pytest.mark.parametrize(
    ("written", "what", "hint"),
    [
        ("alerts: {long_waits: on}", "alerts.long_waits: unknown key", "did you mean telemetry.alerts.long_wait?"),
        ("alerts: {kv_use: on}", "alerts.kv_use is now telemetry.alerts.kv_saturation", "write telemetry.alerts.kv_saturation"),
        ("alerts: {off: true}", "alerts.off: no longer a key", "write off for each kind: telemetry.alerts: {length_bias: off}"),
        ("targets: {mfu_percents: on}", "targets.mfu_percents: unknown key", "did you mean telemetry.targets.mfu_percent?"),
    ],
)
def test_an_unknown_name_is_refused_where_it_is_on(tmp_path: Path, written: str, what: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"telemetry: {{{written}}}\n")
    assert caught.value.message.endswith(f": telemetry.{what}")
    assert caught.value.hint == hint


def test_a_target_without_a_default_needs_a_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mfu_percent = on: it is off by default") as caught:
        load(tmp_path, "telemetry: {targets: {mfu_percent: on}}\n")
    assert caught.value.hint == "give a number"


def test_a_threshold_out_of_its_bounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.alerts\.kv_saturation = 2: must be at most 1"):
        load(tmp_path, "", "telemetry.alerts.kv_saturation=2")


def test_a_trace_too_small_to_hold_anything_is_refused_and_none_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be at least 1048576, or 0 for no trace"):
        load(tmp_path, "", "telemetry.trace_max_bytes=1000")
    assert not load(tmp_path, "", "telemetry.trace_max_bytes=0").telemetry.trace


def test_a_threshold_that_the_recipe_has_switched_off_since_is_listed_when_the_run_goes_on(tmp_path: Path) -> None:
    run = validate(load(tmp_path).model_dump(mode="json"))
    edited = load(tmp_path, "telemetry: {alerts: {length_bias: off}}\ntrainer: {schedule: cosine}\n")
    assert changes(edited, run) == [
        "trainer.schedule.kind = 'cosine', the run has 'constant'",
        "telemetry.alerts.length_bias = null, the run has 0.02",
    ]
