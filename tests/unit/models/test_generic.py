from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.generic_models import EXPERTS, MORE_REFUSED, MORE_ROUTED, REFUSED, ROUTED, SHAPE, SMALL, family
from support.small_models import VOCAB_SIZE, llama, logits_of, random_model, random_tokens, write_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from redline.config.sections.engine import EngineConfig
from redline.config.sections.trainer import TrainerConfig
from redline.engine import NativeEngine
from redline.errors import ModelError
from redline.kernels.segments import Segments
from redline.models.attention.packed import PackedAttention
from redline.models.files.hf import check_folder, hf_tensors, load_decoder, load_recompute_model, save_folder
from redline.models.generic import GenericDecoder
from redline.trainer import PolicyTrainer, Sampling
from redline.types import GenerateRequest, SamplingParams, TrainBatch, VersionSpan

routed = pytest.mark.parametrize("config", ROUTED.values(), ids=ROUTED.keys())
more_routed = pytest.mark.parametrize("config", MORE_ROUTED.values(), ids=MORE_ROUTED.keys())


def packed_logits(decoder: GenericDecoder, tokens: Tensor, segments: Segments | None = None) -> Tensor:
    attend = PackedAttention(segments or Segments.independent([len(tokens)]))
    return decoder.logits(decoder(tokens.long(), attend.positions_T, attend))


def assert_same_logits(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max() < 1e-4 * max(1.0, float(theirs.abs().max()))


def load(folder: Path, config: PretrainedConfig) -> tuple[GenericDecoder, PreTrainedModel]:
    """Ours, and the model that transformers wrote."""
    oracle = write_model(folder, config)
    decoder = load_decoder(folder)
    assert isinstance(decoder, GenericDecoder)
    return decoder, oracle


@torch.no_grad()
def check_logits(folder: Path, config: PretrainedConfig) -> None:
    """Alone as far as the positions go, and as attempts that share a prompt with others around."""
    decoder, oracle = load(folder, config)
    longest = random_tokens(decoder.spec.max_positions, seed=1)
    assert_same_logits(packed_logits(decoder, longest), logits_of(oracle, longest))
    prompt, other, first, second = (random_tokens(length, seed=length) for length in (7, 5, 9, 1))
    segments = Segments(np.cumsum([0, 7, 9, 5, 1]), np.array([-1, 0, -1, 0]))
    ours = packed_logits(decoder, torch.cat([prompt, first, other, second]), segments).split([7, 9, 5, 1])
    assert_same_logits(ours[2], logits_of(oracle, other))
    for attempt, found in ((first, ours[1]), (second, ours[3])):
        assert_same_logits(torch.cat([ours[0], found]), logits_of(oracle, torch.cat([prompt, attempt])))


# ── the same function ──────────────────────────────────────────────────────────────────────────────────────────────────


@routed
def test_logits_equal_those_of_transformers(config: PretrainedConfig, tmp_path: Path) -> None:
    check_logits(tmp_path, config)


@pytest.mark.slow
@more_routed
def test_logits_of_further_families_equal_those_of_transformers(config: PretrainedConfig, tmp_path: Path) -> None:
    check_logits(tmp_path, config)


def check_greedy(decoder: GenericDecoder, oracle: PreTrainedModel) -> None:
    longest = min(60, decoder.spec.max_positions)
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=4, kv_cache_memory_bytes=2**24))
    prompts = [random_tokens(length, seed=length) for length in (1, 5, 9, longest - 12)]
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    for prompt, [completion] in zip(
        prompts, engine.generate([GenerateRequest(p.numpy().astype(np.int32), sampling) for p in prompts]), strict=True
    ):
        expected = oracle.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), do_sample=False, max_new_tokens=12, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        assert completion.token_ids.tolist() == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gemma3_text", "mixtral", "deepseek_v3, other value size"])
def test_the_engine_generates_what_transformers_generates(name: str, tmp_path: Path) -> None:
    check_greedy(*load(tmp_path, ROUTED[name]))


@pytest.mark.slow
@pytest.mark.parametrize("config", (ROUTED | MORE_ROUTED).values(), ids=(ROUTED | MORE_ROUTED).keys())
def test_the_engine_generates_what_transformers_generates_for_every_family(config: PretrainedConfig, tmp_path: Path) -> None:
    check_greedy(*load(tmp_path, config))


def test_two_threads_run_one_network_at_a_time_of_their_own(tmp_path: Path) -> None:
    decoder, oracle = load(tmp_path, ROUTED["gpt2"])
    sequences = [random_tokens(length, seed=length) for length in (20, 33, 47, 60)]
    found: dict[int, Tensor] = {}

    def run(index: int) -> None:
        with torch.no_grad():
            for _ in range(10):
                found[index] = packed_logits(decoder, sequences[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(sequences))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, tokens in enumerate(sequences):
        assert_same_logits(found[index], logits_of(oracle, tokens))


def test_a_network_in_bfloat16_is_recognised_through_its_rounding(tmp_path: Path) -> None:
    _, oracle = load(tmp_path, ROUTED["mixtral"])
    decoder = load_decoder(tmp_path, dtype=torch.bfloat16)
    assert decoder.output_weight.dtype == torch.bfloat16
    tokens = random_tokens(30, seed=1)
    with torch.no_grad():
        ours, theirs = packed_logits(decoder, tokens).float(), logits_of(oracle, tokens)
    assert (ours - theirs).abs().median() < 0.05 * theirs.std()


def test_wrapping_a_network_leaves_its_weights_where_they_were() -> None:
    """They are compared in float32, and may belong to somebody else."""
    network = random_model(ROUTED["gpt2"]).bfloat16()
    before = {name: (parameter.data_ptr(), parameter.clone()) for name, parameter in network.named_parameters()}
    GenericDecoder(network)
    for name, parameter in network.named_parameters():
        assert parameter.data_ptr() == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_a_network_that_was_refused_is_still_transformers_own() -> None:
    network = random_model(REFUSED["gpt_oss"][0])
    tokens = random_tokens(20, seed=1)
    before = logits_of(network, tokens)
    with pytest.raises(ModelError):
        GenericDecoder(network)
    assert torch.equal(logits_of(network, tokens), before)


# ── what an engine must know ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_spec_says_how_large_a_cache_must_be(tmp_path: Path) -> None:
    decoder, _ = load(tmp_path, ROUTED["starcoder2, tied"])
    spec = decoder.spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 6, 2, 8)
    assert (spec.vocab_size, spec.hidden_size, spec.max_positions, spec.family) == (VOCAB_SIZE, 48, 256, "starcoder2")
    assert decoder.output_weight.shape == (VOCAB_SIZE, 48)


def test_heads_of_keys_and_values_are_padded_to_the_larger(tmp_path: Path) -> None:
    decoder, _ = load(tmp_path, ROUTED["deepseek_v3, other value size"])
    shapes = []

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        shapes.append((layer, q_THD.shape, k_TKD.shape, v_TKD.shape))
        assert q_THD.is_contiguous()
        assert not v_TKD[..., 12:].any()
        return q_THD

    decoder(random_tokens(3, seed=0), torch.arange(3), attend)
    assert decoder.spec.head_dim == 16
    assert shapes == [(layer, (3, 6, 16), (3, 6, 16), (3, 6, 16)) for layer in (0, 1)]


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (family("gemma3_text", **SMALL, sliding_window=24), 256),
        (family("gemma3_text", **SMALL, sliding_window=24, layer_types=["full_attention"] * 2), 256),
        (family("qwen2_moe", **SHAPE, **EXPERTS, shared_expert_intermediate_size=32, sliding_window=24), 256),
        (family("llama4_text", **SMALL, num_local_experts=2, intermediate_size_mlp=80, attention_chunk_size=40), 40),
    ],
    ids=["window", "window that no layer has", "window that is switched off", "chunks"],
)
def test_positions_end_where_a_layer_stops_seeing_the_first_token_for_another_reason_than_a_window(
    config: PretrainedConfig, longest: int
) -> None:
    assert GenericDecoder(random_model(config)).spec.max_positions == longest


# ── what is not the same function ──────────────────────────────────────────────────────────────────────────────────────


def check_refusal(folder: Path, config: PretrainedConfig, reason: str) -> None:
    write_model(folder, config)
    with pytest.raises(
        ModelError, match=f"family '{config.model_type}' does not run on redline's attention: .*{reason}"
    ) as caught:
        load_decoder(folder)
    assert "TransformersEngine" in caught.value.hint


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_family_that_needs_more_than_attend_is_refused_with_what_it_needs(
    config: PretrainedConfig, reason: str, tmp_path: Path
) -> None:
    check_refusal(tmp_path, config, reason)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "reason"), MORE_REFUSED.values(), ids=MORE_REFUSED.keys())
def test_further_families_that_need_more_than_attend_are_refused(config: PretrainedConfig, reason: str, tmp_path: Path) -> None:
    check_refusal(tmp_path, config, reason)


def test_a_network_that_mixes_neighbours_outside_attention_is_refused() -> None:
    network = random_model(llama())
    network.model.layers[0].register_forward_hook(lambda module, inputs, x: x + F.pad(x, (0, 0, 1, -1)))
    with pytest.raises(ModelError, match="logits of packed sequences differ"):
        GenericDecoder(network)


def test_a_network_that_knows_packed_sequences_but_keeps_more_than_keys_and_values_is_refused() -> None:
    network, starts = random_model(llama()), []

    def note(module: torch.nn.Module, inputs: tuple, named: dict) -> None:
        positions = named.get("position_ids")
        starts.append(None if positions is None else (positions == 0)[..., None])

    network.model.register_forward_pre_hook(note, with_kwargs=True)

    def mix(module: torch.nn.Module, inputs: tuple, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        return x + (before if starts[-1] is None else before.masked_fill(starts[-1], 0))

    network.model.layers[0].register_forward_hook(mix)
    with pytest.raises(ModelError, match="logits of tokens that come one at a time differ"):
        GenericDecoder(network)


def test_a_network_of_which_one_layer_scales_its_scores_by_itself_is_refused() -> None:
    """What reaches our attention is then not what reaches transformers' own."""
    network = random_model(llama(num_key_value_heads=6))
    network.model.layers[1].self_attn.scaling = 0.2
    assert GenericDecoder(network).spec.num_layers == 2, "a scale that is said is understood"
    network.config._attn_implementation = "eager"
    network.model.layers[1].self_attn.config = llama(num_key_value_heads=6, attn_implementation="sdpa")
    network.model.layers[1].self_attn.forward = lambda hidden_states, **named: (hidden_states, None)
    with pytest.raises(ModelError, match="its 2 layers ask for attention 1 times"):
        GenericDecoder(network)


# ── the head ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("gpt2", True),
        ("mixtral", True),
        ("opt", True),
        ("phi, biased head", False),
        ("cohere, scaled head", False),
        ("granite, scaled head", False),
        ("gemma2, no cap on scores", False),
    ],
)
def test_a_head_that_is_more_than_a_product_says_so(name: str, plain: bool) -> None:
    decoder = GenericDecoder(random_model(ROUTED[name]))
    assert decoder.plain_head is plain
    hidden = torch.randn(5, decoder.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(decoder.logits(hidden), hidden @ decoder.output_weight.T, atol=1e-4) is plain


@pytest.mark.parametrize(("name", "cap"), [("gemma2", 30.0), ("gemma3_text", None), ("granite, scaled head", None)])
def test_a_soft_cap_on_the_logits_is_known(name: str, cap: float | None) -> None:
    assert GenericDecoder(random_model(ROUTED[name])).logit_cap == cap


def test_a_folder_whose_head_is_capped_may_be_trained_and_one_whose_head_is_scaled_may_not(tmp_path: Path) -> None:
    write_model(tmp_path / "capped", ROUTED["gemma2"])
    assert check_folder(tmp_path / "capped") == 256
    write_model(tmp_path / "scaled", ROUTED["granite, scaled head"])
    with pytest.raises(ModelError, match=r"logits_scaling = 8\.0") as caught:
        check_folder(tmp_path / "scaled")
    assert "no bias or scale" in caught.value.hint


def test_a_window_that_the_layers_mask_does_not_have_ends_sequences() -> None:
    """Such a layer sees more, or less, than it says: our window would be another one."""
    network = random_model(llama())
    for layer in network.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, inputs, named: (inputs, {**named, "sliding_window": 24}), with_kwargs=True
        )
    decoder = GenericDecoder(network)
    assert decoder.spec.max_positions == 24
    assert all(limits.window is None for limits in decoder.limits)


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gemma3_text", "mixtral", "deepseek_v3, other value size"])
def test_gradients_through_packed_attention_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    decoder, oracle = load(tmp_path, ROUTED[name])
    sequences = [random_tokens(length, seed=length) for length in (12, 7)]
    ours = packed_logits(decoder, torch.cat(sequences), Segments.independent([12, 7]))
    torch.log_softmax(ours, dim=-1)[:, 5].sum().backward()
    for tokens in sequences:
        torch.log_softmax(oracle(tokens[None]).logits[0], dim=-1)[:, 5].sum().backward()
    expected = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    found = {name.removeprefix("network."): parameter.grad for name, parameter in decoder.named_parameters()}
    assert found.keys() == expected.keys()
    for parameter, grad in expected.items():
        assert (found[parameter] is None) == (grad is None)
        if grad is not None:
            torch.testing.assert_close(found[parameter], grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gpt2", torch.float32), ("gpt2", torch.bfloat16), ("gemma2", torch.float32), ("gemma3_text", torch.float32)],
)
def test_the_trainer_learns_from_what_the_engine_sampled(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    decoder, _ = load(tmp_path, ROUTED[name])
    trainer = PolicyTrainer(decoder, dtype, TrainerConfig(learning_rate=1e-2), Sampling())
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=4, kv_cache_memory_bytes=2**24))
    prompt = random_tokens(7, seed=1).numpy().astype(np.int32)
    [sampled] = engine.generate([GenerateRequest(prompt, SamplingParams(max_tokens=10, n=4))])
    before = {name: tensor.clone() for name, tensor in trainer.weights().tensors.items()}
    silent, advantages = np.zeros(7, np.float32), np.array([1, -1, 1, -1], np.float32)
    batch = TrainBatch(
        tokens=np.concatenate([part for one in sampled for part in (prompt, one.token_ids)]),
        cu_seqlens=np.arange(5, dtype=np.int64) * 17,
        group_offsets=np.array([0, 4]),
        loss_mask=np.tile(np.arange(17) >= 7, 4),
        old_logprobs=np.concatenate([part for one in sampled for part in (silent, one.logprobs)]),
        advantages=advantages,
        group_sequences=np.array([4]),
        group_tokens=np.array([40]),
        versions=VersionSpan(0, 0),
        version=0,
    )
    report = trainer.step(batch)
    assert report.num_tokens == 7 + 4 * 10, "the shared prompt goes through the network once"
    assert report.mismatch_kl < (1e-8 if dtype == torch.float32 else 1e-2)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in trainer.weights().tensors.items())
    [again] = engine.generate([GenerateRequest(prompt, SamplingParams(max_tokens=10, n=4))])
    assert any(one.logprobs.tolist() != other.logprobs.tolist() for one, other in zip(sampled, again, strict=True))


def test_dropout_stays_off_in_training() -> None:
    decoder = GenericDecoder(
        random_model(family("gpt2", vocab_size=VOCAB_SIZE, n_embd=48, n_layer=2, n_head=6, attn_pdrop=0.5))
    )
    tokens = random_tokens(20, seed=1)
    with torch.no_grad():
        before = packed_logits(decoder, tokens)
        assert torch.equal(packed_logits(decoder.train(), tokens), before)


def test_each_parameter_has_one_name_and_it_is_transformers_own(tmp_path: Path) -> None:
    decoder, oracle = load(tmp_path, ROUTED["starcoder2, tied"])
    assert [name for name, _ in decoder.named_parameters()] == [f"network.{name}" for name, _ in oracle.named_parameters()]


# ── folders ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["gpt2", "starcoder2, tied", "mixtral", "deepseek_v3, other value size", "opt"])
def test_a_saved_model_is_the_same_model_to_transformers(name: str, tmp_path: Path) -> None:
    decoder, oracle = load(tmp_path / "in", ROUTED[name])
    save_folder(tmp_path / "out", decoder, tmp_path / "in", torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    theirs, expected = again.state_dict(), oracle.state_dict()
    assert theirs.keys() == expected.keys()
    assert all(torch.equal(theirs[name], expected[name]) for name in expected)
    written, original = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "in" / "model.safetensors")
    assert written.keys() == original.keys()


def test_the_tensors_that_are_given_are_saved_instead_of_the_networks(tmp_path: Path) -> None:
    decoder, _ = load(tmp_path / "in", ROUTED["mixtral"])
    masters = {name: torch.full(p.shape, 1 + 2**-12) for name, p in decoder.named_parameters()}
    save_folder(tmp_path / "out", decoder, tmp_path / "in", torch.float32, masters)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == load_file(tmp_path / "in" / "model.safetensors").keys()
    assert all(bool((tensor == 1 + 2**-12).all()) for tensor in written.values())


def test_weights_are_named_as_in_the_folder_they_came_from(tmp_path: Path) -> None:
    decoder, _ = load(tmp_path, ROUTED["qwen2_moe"])
    original = load_file(tmp_path / "model.safetensors")
    named = dict(hf_tensors(decoder))
    assert named.keys() == original.keys()
    assert all(torch.equal(named[name], original[name]) for name in original)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    write_model(tmp_path, ROUTED["gpt2"])
    tensors = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("h.1.mlp.c_fc.weight"))
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack transformer\.h\.1\.mlp\.c_fc\.weight"):
        load_decoder(tmp_path)


def test_a_cut_weight_file_is_called_damaged(tmp_path: Path) -> None:
    write_model(tmp_path, ROUTED["gpt2"])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged"):
        load_decoder(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, ROUTED["gpt2"])
    family("gpt2", vocab_size=VOCAB_SIZE, n_embd=96, n_layer=2, n_head=6).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="transformers cannot load it"):
        load_decoder(tmp_path)


@pytest.mark.slow
def test_a_model_that_is_no_causal_one_is_refused(tmp_path: Path) -> None:
    family("t5", vocab_size=VOCAB_SIZE, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    save_file({"shared.weight": torch.zeros(VOCAB_SIZE, 16)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="transformers cannot load it") as caught:
        load_recompute_model(tmp_path)
    assert "causal" in caught.value.hint
