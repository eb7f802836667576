"""What every sink promises (`Sink` of `telemetry/sinks/sink.py`), against its real library, offline. Each is skipped where its
library is not installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.sink_runs import killed_and_resumed, make_config, tensorboard_events, wandb_history

from redline.config.installation import how_to_install
from redline.config.resolve import SINK_PACKAGES, resolve
from redline.errors import ConfigError

Series = list[tuple[int, float]]
"""Steps and values of one metric, in the order in which they are shown."""

# ── before any library ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", SINK_PACKAGES)
def test_a_sink_whose_library_is_missing_is_refused_with_the_extra_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_nothing(package: str) -> None:
        raise ModuleNotFoundError(package)

    monkeypatch.setattr(importlib.util, "find_spec", find_nothing)
    with pytest.raises(ConfigError, match=rf"telemetry.sinks has '{name}'[^\n]* is not installed") as error:
        resolve(make_config(name))
    assert error.value.hint == how_to_install(name)


def test_every_sink_of_a_recipe_has_an_extra() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    for name in SINK_PACKAGES:
        assert f"\n{name} = [" in pyproject


# ── those that keep a history ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class History:
    """A sink whose library keeps every step."""

    package: str
    settings: dict[str, Any]
    prepare: Callable[[Path, pytest.MonkeyPatch], None]
    """Have the library keep everything in this folder, which is the working folder too."""
    read: Callable[[Path, str], Series]
    """A metric of the run `demo-001`, as the library gives it back."""


def nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pass


def trackio_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(importlib.import_module(name), "TRACKIO_DIR", folder / "trackio")


def read_tensorboard(folder: Path, metric: str) -> Series:
    scalars, _ = tensorboard_events(folder / "demo-001" / "tensorboard")
    return [(step, round(value, 6)) for step, value in scalars.get(metric, [])]


def read_wandb(folder: Path, metric: str) -> Series:
    return [(row["_step"], row[metric]) for row in wandb_history(folder / "demo-001") if metric in row]


def read_trackio(folder: Path, metric: str) -> Series:
    from trackio.sqlite_storage import SQLiteStorage

    return [(row["step"], row[metric]) for row in SQLiteStorage.get_logs("redline", "demo-001") if metric in row]


def read_mlflow(folder: Path, metric: str) -> Series:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("redline").experiment_id])
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, metric)]


HISTORIES = {
    "tensorboard": History("tensorboardX", {}, nothing, read_tensorboard),
    "wandb": History("wandb", {"mode": "offline"}, nothing, read_wandb),
    "trackio": History("trackio", {}, trackio_in, read_trackio),
    "mlflow": History("mlflow", {}, lambda folder, patch: patch.delenv("MLFLOW_TRACKING_URI", raising=False), read_mlflow),
}
SLOW = {"mlflow"}
"""A new database migrates itself through every version of MLflow."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in HISTORIES])
def test_each_step_of_a_resumed_run_is_there_once_and_what_is_no_number_is_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = HISTORIES[name]
    pytest.importorskip(sink.package)
    monkeypatch.chdir(tmp_path)
    sink.prepare(tmp_path, monkeypatch)
    (tmp_path / "demo-001").mkdir()
    killed_and_resumed(tmp_path / "demo-001", make_config(name, **sink.settings))
    assert sink.read(tmp_path, "trainer/loss") == [(step, step / 10) for step in range(1, 6)]
    assert sink.read(tmp_path, "evaluation/reward_mean") == [(3, 0.5), (5, 0.5)]
    assert sink.read(tmp_path, "rollouts/reward_mean") == []


def test_every_sink_with_a_history_is_held_against_it() -> None:
    """Prometheus shows the present alone, and a collector of OpenTelemetry keeps what it likes."""
    assert SINK_PACKAGES.keys() - HISTORIES.keys() == {"prometheus", "opentelemetry"}
