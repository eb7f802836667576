"""What is proposed for a recipe, by whom it is predicted, and in which order it is tried."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from support.paths import ROOT
from support.run_folders import write_run

from redline.config import load_recipe, resolve
from redline.errors import ConfigError, SideError
from redline.lab.doctor.doctor import Diagnosis
from redline.lab.doctor.finding import Finding, Gain
from redline.lab.simulate.costs import Prompts, engine_cost, trainer_cost
from redline.lab.simulate.events import Loop, Simulator
from redline.lab.simulate.recorded import Group, Recording
from redline.lab.tune.bench import RECORDED_STEPS, ProcessBench, _whole
from redline.lab.tune.command import Asked, tune
from redline.lab.tune.proposals import proposals
from redline.lab.tune.space import Situation, changes, name_of
from redline.lab.tune.tune import Budget
from redline.runs.verdict import Bound
from redline.telemetry.console.tables import log_console

SMOKE = ROOT / "recipes" / "smoke.yaml"


def situation(*overrides: str, **facts: float) -> Situation:
    config = resolve(load_recipe(SMOKE, ["run.device=cpu", "run.num_threads=2", *overrides])).config
    return Situation(config, max_lag=1, cores=2, **{"tokens": 1500.0, "prompt_tokens": 400.0, **facts})


def names(*overrides: str) -> list[str]:
    return [name_of(change) for change in changes(situation(*overrides))]


def test_a_recipe_that_leaves_everything_open_has_little_to_try() -> None:
    found = [name for name in names() if name.startswith(("engine.", "trainer.gradient", "trainer.offload"))]
    assert found == ["engine.speculation=auto"]
    assert "buffer.max_lag=1" in names()
    assert "buffer.max_lag=1 placement.engines=1" in names()
    assert "buffer.max_lag=2" not in names("buffer.max_lag=1")


def test_guesses_are_tried_once_and_only_of_an_engine_that_makes_them() -> None:
    assert "engine.speculation=auto" not in names("engine.speculation=auto")
    assert "engine.speculation=auto" not in names("engine.tensor_parallel_size=2", "placement.engines=1")
    assert not [name for name in names("engine.kind=transformers") if "speculation" in name]


def test_a_lag_brings_rows_for_the_attempts_of_all_steps_where_each_had_one() -> None:
    """64 attempts a step: with 64 rows those of the next step would wait until this one's have ended."""
    found = names("engine.max_num_seqs=64")
    assert "buffer.max_lag=1 engine.max_num_seqs=128" in found
    assert "buffer.max_lag=1 engine.max_num_seqs=128 placement.engines=1" in found
    assert "buffer.max_lag=1" not in found
    assert "buffer.max_lag=1" in names("engine.max_num_seqs=128")
    assert "buffer.max_lag=1" in names("engine.max_num_seqs=32"), "rows are wanting as it is: that is a trial of its own"


def test_every_known_mistake_has_its_remedy_among_the_changes() -> None:
    found = names(
        "engine.max_num_seqs=8", "trainer.max_tokens_per_micro_batch=24", "trainer.gradient_checkpointing=full",
        "engine.enable_prefix_caching=false", "run.num_threads=1", "engine.max_num_batched_tokens=128",
    )  # fmt: skip
    for name in (
        "engine.max_num_seqs=64", "trainer.max_tokens_per_micro_batch=null", "trainer.gradient_checkpointing=none",
        "engine.enable_prefix_caching=true", "run.num_threads=2", "engine.max_num_batched_tokens=512", "buffer.max_lag=1",
    ):  # fmt: skip
        assert name in found


def test_sizes_that_are_alike_are_tried_once() -> None:
    assert [n for n in names("trainer.max_tokens_per_micro_batch=1800") if "micro_batch" in n] == [
        "trainer.max_tokens_per_micro_batch=null", "trainer.max_tokens_per_micro_batch=938",
        "trainer.max_tokens_per_micro_batch=469",
    ]  # fmt: skip
    assert not [n for n in names("engine.max_num_seqs=200") if "max_num_seqs" in n]


def recording() -> Recording:
    draw = Random(0)
    groups = tuple(Group(tuple(draw.randint(8, 16) for _ in range(8)), (0.0,) * 8, 10) for _ in range(100))
    steps, tokens = np.array([150, 140, 160.0]), np.array([1600, 1500, 1900.0])
    engine = engine_cost(0.01 * steps + 0.001 * tokens, steps, tokens, Prompts(0.2, 100, 1), 16)
    trainer = trainer_cost(0.2 + 0.0005 * tokens, tokens)
    config = {"engine": {"max_num_seqs": 16}, "rollouts": {"groups_per_step": 8, "group_size": 8}}
    loop = Loop(groups, engine, 1, 16, 8, 0, trainer.token_s, trainer.step_s + 0.1, 0.01, 50)
    measured = float(np.mean(Simulator(loop).run().step_s))
    return Recording(groups, engine, trainer, 0.01, 0.1, 1.0, config, np.full(10, measured))


def finding(cause: str, share: float, **change: object) -> Finding:
    keys = {key.replace("__", "."): value for key, value in change.items()}
    return Finding(cause, f"{cause}.", "why", (), Gain(share * 5, share * 10, share * 12, "if so", "training", 10.0), keys)


def diagnosed(*findings: Finding) -> Diagnosis:
    return Diagnosis("run", Bound("bound by it", ()), findings, (), wall_s=10.0, num_steps=8)


def test_the_doctor_the_simulator_and_the_planner_predict_what_each_knows() -> None:
    diagnosis = diagnosed(
        finding("micro_batch_too_small", 0.3, trainer__max_tokens_per_micro_batch=999),
        finding("cpu_bound", 0.9, rollouts__groups_per_step=16),
    )
    own = [{"engine.max_num_seqs": 32}, {"trainer.gradient_checkpointing": "none"}, {"run.num_threads": 2}]
    planned = {"trainer.gradient_checkpointing=none": 1.1}
    found = proposals(own, diagnosis, recording(), lambda change: planned.get(name_of(change)))
    by_name = {proposal.name: proposal.prediction for proposal in found}
    assert "rollouts.groups_per_step=16" not in by_name  # the algorithm's
    doctor = by_name["trainer.max_tokens_per_micro_batch=999"]
    assert doctor is not None
    assert (doctor.source, doctor.low, doctor.likely, doctor.high) == ("doctor", 1 / 0.85, 1 / 0.7, 1 / 0.64)
    simulated = by_name["engine.max_num_seqs=32"]
    assert simulated is not None
    assert simulated.source == "simulator"
    assert simulated.likely > 1
    planner = by_name["trainer.gradient_checkpointing=none"]
    assert planner is not None
    assert (planner.source, planner.likely, planner.high) == ("planner", 1.1, None)
    assert by_name["run.num_threads=2"] is None
    assert found[-1].name == "run.num_threads=2"
    likely = [proposal.prediction.likely for proposal in found if proposal.prediction]
    assert likely == sorted(likely, reverse=True)


def test_all_that_the_doctor_asks_for_is_tried_together_first_but_for_a_lag() -> None:
    asked = (
        finding("micro_batch_too_small", 0.3, trainer__max_tokens_per_micro_batch=999),
        finding("checkpointing_not_needed", 0.2, trainer__gradient_checkpointing="none"),
        finding("long_tail", 0.1, buffer__max_lag=1),
    )
    first, *others = proposals([], diagnosed(*asked), None, lambda change: None)
    assert first.change == {"trainer.max_tokens_per_micro_batch": 999, "trainer.gradient_checkpointing": "none"}
    assert first.prediction is not None
    assert first.prediction.likely == pytest.approx(1 / (1 - 0.5))
    assert first.prediction.low == pytest.approx(1 / (1 - 0.25))
    assert [name_of(each.change) for each in others] == [
        "trainer.max_tokens_per_micro_batch=999", "trainer.gradient_checkpointing=none", "buffer.max_lag=1",
    ]  # fmt: skip
    alone = proposals([], diagnosed(asked[0], asked[2]), None, lambda change: None)
    assert [len(each.change) for each in alone] == [1, 1]


def test_guesses_that_the_doctor_asks_for_are_one_trial_with_its_prediction() -> None:
    asked = finding("speculation_off", 0.3, engine__speculation="auto")
    found = proposals(changes(situation()), diagnosed(asked), None, lambda change: None)
    [own] = [each for each in found if "engine.speculation" in each.change]
    assert found[0] is own
    assert own.prediction is not None
    assert (own.prediction.source, own.prediction.likely) == ("doctor", 1 / 0.7)


@pytest.mark.parametrize(("share", "is_tried"), [(None, True), (0.1, True), (0.0, False)])
def test_guesses_are_not_tried_where_the_doctor_replayed_attempts_that_do_not_repeat(
    share: float | None, is_tried: bool
) -> None:
    gain = None if share is None else Gain(0.0, share * 10, share * 10, "if so", "generation", 10.0)
    found = proposals(changes(situation()), replace(diagnosed(), guesses=gain), None, lambda change: None)
    [own] = [each for each in found if "engine.speculation" in each.change]
    assert own.is_hopeless(0.03) is not is_tried
    assert (own.prediction is None) is (share is None)


@pytest.mark.gpu
def test_sides_share_a_gpu_only_where_their_sizes_are_given(tmp_path: Path) -> None:
    given = ("engine.kv_cache_memory_bytes=1000000", "trainer.max_tokens_per_micro_batch=512", "run.device=cuda")
    assert ProcessBench(SMOKE, given, tmp_path, max_lag=1)._fit_together({}, {})
    assert not ProcessBench(SMOKE, given[1:], tmp_path, max_lag=1)._fit_together({}, {})
    assert not ProcessBench(SMOKE, given, tmp_path, max_lag=1)._fit_together({}, {"trainer.max_tokens_per_micro_batch": None})


def test_what_the_recipes_rules_or_the_lag_refuse_is_ruled_out_with_the_reason(tmp_path: Path) -> None:
    bench = ProcessBench(SMOKE, ("run.device=cpu",), tmp_path, max_lag=1)
    assert "lag of more than 1" in bench._refusal({"buffer.max_lag": 2}, None)
    assert "rollouts.group_size = 8" in bench._refusal({"engine.max_num_seqs": 4}, None)
    assert bench._rests({})
    assert not bench._rests({"placement.engines": 1, "buffer.max_lag": 1})
    assert [bench._job(settings).lag for settings in ({}, {"buffer.max_lag": 1})] == [0, 1]


def test_recipes_whose_processes_are_elsewhere_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    asked = Asked(SMOKE, ["placement.cluster=ray"], tmp_path / "out", Budget(), 1)
    with pytest.raises(ConfigError, match=r"placement\.cluster = ray"):
        tune(asked, log_console())
    assert not (tmp_path / "out").exists()


def test_a_recording_that_was_killed_before_anything_was_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert _whole(tmp_path / "empty") is None
    assert _whole(write_run(tmp_path / "begun", 3).path) is None
    assert _whole(write_run(tmp_path / "killed", RECORDED_STEPS, closed=False).path) is None
    assert _whole(write_run(tmp_path / "whole", RECORDED_STEPS).path) is not None


def test_a_recording_of_another_recipe_in_the_same_folder_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise SideError("a process is started")

    own = ProcessBench(SMOKE, ("run.device=cpu",), tmp_path, max_lag=1, identity="a model")
    write_run(tmp_path / f"{own._name({})}-001", RECORDED_STEPS)
    monkeypatch.setattr("redline.lab.tune.bench.Child", no_process)
    assert own._recorded({}).steps == RECORDED_STEPS
    with pytest.raises(SideError, match="a process is started"):
        ProcessBench(SMOKE, ("run.device=cpu",), tmp_path, max_lag=1, identity="another model")._recorded({})


def test_a_recording_lies_in_its_folder_whatever_that_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = tmp_path / "tuned #2: [a]", list[str]()

    def no_process(command: list[str], *_: object, **__: object) -> None:
        asked.extend(json.loads(command[-1])["overrides"])
        raise SideError("a process is started")

    monkeypatch.setattr("redline.lab.tune.bench.Child", no_process)
    with pytest.raises(SideError, match="a process is started"):
        ProcessBench(SMOKE, ("run.device=cpu",), folder, max_lag=1)._recorded({})
    assert load_recipe(SMOKE, asked).run.folder == folder
