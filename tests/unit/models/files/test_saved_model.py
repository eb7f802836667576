"""The folder of the trained model appears whole, or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import huggingface_hub
import pytest
from safetensors import SafetensorError
from support.small_models import CONFIGS, write_model

from redline.config import Config, validate
from redline.launch.models import LoadedModel
from redline.launch.result import save_model
from redline.models.files.hf import load_decoder
from redline.models.files.tiny import tiny_tokenizer
from redline.telemetry import RunFolder


class Killed(BaseException):
    """Stands for kill -9."""


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    source = tmp_path / "source"
    source.mkdir()
    write_model(source, CONFIGS["qwen3, biases"])
    return LoadedModel(load_decoder(source), tiny_tokenizer(), source)


@pytest.fixture
def config() -> Config:
    return validate(
        {"model": {"path": "x", "dtype": "float32"}, "rollouts": {"task": {"kind": "import", "path": "tests:Fake"}}}
    )


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_kill_while_the_model_is_saved_leaves_the_one_before(
    config: Config, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path, "run")
    save_model(config, model, None, folder, step=3)
    before = content(folder.model)
    assert {"config.json", "model.safetensors"} <= before.keys()

    def killed_half_way(state: object, target: str, **options: object) -> None:
        (Path(target) / "model.safetensors").write_bytes(b"half a mod")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "save_torch_state_dict", killed_half_way)
        with pytest.raises(Killed):
            save_model(config, model, None, folder, step=3)
    assert content(folder.model) == before
    save_model(config, model, None, folder, step=3)
    assert content(folder.model) == before
    assert not list(folder.path.glob(".model.*"))


def test_a_full_disk_is_the_error_that_the_command_line_explains(
    config: Config, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError(f"Error while serializing: I/O error: No space left on device (os error {errno.ENOSPC})")

    folder = RunFolder.create(tmp_path, "run")
    monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_model(config, model, None, folder, step=3)
    assert caught.value.errno == errno.ENOSPC
    assert not list(folder.path.glob(".model.*"))


def test_an_error_of_safetensors_that_is_not_the_disks_stays_as_it_is(
    config: Config, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: invalid header")

    monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", wrong)
    with pytest.raises(SafetensorError, match="invalid header"):
        save_model(config, model, None, RunFolder.create(tmp_path, "run"), step=3)
