"""A process that holds a part of the weights reads its rows of the folder, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.small_models import CONFIGS, write_model

from redline.errors import ModelError
from redline.models.files.hf import load_decoder, unloaded_decoder
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
