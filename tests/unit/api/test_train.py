"""What `redline.train` refuses, and how it reads what it is given; tests/e2e/test_python.py trains."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import ROOT

import redline
from redline.api import train as module
from redline.errors import ConfigError, RedlineError, RunFolderError
from redline.launch.checked_run import CheckedRun

SMOKE = ROOT / "recipes" / "smoke.yaml"
MAPPING = {"model": {"path": "builtin:tiny"}, "rollouts": {"task": {"kind": "reasoning_gym", "dataset": "chain_sum"}}}


def refused(recipe: Any, overrides: Any = None, *, resume: bool = False) -> RedlineError:
    with pytest.raises(RedlineError) as caught:
        redline.train(recipe, overrides, resume=resume)
    return caught.value


@pytest.mark.parametrize(
    ("recipe", "overrides", "message", "hint"),
    [
        (SMOKE.with_name("smok.yaml"), {}, "no such recipe", "did you mean"),
        (SMOKE, {"run.stepz": 3}, "run.stepz", "steps"),
        (SMOKE, {"steps": 3}, "not of the form section.key=value", "did you mean run.steps=3?"),
        (SMOKE, {"run__steps": 3}, "not of the form section.key=value", "for example run.steps=20"),
        (SMOKE, {"run.steps": "many"}, "run.steps", ""),
        (SMOKE, {"run": {"steps": 1}}, "overrides: 'run' is a section", "overrides are dotted: {'run.steps': 1}"),
        (SMOKE, {"model.path": object()}, "override model.path: object is no value of a recipe", "give text, a number"),
        ({"model": {"path": "builtin:tiny"}}, {}, "rollouts.task", ""),
        (None, {}, "None is no recipe", "give the path of a YAML file, or a mapping"),
        (5, {}, "5 is no recipe", "give the path of a YAML file, or a mapping"),
        (SMOKE, ["run.steps=1"], "overrides are list, not a mapping", 'such as {"run.steps": 20}'),
        (SMOKE, "run.steps=1", "overrides are str, not a mapping", 'such as {"run.steps": 20}'),
    ],
)
def test_a_mistake_is_an_error_with_its_fix_and_leaves_nothing(
    recipe: Any, overrides: Any, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refused(recipe, overrides)
    assert message in error.message
    assert hint in error.hint
    assert list(tmp_path.iterdir()) == []


def test_a_mapping_is_not_changed_by_its_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"model": {"path": "builtin:tiny"}, "rollouts": {"task": dict(MAPPING["rollouts"]["task"])}}
    configs = []

    def keep(config: Any) -> CheckedRun:
        configs.append(config)
        raise ConfigError("that is all")

    monkeypatch.setattr(module.start, "new_run", keep)
    refused(given, {"run.steps": 3, "run.folder": Path("a b"), "run.name": "2026", "trainer.betas": (0.9, 0.95)})
    [config] = configs
    assert (config.run.steps, config.run.folder, config.run.name) == (3, Path("a b"), "2026")
    assert config.trainer.betas == (0.9, 0.95)
    assert given == MAPPING


def test_a_run_goes_on_by_its_folder_alone(tmp_path: Path) -> None:
    assert "no such run folder" in refused(tmp_path / "none", resume=True).message
    assert isinstance(refused(tmp_path, resume=True), RunFolderError)
    assert refused(MAPPING, resume=True).hint == "give the run folder, such as runs/demo-001"
    (tmp_path / "config.json").write_text("{}")
    assert refused(tmp_path).hint.startswith("to continue the run, pass resume=True; ")


def test_inference_mode_and_another_default_dtype_are_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    folder = {"run.folder": tmp_path / "runs", "run.steps": 1}
    with torch.inference_mode():
        error = refused(SMOKE, folder)
    assert "torch is in inference mode" in error.message
    assert error.hint == "train outside torch.inference_mode()"
    torch.set_default_dtype(torch.float64)
    try:
        error = refused(SMOKE, folder)
    finally:
        torch.set_default_dtype(torch.float32)
    assert "default dtype is torch.float64" in error.message
    assert "torch.set_default_dtype(torch.float32)" in error.hint
    assert list(tmp_path.iterdir()) == []


def test_a_call_in_another_thread_is_refused() -> None:
    found: list[RedlineError] = []
    thread = threading.Thread(target=lambda: found.append(refused(SMOKE)))
    thread.start()
    thread.join()
    assert "call it in the main thread" in found[0].hint
