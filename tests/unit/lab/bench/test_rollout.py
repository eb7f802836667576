"""`redline bench rollout` on the tiny model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.fakes import trajectory

from redline.errors import ConfigError
from redline.lab.bench.cases import rollout
from redline.lab.bench.settings import make_settings
from redline.types import TrajectoryGroup

COMMON = ["device=cpu", "num_threads=1", "pairs=2", "warmup_s=0"]
SMALL = ["groups_per_step=2", "group_size=2", "max_new_tokens=4"]


def test_attempts_tokens_and_latency_are_reported_and_the_parts_are_all_of_the_time() -> None:
    settings = make_settings("rollout", ["model=builtin:tiny", *COMMON, *SMALL])
    measured = rollout.measure(settings, Console(file=io.StringIO()))  # type: ignore[arg-type]
    results = {result.name: result for result in measured.results}
    assert list(results) == ["tokens", "attempts", "time in the engine", "latency of an attempt", "time to first token"]
    for sample in results["tokens"].samples:
        assert sum(sample["part_s"].values()) / sample["seconds"] > 0.999, "and a moment before and after it"
        assert sample["attempts_per_s"] * sample["seconds"] == pytest.approx(4)
    assert 0 < results["time in the engine"].value <= 100
    latency = results["latency of an attempt"]
    assert latency.details["percentiles"]["p50"] <= latency.details["percentiles"]["p99"]
    assert [len(sample) for sample in latency.samples] == [4, 4]
    assert measured.warm_ups["redline"].seconds
    assert all(json.dumps(result.as_json(), allow_nan=False) for result in results.values())


@pytest.mark.parametrize("sizes", [["group_size=1", "max_new_tokens=1"], ["group_size=1", "max_new_tokens=3"]])
def test_one_attempt_a_task_and_one_token_an_attempt_are_measured(sizes: list[str]) -> None:
    settings = make_settings("rollout", ["model=builtin:tiny", *COMMON, "groups_per_step=3", *sizes])
    results = rollout.measure(settings, Console(quiet=True)).results  # type: ignore[arg-type]
    assert all(result.bound.value > 0 for result in results)
    if sizes[1] == "max_new_tokens=1":
        tokens, attempts = results[:2]
        assert tokens.bound.value == pytest.approx(attempts.bound.value)
        assert "3 tokens, prefill" in tokens.bound.why


def test_several_replies_of_an_attempt_have_the_bound_of_one_reply(tmp_path: Path) -> None:
    recipe = tmp_path / "guess.yaml"
    recipe.write_text(
        "model: {path: 'builtin:tiny'}\n"
        "rollouts:\n"
        "  environment: {name: guess_number}\n"
        "  groups_per_step: 2\n"
        "  group_size: 2\n"
        "  max_new_tokens: 4\n"
    )
    settings = make_settings("rollout", [*COMMON, f"recipe={recipe}"])
    results = {each.name: each for each in rollout.measure(settings, Console(quiet=True)).results}  # type: ignore[arg-type]
    latency = results["latency of a reply"]
    assert sum(map(len, latency.samples)) > 8
    assert "3 more steps" in latency.bound.why


def test_a_document_has_the_dtype_and_the_seed_of_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "letters.yaml"
    recipe.write_text(
        "run: {seed: 7}\nmodel: {path: 'builtin:tiny', dtype: bfloat16}\n"
        "rollouts: {task: {kind: import, path: 'redline.lab.material.tasks:Letters'}, groups_per_step: 2, group_size: 2,"
        " max_new_tokens: 4}\n"
    )
    used = rollout.measure(make_settings("rollout", [*COMMON, f"recipe={recipe}"]), Console(quiet=True)).settings  # type: ignore[arg-type]
    assert (used.dtype, used.seed) == ("bfloat16", 7)
    with pytest.raises(ConfigError, match="dtype is that of the recipe"):
        make_settings("rollout", [*COMMON, f"recipe={recipe}", "dtype=float32"])


def test_a_recipe_says_what_is_attempted_and_the_command_line_changes_its_sizes(tmp_path: Path) -> None:
    recipe = tmp_path / "letters.yaml"
    recipe.write_text(
        "model: {path: 'builtin:tiny'}\n"
        "rollouts:\n"
        "  task: {kind: import, path: 'redline.lab.material.tasks:Letters'}\n"
        "  groups_per_step: 3\n"
        "  group_size: 2\n"
        "  max_new_tokens: 5\n"
    )
    settings = make_settings("rollout", [*COMMON, f"recipe={recipe}", "group_size=4", "engine.max_num_seqs=7"])
    config = rollout.recipe_of(settings)  # type: ignore[arg-type]
    sizes = config.rollouts
    assert (sizes.groups_per_step, sizes.group_size, sizes.max_new_tokens) == (3, 4, 5)
    assert (config.model.path, config.engine.max_num_seqs, config.run.num_threads) == ("builtin:tiny", 7, 1)


def test_run_that_played_in_an_environment_is_refused_as_a_replay(tmp_path: Path) -> None:
    run = tmp_path / "game-001"
    run.mkdir()
    (run / "config.json").write_text(
        json.dumps({"rollouts": {"environment": {"name": "guess_number"}}, "run": {}, "engine": {}})
    )
    settings = make_settings("rollout", [*COMMON, f"replay={run}"])
    with pytest.raises(ConfigError, match="its attempts were played in an environment") as caught:
        rollout.recipe_of(settings)  # type: ignore[arg-type]
    assert "environment=NAME" in caught.value.hint


def test_sequences_of_one_attempt_count_as_one_attempt() -> None:
    sequences = [trajectory([1], [2, 3], reward=attempt, attempt=attempt) for attempt in (0, 0, 0, 1)]
    run = rollout.RolloutRun.of([TrajectoryGroup("a", sequences, np.zeros(4, dtype=np.float32))], 1.0, {})
    assert (run.attempts, run.new_tokens, run.reward) == (2, 8, 0.5)
