"""Runs that are replayed: their lengths come back, in a trainer bench and in a rollout bench, the same every time."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.fakes import trajectory
from support.run_folders import write_run

from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.config import resolve, validate
from redline.errors import ConfigError, RunFolderError
from redline.lab.bench.cases import rollout, trainer
from redline.lab.bench.settings import RolloutSettings, TrainerSettings, make_settings
from redline.lab.material.recorded import recorded_steps
from redline.models.sizes.flops import TrainLoad
from redline.telemetry import RunFolder
from redline.types import TrajectoryGroup

PROMPT = [5, 6, 7]


def write_recorded(path: Path, steps: Sequence[Sequence[Sequence[int]]], *, longer: int = 0) -> Path:
    """A run over letters; step → group → tokens that each attempt sampled. Each prompt of a group is `longer` than the one
    before."""
    path.mkdir()
    folder = RunFolder(path)
    recipe = {
        "run": {"device": "cpu", "num_threads": 1, "seed": 3},
        "model": {"path": "builtin:tiny", "dtype": "float32"},
        "rollouts": {
            "task": {"kind": "import", "path": "redline.lab.material.tasks:Letters"},
            "groups_per_step": len(steps[0]),
            "group_size": len(steps[0][0]),
            "max_new_tokens": 64,
            "evaluation": {"num_tasks": 0},
        },
    }
    config = resolve(validate(recipe, "a test")).config
    folder.config.write_text(json.dumps(config.model_dump(mode="json")))
    store, number = TrajectoryStore(folder.trajectories), 0
    for version, groups in enumerate(steps):
        numbers = range(number, number + len(groups))
        store.begin(numbers, version)
        for own, lengths in zip(numbers, groups, strict=True):
            prompts = [PROMPT + [8] * longer * place for place in range(len(lengths))]
            attempts = [
                trajectory(*tokens, version=version) for tokens in zip(prompts, ([9] * n for n in lengths), strict=True)
            ]
            advantages = np.linspace(-1, 1, len(lengths), dtype=np.float32)
            store.add(TrajectoryGroup(f"letters/{own}", attempts, advantages, own))
        store.lease(numbers, version)
        store.trained(numbers, version)
        number += len(groups)
    store.close()
    return path


STEPS = [[[4, 9], [2, 2]], [[7, 1], [5, 30]]]
ON_CPU = ["device=cpu", "num_threads=1"]
COMMON = [*ON_CPU, "dtype=float32"]


def test_attempts_of_several_turns_are_not_trained_on_as_one_prompt_and_one_reply(tmp_path: Path) -> None:
    run = write_recorded(tmp_path / "run", STEPS, longer=2)
    settings = make_settings("trainer", ["model=builtin:tiny", *COMMON, f"replay={run}", "peers=none"])
    assert isinstance(settings, TrainerSettings)
    with pytest.raises(RunFolderError, match="several turns"):
        trainer.Workload(settings, vocab_size=100)


def test_the_mean_prompt_of_a_round_is_that_of_the_groups_it_has(tmp_path: Path) -> None:
    """Also where a step was trained on fewer groups than the recipe says."""
    run = write_recorded(tmp_path / "run", [[[4, 9], [2, 2]], [[7, 1]]])
    settings = make_settings("rollout", [*ON_CPU, f"replay={run}", "pairs=2", "warmup_s=0"])
    assert isinstance(settings, RolloutSettings)
    stage = rollout.RolloutStage(rollout.recipe_of(settings), recorded_steps(run))
    assert [stage.run(number).groups for number in (0, 1)] == [2, 1]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_recorded(tmp_path / "run", STEPS)


def test_every_trained_step_has_its_lengths_and_groups(run: Path) -> None:
    first, second = recorded_steps(run)
    assert (first.indices, second.indices) == ((0, 1), (2, 3))
    assert first.new_tokens.tolist() == [4, 9, 2, 2]
    assert first.prompt_lengths.tolist() == [len(PROMPT)] * 4
    assert second.group_offsets.tolist() == [0, 2, 4]
    assert second.of_group(3).tolist() == [5, 30]


def test_the_load_counts_a_prompt_once_for_its_group(run: Path) -> None:
    step = recorded_steps(run)[0]
    assert step.load == TrainLoad.of(step.lengths, prompt_tokens=len(PROMPT), group_size=2)


def test_a_run_that_trained_on_nothing_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "empty", steps=1)
    with pytest.raises(RunFolderError, match="no trajectories"):
        recorded_steps(folder.path)


def test_the_trainer_gets_the_lengths_of_each_step_and_the_same_tokens_for_a_seed(run: Path) -> None:
    settings = make_settings("trainer", ["model=builtin:tiny", *COMMON, f"replay={run}", "peers=none"])
    assert isinstance(settings, TrainerSettings)
    workload, again = (trainer.Workload(settings, vocab_size=50) for _ in range(2))
    for number in range(3):
        batch, lengths = workload.batch(number), [n for group in STEPS[number % 2] for n in group]
        assert np.diff(batch.cu_seqlens).tolist() == [len(PROMPT) + length for length in lengths]
        assert batch.group_offsets.tolist() == [0, 2, 4]
        assert int(batch.loss_mask.sum()) == sum(lengths)
        np.testing.assert_array_equal(batch.tokens, again.batch(number).tokens)
        for first in batch.cu_seqlens[:-1].reshape(2, 2):
            prompts = [batch.tokens[start : start + len(PROMPT)].tolist() for start in first]
            assert prompts[0] == prompts[1], "a group shares its prompt"


@pytest.mark.slow
def test_the_trainer_trains_on_them(run: Path) -> None:
    settings = make_settings("trainer", ["model=builtin:tiny", *COMMON, f"replay={run}", "peers=none", "pairs=2", "warmup_s=0"])
    measured = trainer.measure(settings, Console(file=io.StringIO()))  # type: ignore[arg-type]
    tokens = [round(sample["redline"]["tokens_per_s"] * sample["redline"]["seconds"]) for sample in measured.results[0].samples]
    assert tokens == [sum(len(PROMPT) + n for group in STEPS[step] for n in group) for step in (1, 0)]


@pytest.mark.slow
def test_rollouts_are_as_long_as_they_were_and_the_same_for_a_seed(run: Path) -> None:
    settings = make_settings("rollout", [*ON_CPU, f"replay={run}", "pairs=2", "warmup_s=0"])
    assert isinstance(settings, RolloutSettings)
    results = [rollout.measure(settings, Console(file=io.StringIO())).results for _ in range(2)]
    lengths = [sum(n for group in STEPS[step] for n in group) for step in (1, 0)]
    assert [sample["new_tokens"] for sample in results[0][0].samples] == lengths
    rewards = [[sample["reward"] for sample in each[0].samples] for each in results]
    assert rewards[0] == rewards[1]
    assert len(set(rewards[0])) == 2


def test_each_attempt_has_its_own_length_and_its_own_randomness(run: Path) -> None:
    config = rollout.recipe_of(make_settings("rollout", [*ON_CPU, f"replay={run}"]))  # type: ignore[arg-type]
    stage = rollout.RolloutStage(config, recorded_steps(run))
    stage._rollouts.begin(stage._indices(1), 0)
    groups = stage._rollouts.finished()
    assert [[t.num_completion_tokens for t in group.trajectories] for group in groups] == STEPS[1]
    last = [t.token_ids[-n:].tolist() for t, n in zip(groups[1].trajectories, STEPS[1][1], strict=True)]
    assert last[1][: len(last[0])] != last[0]


def test_sizes_belong_to_the_run(run: Path) -> None:
    with pytest.raises(ConfigError, match="its sizes are those of the run"):
        make_settings("trainer", [f"replay={run}", "tokens=5"])
    with pytest.raises(ConfigError, match="its sizes are those of the run"):
        make_settings("rollout", [f"replay={run}", "group_size=4"])
    with pytest.raises(ConfigError, match="recipe and replay both say"):
        make_settings("rollout", [f"replay={run}", "recipe=x.yaml"])
