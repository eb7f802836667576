"""`model.path` as a run folder or as an adapter."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from redline.cli import app
from redline.config import resolve, validate
from redline.config.trained_step import record_step
from redline.errors import ConfigError, ModelError
from redline.models.files.hf import load_config, load_decoder
from redline.models.files.sources import is_on_hub, model_folder, small_files
from redline.models.files.tiny import write_tiny_model
from redline.models.lora.peft import tensor_name, write_adapter
from redline.serve.settings import make_settings


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "base", 0)
    return tmp_path / "base"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "letters-001"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def add_adapter(folder: Path, base: Path, layer: int = 0) -> dict[str, torch.Tensor]:
    sizes = load_config(base)
    hidden, queries = sizes.hidden_size, sizes.num_attention_heads * sizes.head_dim
    tensors = {
        tensor_name(layer, "q_proj", "A"): torch.randn(2, hidden),
        tensor_name(layer, "q_proj", "B"): torch.randn(queries, 2),
    }
    write_adapter(folder, tensors, rank=2, alpha=4, use_rslora=False, targets=["q_proj"], base=str(base))
    return tensors


def recipe(path: Path) -> dict[str, Any]:
    task = {"kind": "import", "path": "letters:Letters"}
    return {"model": {"path": str(path)}, "rollouts": {"task": task, "group_size": 2}, "run": {"device": "cpu"}}


def test_a_run_folder_stands_for_the_model_that_it_trained(run: Path, base: Path) -> None:
    shutil.copytree(base, run / "model")
    assert model_folder(str(run)) == small_files(str(run)) == run / "model"
    assert resolve(validate(recipe(run))).config.model.path == str(run / "model")
    options = {"device": "cpu", "dtype": "float32", "api_key_env": "A_KEY", "served_model_name": None}
    served = make_settings(str(run), host="127.0.0.1", port=0, **options)
    assert (model_folder(served.config.model.path), served.name) == (run / "model", str(run))


def test_a_run_without_a_model_names_its_newest_checkpoint_and_how_to_end_it(run: Path) -> None:
    for step in (4, 12):
        (run / "checkpoints" / f"step-{step:06d}").mkdir()
    for use in (lambda: model_folder(str(run)), lambda: resolve(validate(recipe(run)))):
        with pytest.raises(ConfigError, match=r"no model yet; its newest checkpoint is checkpoints/step-000012") as caught:
            use()
        assert f"redline train {run} --resume run.steps=12" in caught.value.hint


@pytest.mark.parametrize("has_adapter", [False, True])
def test_the_model_of_an_earlier_end_is_refused_like_a_missing_one(run: Path, base: Path, has_adapter: bool) -> None:
    shutil.copytree(base, run / "model")
    record_step(run / "model", 2)
    if has_adapter:
        add_adapter(run / "adapter", base)
        record_step(run / "adapter", 2)
    (run / "checkpoints" / "step-000002").mkdir()
    assert model_folder(str(run)) == small_files(str(run)) == run / "model"
    (run / "checkpoints" / "step-000031").mkdir()
    for name in ("model", "adapter") if has_adapter else ("model",):
        os.utime(run / name)  # newer than the checkpoint, as in a copy
    for use in (lambda: model_folder(str(run)), lambda: small_files(str(run)), lambda: resolve(validate(recipe(run)))):
        with pytest.raises(ConfigError, match=r"no model yet; its newest checkpoint is checkpoints/step-000031") as caught:
            use()
        assert f"redline train {run} --resume run.steps=31" in caught.value.hint
    record_step(run / "model", 31)
    assert model_folder(str(run)) == run / "model"


def test_a_model_that_does_not_say_its_step_is_told_by_its_time(run: Path, base: Path) -> None:
    shutil.copytree(base, run / "model")
    newest = run / "checkpoints" / "step-000004"
    newest.mkdir()
    os.utime(run / "model", (1000, 1000))
    os.utime(newest, (900, 900))
    assert model_folder(str(run)) == run / "model"
    os.utime(newest, (1100, 1100))
    with pytest.raises(ConfigError, match="no model yet; its newest checkpoint is checkpoints/step-000004"):
        model_folder(str(run))


def test_a_run_that_has_nothing_says_so(run: Path) -> None:
    with pytest.raises(ConfigError, match="no model, and no checkpoint either"):
        model_folder(str(run))


def test_serving_a_run_without_a_model_is_refused_before_anything_loads(run: Path) -> None:
    done = CliRunner().invoke(app, ["serve", str(run), "--port", "0"])
    assert isinstance(done.exception, ConfigError)
    assert "no checkpoint either" in str(done.exception)


def test_an_adapter_is_merged_into_its_base_once(run: Path, base: Path) -> None:
    tensors = add_adapter(run / "adapter", base)
    merged = model_folder(str(run))
    assert merged == model_folder(str(run / "adapter"))
    before, after = (load_file(folder / "model.safetensors") for folder in (base, merged))
    a, b = tensors.values()
    changed = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(after.pop(changed), before.pop(changed) + 2 * b @ a)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert small_files(str(run)) == merged
    load_decoder(merged)


def test_small_files_of_an_adapter_are_those_of_its_base(run: Path, base: Path) -> None:
    add_adapter(run / "adapter", base)
    assert small_files(str(run)) == base


def test_an_adapter_of_another_model_is_refused_and_leaves_nothing(run: Path, base: Path, tmp_path: Path) -> None:
    add_adapter(run / "adapter", base, layer=99)
    with pytest.raises(ModelError, match="has no q_proj in layer 99"):
        model_folder(str(run))
    assert list((tmp_path / "cache" / "redline" / "models").iterdir()) == []
    config = json.loads((run / "adapter" / "adapter_config.json").read_text()) | {"base_model_name_or_path": None}
    (run / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="does not name its base model"):
        small_files(str(run))


def test_training_a_run_folder_says_to_add_resume(run: Path) -> None:
    done = CliRunner().invoke(app, ["train", str(run)])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(f"{run}: a run folder, not a recipe")
    assert "add --resume" in done.exception.hint


def q_proj(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]


def test_an_adapter_whose_weights_alone_were_replaced_is_merged_again(run: Path, base: Path) -> None:
    adapter = run / "adapter"
    add_adapter(adapter, base)
    first = q_proj(model_folder(str(adapter)))
    config = adapter / "adapter_config.json"
    kept, stamp = config.read_bytes(), config.stat()
    a, b = add_adapter(adapter, base).values()
    config.write_bytes(kept)  # as a download leaves a file that has not changed
    os.utime(config, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = q_proj(model_folder(str(adapter)))
    assert not torch.equal(first, second)
    torch.testing.assert_close(second, q_proj(base) + 2 * b @ a)


def test_an_adapter_of_a_built_in_model_is_merged_into_the_one_of_its_seed(tmp_path: Path) -> None:
    add_adapter(tmp_path / "adapter", model_folder("builtin:tiny", 0))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "builtin:tiny"
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    merged = [q_proj(model_folder(str(tmp_path / "adapter"), seed)) for seed in (0, 1)]
    bases = [q_proj(model_folder("builtin:tiny", seed)) for seed in (0, 1)]
    torch.testing.assert_close(merged[1] - merged[0], bases[1] - bases[0])


def test_an_adapter_is_merged_into_the_weights_that_are_loaded_and_not_into_a_copy_beside_them(run: Path, base: Path) -> None:
    shutil.copyfile(base / "model.safetensors", base / "a_backup.safetensors")
    add_adapter(run / "adapter", base)
    merged = model_folder(str(run))
    assert not torch.equal(q_proj(merged), q_proj(base))
    assert not (merged / "a_backup.safetensors").exists()


def test_an_adapter_made_for_weights_of_other_sizes_is_refused(run: Path, base: Path) -> None:
    tensors = {
        tensor_name(0, "q_proj", "A"): torch.randn(2, 5),
        tensor_name(0, "q_proj", "B"): torch.randn(7, 2),
    }
    write_adapter(run / "adapter", tensors, rank=2, alpha=4, use_rslora=False, targets=["q_proj"], base=str(base))
    with pytest.raises(ModelError, match=r"made for model.layers.0.self_attn.q_proj.weight of \[7, 5\]"):
        model_folder(str(run))


@pytest.mark.parametrize("alpha", [None, "16"])
def test_an_adapter_that_does_not_say_its_alpha_is_refused(alpha: str | None, run: Path, base: Path) -> None:
    add_adapter(run / "adapter", base)
    config = json.loads((run / "adapter" / "adapter_config.json").read_text()) | {"lora_alpha": alpha}
    (run / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="lora_alpha is missing"):
        model_folder(str(run))


def test_weights_of_a_base_on_the_hub_are_not_looked_for_before_they_are_fetched(run: Path, base: Path) -> None:
    add_adapter(run / "adapter", base)
    assert not is_on_hub(str(run))
    assert not is_on_hub(str(base))
    assert not is_on_hub("builtin:tiny")
    assert is_on_hub("some-org/some-model")
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "some-org/some-model"
    (run / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    assert is_on_hub(str(run))


def test_a_misspelt_run_is_not_looked_for_on_the_hub(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent.parent)
    for path in ("runs/leters-001", str(run.parent / "letters-002")):
        with pytest.raises(ConfigError, match="no such run") as caught:
            resolve(validate(recipe(Path(path))))
        assert caught.value.hint == f"did you mean {Path(path).parent / 'letters-001'}?"


def test_a_cache_that_cannot_be_written_names_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()  # for root, too
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be written") as caught:
        model_folder("builtin:tiny")
    assert "XDG_CACHE_HOME" in caught.value.hint
