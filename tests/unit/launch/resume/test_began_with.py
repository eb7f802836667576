"""A run that needs the weights it began with does not go on from others, nor any run with other data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.fakes import FakeTasks

from redline.config import Config
from redline.config.sections.tasks import FileTask
from redline.errors import ModelError, TaskError
from redline.launch.preflight import LoadedTasks
from redline.launch.resume.began_with import fingerprint, refuse_another_base, refuse_other_data, remember_base, remember_data
from redline.rollouts.tasks.files import FileTasks
from redline.telemetry import RunFolder


def write(folder: Path, change: float = 0.0) -> Path:
    folder.mkdir(exist_ok=True)
    weights = torch.arange(2**18, dtype=torch.float32) + change
    save_file({"layer": weights}, folder / "model.safetensors")
    return folder


def config(**trainer: object) -> Config:
    task = {"kind": "reasoning_gym", "dataset": "chain_sum"}
    return Config.model_validate({"model": {"path": "base"}, "rollouts": {"task": task}, "trainer": trainer})


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def test_a_fingerprint_follows_the_weights_and_not_their_place(tmp_path: Path) -> None:
    assert fingerprint(write(tmp_path / "a")) == fingerprint(write(tmp_path / "b"))
    assert fingerprint(write(tmp_path / "a")) != fingerprint(write(tmp_path / "b", change=1e-2))


@pytest.mark.parametrize("trainer", [{"lora": {"rank": 4}}, {"kl_coef": 0.01}])
def test_an_adapter_or_a_reference_needs_the_weights_it_began_with(
    run: RunFolder, tmp_path: Path, trainer: dict[str, object]
) -> None:
    remember_base(run, write(tmp_path / "base"))
    refuse_another_base(config(**trainer), run, tmp_path / "base")
    write(tmp_path / "base", change=1e-2)
    with pytest.raises(ModelError, match="not those that run began with"):
        refuse_another_base(config(**trainer), run, tmp_path / "base")


def test_a_run_whose_checkpoint_holds_all_weights_goes_on(run: RunFolder, tmp_path: Path) -> None:
    remember_base(run, write(tmp_path / "base"))
    refuse_another_base(config(), run, write(tmp_path / "base", change=1e-2))


def test_so_does_one_that_was_recorded_before_they_were_written_down(run: RunFolder, tmp_path: Path) -> None:
    refuse_another_base(config(lora={"rank": 4}), run, write(tmp_path / "base"))


# ── data ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def from_file(path: Path, text: str) -> LoadedTasks:
    path.write_text(text)
    return LoadedTasks(FileTasks(FileTask(kind="file", path=path), 0), 1, [])


def rows(*prompts: int) -> str:
    return "".join(f'{{"prompt": "{prompt} + 1", "answer": "{prompt + 1}"}}\n' for prompt in prompts)


@pytest.mark.parametrize("other", [rows(*range(30)), rows(*range(10)), rows(*range(19), 90)])
def test_a_run_does_not_go_on_with_more_fewer_or_other_questions(run: RunFolder, tmp_path: Path, other: str) -> None:
    path = tmp_path / "sums.jsonl"
    remember_data(run, from_file(path, rows(*range(20))))
    refuse_other_data(run, from_file(path, rows(*range(20))))
    with pytest.raises(TaskError, match=r"(?s)sums.jsonl: not the data that run began with.*hint: bring back the files"):
        refuse_other_data(run, from_file(path, other))


class Told(FakeTasks):
    def __init__(self, data: object) -> None:
        super().__init__()
        self.data = data

    def fingerprint(self) -> object:
        return self.data


def test_a_source_of_the_users_own_may_tell_what_its_data_is(run: RunFolder) -> None:
    remember_data(run, LoadedTasks(Told("a"), 1, []))
    refuse_other_data(run, LoadedTasks(Told("a"), 1, []))
    with pytest.raises(TaskError, match="not the data that run began with"):
        refuse_other_data(run, LoadedTasks(Told("b"), 1, []))
    with pytest.raises(TaskError, match=r"(?s)Told.fingerprint\(\) gave a int.*hint: return a text"):
        refuse_other_data(run, LoadedTasks(Told(3), 1, []))


def test_a_run_whose_data_was_not_written_down_goes_on(run: RunFolder, tmp_path: Path) -> None:
    remember_data(run, LoadedTasks(FakeTasks(), 1, []))
    assert not run.task_data.exists()
    refuse_other_data(run, from_file(tmp_path / "sums.jsonl", rows(*range(20))))
