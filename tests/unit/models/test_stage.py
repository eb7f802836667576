"""A decoder in stages computes what it computes whole, with parameters of the same names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.small_models import llama, random_tokens, write_model
from transformers import GPT2Config

from redline.errors import ConfigError, ModelError
from redline.kernels.segments import Segments
from redline.models.attention.packed import PackedAttention
from redline.models.decoder import Decoder
from redline.models.files.hf import load_decoder
from redline.models.stage import check_stages, cut_stage, stage_layers


def network(folder: Path, layers: int = 5, tied: bool = True) -> Decoder:
    write_model(folder, llama(num_hidden_layers=layers, tie_word_embeddings=tied))
    decoder = load_decoder(folder)
    assert isinstance(decoder, Decoder)
    return decoder


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"), [(4, 2, [2, 2]), (5, 2, [3, 2]), (5, 3, [2, 2, 1]), (4, 3, [2, 1, 1]), (3, 3, [1, 1, 1])]
)
def test_layers_are_divided_evenly_and_the_last_stage_has_no_more_than_others(
    layers: int, stages: int, sizes: list[int]
) -> None:
    divided = stage_layers(layers, stages)
    assert [len(stage) for stage in divided] == sizes
    assert [layer for stage in divided for layer in stage] == list(range(layers))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="the model has 2 layers, and every stage needs one") as caught:
        check_stages(llama(), 3)
    assert caught.value.hint == "set it to 2 or less"


def test_a_family_that_transformers_runs_is_refused() -> None:
    with pytest.raises(ModelError, match="'gpt2' is run by transformers, and is not cut into stages"):
        check_stages(GPT2Config(), 2)


@pytest.mark.parametrize("stages", [2, 3, 5])
@torch.no_grad()
def test_stages_one_after_the_other_are_the_whole_network_to_the_bit(stages: int, tmp_path: Path) -> None:
    whole = network(tmp_path)
    tokens = random_tokens(17, seed=0)
    attend = PackedAttention(Segments.independent([9, 8]))
    stream = tokens.long()
    for index in range(stages):
        stream = cut_stage(whole, index, stages)(stream, attend.positions_T, attend)
    assert torch.equal(stream, whole(tokens.long(), attend.positions_T, attend))


@pytest.mark.parametrize("tied", [True, False])
def test_stages_have_every_parameter_under_its_name_and_share_only_a_tied_embedding(tied: bool, tmp_path: Path) -> None:
    whole = network(tmp_path, tied=tied)
    first, middle, last = (cut_stage(whole, index, 3) for index in range(3))
    names = [set(dict(stage.named_parameters())) for stage in (first, middle, last)]
    assert names[0] | names[1] | names[2] == set(dict(whole.named_parameters()))
    assert names[0] & names[2] == ({"embed"} if tied else set())
    assert not names[1] & (names[0] | names[2])
    for stage in (first, middle, last):
        assert all(parameter is whole.get_parameter(name) for name, parameter in stage.named_parameters())
        answers_for = {name for name, owner in stage.owners.items() if owner == stage.index}
        assert answers_for == names[stage.index] - ({"embed"} if stage.is_last else set())
