"""Which process of a run this is, and what a launcher's restart means."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

import redline
from redline.config import Config, resolve, validate
from redline.config.sections.run import RunConfig
from redline.errors import ConfigError, RankLostError
from redline.launch.ranks import (
    check_gpus_for_ranks,
    check_model_for_ranks,
    check_ranks,
    closing_before_the_launcher_ends_it,
    is_follower,
    remember_launch,
    run_to_take_up,
)
from redline.launch.run import _peak_flops
from redline.telemetry import Progress, RunFolder


def recipe(**trainer: object) -> Config:
    values = {
        "run": {"device": "cpu"},
        "model": {"path": "builtin:tiny"},
        "rollouts": {"task": {"kind": "import", "path": "tests:Fake"}},
        "trainer": trainer,
    }
    return resolve(validate(values)).config


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that torchrun started, for the first time."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    return monkeypatch


def recorded_run(folder: Path) -> RunFolder:
    run = RunFolder.create(folder, "demo")
    run.config.write_text("{}")
    remember_launch(run)
    return run


def test_a_restart_takes_up_the_newest_run_of_its_launcher(launched: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = RunConfig(name="demo", folder=tmp_path)
    recorded_run(tmp_path)
    own = recorded_run(tmp_path)
    other = recorded_run(tmp_path)
    (other.path / "launch.json").write_text(json.dumps({"launch": "another"}))
    assert run_to_take_up(wanted) is None, "the first start begins a run"
    launched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    found = run_to_take_up(wanted)
    assert found is not None
    assert found.path == own.path


def test_a_restart_before_there_was_a_run_begins_one(launched: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    RunFolder.create(tmp_path, "demo")
    assert run_to_take_up(RunConfig(name="demo", folder=tmp_path)) is None


def test_without_a_launcher_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    run = recorded_run(tmp_path)
    assert not (run.path / "launch.json").exists()


@pytest.mark.parametrize(("rank", "follows"), [(None, False), ("0", False), ("3", True)])
def test_rank_0_leads(rank: str | None, follows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False) if rank is None else monkeypatch.setenv(name, "4")
    assert is_follower() is follows


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "without MASTER_ADDR and MASTER_PORT they cannot meet"),
        ({"RANK": "1", "MASTER_ADDR": "there", "MASTER_PORT": "1"}, "without WORLD_SIZE they cannot meet"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two in the environment is no number"),
    ],
)
def test_half_of_what_a_launcher_says_is_refused(
    variables: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=reason) as caught:
        is_follower()
    assert "torchrun" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": {"kind": "vllm"}}, "a process group of its own"),
        ({"trainer": {"sharding": "full", "kl_coef": 0.1, "reference_offload": True}}, "the reference is divided"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_anything_loads(
    changes: dict[str, dict[str, object]], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = recipe(**changes.get("trainer", {}))
    engine = config.engine.model_copy(update=changes.get("engine", {}))
    with pytest.raises(ConfigError, match=reason):
        check_ranks(config.model_copy(update={"engine": engine}))


def test_a_model_that_transformers_runs_is_not_divided(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="'gpt2' is run by transformers"):
        check_model_for_ranks(recipe(sharding="full"), tmp_path)


def test_engines_of_others_divide_a_model_in_their_own_way(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    config = recipe()
    engine = config.engine.model_copy(update={"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="'gpt2' is run by transformers"):
        check_model_for_ranks(config.model_copy(update={"engine": engine}), tmp_path)
    engine = engine.model_copy(update={"kind": "vllm"})
    check_model_for_ranks(config.model_copy(update={"engine": engine}), tmp_path)


def test_mfu_is_a_share_of_what_all_ranks_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe()
    config = config.model_copy(update={"telemetry": config.telemetry.model_copy(update={"peak_tflops": 2.0})})
    console = Console(file=io.StringIO())
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert _peak_flops(config, Progress(1, console=console)) == 6e12
    assert "3 times 2 TFLOP/s" in console.file.getvalue()  # type: ignore[attr-defined]


def test_heads_that_ranks_cannot_divide_are_refused_from_the_models_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 9, "model_type": "llama"}))
    check_model_for_ranks(recipe(sequence_parallel_size=3), tmp_path)
    with pytest.raises(ConfigError, match="9 attention heads cannot be divided"):
        check_model_for_ranks(recipe(sequence_parallel_size=2), tmp_path)


def test_ranks_without_a_gpu_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe()
    config = config.model_copy(update={"run": config.run.model_copy(update={"device": "cuda"})})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="each needs a GPU of its own: there is 1"):
        check_gpus_for_ranks(config)


def test_the_function_train_refuses_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="runs in one process, and 2 were started"):
        redline.train({})


@pytest.fixture
def sigterm() -> Iterator[None]:
    """As a shell leaves it."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
def test_rank_0_closes_after_an_error_though_its_launcher_ends_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RankLostError), closing_before_the_launcher_ends_it():
        raise RankLostError("rank 1 is gone", "resume")
    assert callable(signal.getsignal(signal.SIGTERM))
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # the second ends it


@pytest.mark.usefixtures("sigterm")
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_signal_ends_a_process_that_closes_without_an_error(ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with closing_before_the_launcher_ends_it():
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt), closing_before_the_launcher_ends_it():
        raise KeyboardInterrupt
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
