"""A process that holds a part of the weights reads its rows of the folder, and no others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_models import CONFIGS, logits_of, random_tokens, write_model
from transformers import AutoModelForCausalLM

from redline.errors import ModelError
from redline.models.files.hf import check_folder, load_decoder, save_folder, unloaded_decoder
from redline.models.files.stored import Source, StoredWeights
from redline.trainer.parallel.place import part_rows


def test_rows_of_a_fused_parameter_lie_in_several_of_theirs() -> None:
    source = Source(("q", "k", "v"), (6, 2, 2))
    assert list(source.overlaps(0, 5)) == [("q", 0, 5)]
    assert list(source.overlaps(5, 10)) == [("q", 5, 6), ("k", 0, 2), ("v", 0, 2)]
    assert list(source.overlaps(6, 8)) == [("k", 0, 2)]
    assert list(source.overlaps(10, 10)) == []


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_that_were_read_by_themselves_are_the_whole(parts: int, tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["qwen3, biases"], seed=3)
    whole = load_decoder(tmp_path)
    empty = unloaded_decoder(tmp_path)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert torch.equal(empty.rotary_frequencies, whole.rotary_frequencies)
    stored = StoredWeights(tmp_path, empty.spec)
    for name, parameter in whole.named_parameters():
        found = []
        for part in range(parts):
            start, stop = part_rows(len(parameter), part, parts)
            found.append(torch.full((stop - start, *parameter.shape[1:]), torch.nan))
            stored.fill(name, start, found[-1])
        assert torch.equal(torch.cat(found), parameter), name
        digests = [stored.digest(name, *part_rows(len(parameter), part, parts), parameter.shape[1:]) for part in range(parts)]
        assert sum(digests) == stored.digest(name, 0, len(parameter), parameter.shape[1:])


def test_the_digest_tells_one_weight_from_another(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_model(tmp_path / str(seed), CONFIGS["llama, tied"], seed=seed)
    one, other = (StoredWeights(tmp_path / str(seed), unloaded_decoder(tmp_path / "1").spec) for seed in (1, 2))
    columns = unloaded_decoder(tmp_path / "1").embed.shape[1:]
    assert one.digest("embed", 0, 5, columns) != other.digest("embed", 0, 5, columns)


def test_rows_of_another_shape_than_the_config_says_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    stored = StoredWeights(tmp_path, unloaded_decoder(tmp_path).spec)
    with pytest.raises(ModelError, match="has rows"):
        stored.fill("embed", 0, torch.zeros(2, 3))


# ── experts, in one tensor or in one each ──────────────────────────────────────────────────────────────────────────────

MIXTURE = "qwen3_moe, some layers"


@pytest.fixture
def layouts(tmp_path: Path) -> tuple[Path, Path]:
    """The same mixture with a tensor for each expert, as on the Hub, and with all in one, as transformers 5 has them."""
    model = write_model(tmp_path / "each", CONFIGS[MIXTURE], seed=3)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    each, stacked = (load_file(tmp_path / name / "model.safetensors").keys() for name in ("each", "stacked"))
    assert "model.layers.3.mlp.experts.5.up_proj.weight" in each
    assert "model.layers.3.mlp.experts.gate_up_proj" in stacked
    assert not each & {name for name in stacked if "experts" in name}
    return tmp_path / "each", tmp_path / "stacked"


def test_both_layouts_of_experts_are_read_as_the_same_weights(layouts: tuple[Path, Path]) -> None:
    each, stacked = layouts
    assert check_folder(stacked) == check_folder(each)
    expected = dict(load_decoder(each).named_parameters())
    for name, parameter in load_decoder(stacked).named_parameters():
        assert torch.equal(parameter, expected[name]), name
    stored = [StoredWeights(folder, unloaded_decoder(folder).spec) for folder in layouts]
    for name, parameter in expected.items():
        for part in range(5):
            start, stop = part_rows(len(parameter), part, 5)
            found = torch.full((stop - start, *parameter.shape[1:]), torch.nan)
            stored[1].fill(name, start, found)
            assert torch.equal(found, parameter[start:stop]), name
            digests = {one.digest(name, start, stop, parameter.shape[1:]) for one in stored}
            assert len(digests) == 1, "which layout it is makes no other base model"


def test_what_was_read_from_either_layout_is_saved_as_the_hub_has_it_and_transformers_gives_the_same_logits(
    layouts: tuple[Path, Path], tmp_path: Path
) -> None:
    tokens = random_tokens(19, seed=4)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(layouts[0], dtype=torch.float32), tokens)
    for folder in layouts:
        save_folder(tmp_path / "saved", load_decoder(folder), folder, torch.float32)
        names = load_file(tmp_path / "saved" / "model.safetensors").keys()
        assert names == load_file(layouts[0] / "model.safetensors").keys()
        again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        torch.testing.assert_close(logits_of(again, tokens), expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    "change",
    [lambda w: w[:5], lambda w: w.transpose(1, 2).contiguous(), lambda w: w.flatten(0, 1)],
    ids=["fewer", "turned", "flat"],
)
def test_a_stack_of_experts_of_another_shape_is_refused(change, layouts: tuple[Path, Path]) -> None:  # type: ignore[no-untyped-def]
    path = layouts[1] / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.3.mlp.experts.down_proj"
    save_file({**tensors, name: change(tensors[name])}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name} (is|has rows)"):
        load_decoder(layouts[1])


@pytest.mark.parametrize("rows", [40, 60])
def test_a_weight_with_more_or_fewer_rows_than_the_config_says_is_refused(rows: int, tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    wrong = torch.zeros(rows, tensors["model.layers.0.mlp.down_proj.weight"].shape[1])
    save_file({**tensors, "model.layers.0.mlp.down_proj.weight": wrong}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"config\.json says \[48, "):
        load_decoder(tmp_path)


# ── which files are the model's ────────────────────────────────────────────────────────────────────────────────────────


def test_a_copy_of_other_weights_beside_a_model_changes_nothing(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"], seed=1)
    expected = load_decoder(tmp_path).state_dict()
    write_model(tmp_path / "earlier", CONFIGS["llama, tied"], seed=2)
    shutil.copyfile(tmp_path / "earlier" / "model.safetensors", tmp_path / "model_old.safetensors")
    found = load_decoder(tmp_path).state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_shards_that_the_index_does_not_name_are_no_part_of_the_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "whole", CONFIGS["llama, tied"], seed=1)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    expected = load_decoder(tmp_path).state_dict()
    write_model(tmp_path / "other", CONFIGS["llama, tied"], seed=2)
    shutil.copyfile(tmp_path / "other" / "model.safetensors", tmp_path / "model-00099-of-00099.safetensors")
    found = load_decoder(tmp_path).state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"index.json: unreadable"):
        load_decoder(tmp_path)


def test_two_files_with_the_same_weight_are_refused_where_nothing_says_which_is_meant(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"], seed=1)
    shutil.copyfile(tmp_path / "model.safetensors", tmp_path / "b.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"is in a.safetensors and in b.safetensors"):
        check_folder(tmp_path)


def test_a_config_with_fewer_layers_than_the_weights_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    described = json.loads((tmp_path / "config.json").read_text())
    layers = described["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(described | {"num_hidden_layers": layers - 1}))
    for use in (check_folder, load_decoder):
        with pytest.raises(ModelError, match=f"the weights have {layers} layers, config.json says {layers - 1}"):
            use(tmp_path)


def test_weights_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    path = tmp_path / "model.safetensors"
    save_file({name: weight.to(torch.int8) for name, weight in load_file(path).items()}, path, metadata={"format": "pt"})
    for use in (check_folder, load_decoder):
        with pytest.raises(ModelError, match="is stored as I8: the weights are quantized"):
            use(tmp_path)
