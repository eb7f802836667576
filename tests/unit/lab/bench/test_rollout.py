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
