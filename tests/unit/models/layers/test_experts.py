"""A mixture of experts against transformers' own, in float32: gradients, samples, shards, and what routers are seen to do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from support.small_models import CONFIGS, EXPERTS, SHAPE, logits_of, random_tokens, write_model
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig

from redline.config.sections.engine import EngineConfig, ServedEngineConfig
from redline.config.sections.lora import LoraConfig
from redline.config.sections.trainer import TrainerConfig
from redline.engine import NativeEngine
from redline.engine.native.lora import make_bank
from redline.errors import ModelError
from redline.kernels.segments import Segments
from redline.models.attention.packed import PackedAttention
from redline.models.decoder import Decoder
from redline.models.files.hf import load_decoder, load_sharing_model, network_tensors
from redline.models.layer_code import Checkpointing
from redline.models.layers import experts as module
from redline.models.layers.experts import Experts, grouped_product
from redline.models.layers.routing_notes import RoutingNotes, summary
from redline.models.lora.trainable import add_adapter
from redline.models.parallel import Shard, shard_decoder, shard_spec
from redline.models.sizes.flops import NetworkCost
from redline.models.spec import ExpertsSpec, spec_from_config
from redline.trainer import PolicyTrainer, Sampling
from redline.types import GenerateRequest, SamplingParams, TrainBatch, VersionSpan

MIXTURES = ["qwen3_moe", "qwen3_moe, some layers"]


def load(folder: Path, name: str = MIXTURES[0]) -> tuple[Decoder, PreTrainedModel]:
    """Ours, and the model that transformers wrote."""
    oracle = write_model(folder, CONFIGS[name])
    decoder = load_decoder(folder)
    assert isinstance(decoder, Decoder)
    return decoder, oracle


def packed_logits(decoder: Decoder, tokens: Tensor, segments: Segments) -> Tensor:
    attend = PackedAttention(segments)
    return decoder.logits(decoder(tokens, attend.positions_T, attend))


# ── the shape ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_layers_have_experts_where_the_config_says_so() -> None:
    def sparse(**changes: object) -> tuple[int, ...]:
        spec = spec_from_config(Qwen3MoeConfig(**{**SHAPE, "num_hidden_layers": 6}, **EXPERTS, **changes))
        return () if spec.experts is None else spec.experts.layers

    assert sparse() == (0, 1, 2, 3, 4, 5)
    assert sparse(decoder_sparse_step=2) == (1, 3, 5)
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[3]) == (1, 5)
    assert sparse(mlp_only_layers=list(range(6))) == ()


def test_positions_end_where_a_window_that_is_switched_on_does() -> None:
    assert spec_from_config(Qwen3MoeConfig(**SHAPE, **EXPERTS, sliding_window=24)).max_positions == 256
    assert spec_from_config(Qwen3MoeConfig(**SHAPE, **EXPERTS, sliding_window=24, use_sliding_window=True)).max_positions == 24


def test_experts_that_a_token_does_not_go_to_cost_it_nothing(tmp_path: Path) -> None:
    decoder, _ = load(tmp_path, "qwen3_moe, some layers")
    cost = NetworkCost.of(decoder)
    one_expert = 3 * 48 * 32
    assert cost.idle_params == (6 - 3) * one_expert, "one of the four layers has experts"
    everything = sum(p.numel() for p in decoder.parameters()) - decoder.embed.numel()
    assert cost.body_params + cost.idle_params + cost.head_params == everything
    assert cost.weight_bytes(1) == 4 * (everything - cost.idle_params)
    assert cost.weight_bytes(1000) == 4 * everything


def test_a_step_reads_the_experts_that_its_tokens_go_to_between_them(tmp_path: Path) -> None:
    """Counted: rows that choose three of six experts by chance, ten thousand times."""
    decoder, _ = load(tmp_path, "qwen3_moe, some layers")
    cost, draw = NetworkCost.of(decoder), np.random.default_rng(0)
    for rows in (1, 2, 4):
        chosen = draw.random((10_000, rows, 6)).argsort(-1)[..., :3].reshape(10_000, -1)
        reached = float(np.mean([len(set(row)) for row in chosen.tolist()]))
        assert (cost.weight_bytes(rows) - cost.weight_bytes(1)) / 4 == pytest.approx(
            (reached - 3) * 3 * 48 * 32, rel=0.02, abs=1
        )


# ── gradients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("checkpointing", get_args(Checkpointing))
@pytest.mark.parametrize("name", MIXTURES)
def test_gradients_of_packed_attempts_equal_those_of_transformers(
    name: str, checkpointing: Checkpointing, tmp_path: Path
) -> None:
    decoder, oracle = load(tmp_path, name)
    decoder.recompute_in_backward(checkpointing)
    prompt, *attempts = (random_tokens(length, seed=length) for length in (7, 9, 4))
    segments = Segments(np.cumsum([0, 7, 9, 4]), np.array([-1, 0, 0]))
    ours = packed_logits(decoder, torch.cat([prompt, *attempts]), segments).log_softmax(dim=-1)[:, 5].split([7, 9, 4])
    (2 * ours[0].sum() + ours[1].sum() + ours[2].sum()).backward()
    for attempt in attempts:
        oracle(torch.cat([prompt, attempt])[None]).logits[0].log_softmax(dim=-1)[:, 5].sum().backward()
    grads = {name: parameter.grad for name, parameter in decoder.named_parameters() if parameter.grad is not None}
    assert grads.keys() == dict(decoder.named_parameters()).keys()
    found = network_tensors(decoder, grads)
    expected = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    assert found.keys() == expected.keys()
    for parameter, grad in expected.items():
        assert grad is not None
        torch.testing.assert_close(found[parameter], grad, rtol=1e-3, atol=2e-5 * float(grad.abs().max()))


def test_a_grouped_product_is_the_product_of_each_group() -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(9, 5, requires_grad=True), torch.randn(4, 3, 5, requires_grad=True)
    ends, out_grad = torch.tensor([2, 2, 8, 9], dtype=torch.int32), torch.randn(9, 3)
    grouped_product(x, weights, ends).backward(out_grad)
    own = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
    expected = torch.cat([own[0][:2] @ own[1][0].T, own[0][2:8] @ own[1][2].T, own[0][8:] @ own[1][3].T])
    torch.testing.assert_close(grouped_product(x, weights, ends), expected)
    expected.backward(out_grad)
    assert own[1].grad is not None
    torch.testing.assert_close(x.grad, own[0].grad)
    torch.testing.assert_close(weights.grad, own[1].grad)
    assert not own[1].grad[1].any(), "no row went to the second"


# ── sampling ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MIXTURES)
def test_the_engine_generates_what_transformers_generates(name: str, tmp_path: Path) -> None:
    decoder, oracle = load(tmp_path, name)
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=4, kv_cache_memory_bytes=2**24))
    prompts = [random_tokens(length, seed=length) for length in (1, 9, 40)]
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    for prompt, [completion] in zip(
        prompts, engine.generate([GenerateRequest(p.numpy().astype(np.int32), sampling) for p in prompts]), strict=True
    ):
        tokens = torch.cat([prompt, torch.from_numpy(completion.token_ids).long()])
        logprobs = logits_of(oracle, tokens)[len(prompt) - 1 : -1].log_softmax(dim=-1)
        assert completion.token_ids.tolist() == logprobs.argmax(dim=-1).tolist()
        torch.testing.assert_close(torch.from_numpy(completion.logprobs), logprobs.amax(dim=-1), rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of the interpreter's infinities
def test_the_kernels_sample_what_torch_computes(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, which multiplies float16 but not bfloat16."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    experts = Experts(32, ExpertsSpec(count=6, per_token=3, intermediate_size=16, normalized=True, layers=(0,))).half()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(tokens, 32).half()
    expected = experts(x)
    monkeypatch.setattr(module, "kernels_serve", lambda _: True)
    torch.testing.assert_close(experts(x), expected, rtol=5e-3, atol=5e-3)


def test_transformers_network_runs_on_our_tensors(tmp_path: Path) -> None:
    decoder, oracle = load(tmp_path, "qwen3_moe, some layers")
    shared = load_sharing_model(tmp_path, decoder)
    experts = shared.model.layers[3].mlp.experts
    ours = decoder.layers[3].experts
    assert isinstance(ours, Experts)
    assert experts.gate_up_proj.data_ptr() == ours.gate_up.data_ptr()
    assert experts.down_proj.data_ptr() == ours.down.data_ptr()
    tokens = random_tokens(20, seed=1)
    assert torch.equal(logits_of(shared, tokens), logits_of(oracle, tokens))


# ── divided, and adapted ───────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def test_the_parts_of_a_layer_of_experts_add_up_to_it(tmp_path: Path) -> None:
    decoder, _ = load(tmp_path)
    whole = decoder.layers[0].experts
    assert isinstance(whole, Experts)
    x = torch.randn(11, 48, generator=torch.Generator().manual_seed(0))
    parts = [shard_decoder(decoder, Shard(rank, 2), "cpu", lambda x: x).layers[0].experts for rank in range(2)]
    assert all(isinstance(part, Experts) and part.spec.intermediate_size == 16 for part in parts)
    torch.testing.assert_close(sum(part(x) for part in parts), whole(x))


def test_experts_that_ranks_cannot_divide_are_refused(tmp_path: Path) -> None:
    decoder, _ = load(tmp_path)
    spec = replace(decoder.spec, experts=replace(decoder.spec.experts, intermediate_size=31))
    with pytest.raises(ModelError, match="31 inner columns of an expert cannot be divided among 2 ranks"):
        shard_spec(spec, 2)


def test_an_adapter_beside_experts_is_refused(tmp_path: Path) -> None:
    decoder, _ = load(tmp_path)
    with pytest.raises(ModelError, match=r"trainer\.lora: model family 'qwen3_moe' has experts") as caught:
        add_adapter(decoder, LoraConfig(rank=2), torch.float32, seed=0)
    assert "trainer.lora.rank=0" in caught.value.hint
    with pytest.raises(ModelError, match=r"engine\.max_loras = 1: .* has experts"):
        make_bank(decoder, ServedEngineConfig(max_loras=1))


def test_experts_without_tokens_have_no_gradient_where_torch_leaves_what_the_memory_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def grouped(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        """torch's on Blackwell: of columns of `a` and rows of `b`, a product for each group, and nothing for an empty one."""
        begins, ends = [0, *offs.tolist()[:-1]], offs.tolist()
        if b.dim() == 3:
            return torch.cat([a[i:j] @ b[x] for x, (i, j) in enumerate(zip(begins, ends, strict=True))])
        nothing = torch.full((len(a), b.shape[1]), torch.nan)
        return torch.stack([a[:, i:j] @ b[i:j] if j > i else nothing for i, j in zip(begins, ends, strict=True)])

    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(4, 16, 8, requires_grad=True)
    ends = torch.tensor([0, 4, 4, 6], dtype=torch.int32)
    expected = torch.autograd.grad(grouped_product(x, weight, ends).square().sum(), (x, weight))
    monkeypatch.setattr(torch, "_grouped_mm", grouped)
    monkeypatch.setattr(module, "_torch_groups", lambda *_: True)
    monkeypatch.setattr(module, "_zeroes_empty_groups", lambda _: False)
    found = torch.autograd.grad(grouped_product(x, weight, ends).square().sum(), (x, weight))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert not found[1][0].any()
    assert not found[1][2].any()


# ── what routers do ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_even_and_uneven_routing_are_told_apart() -> None:
    def assert_is(found: Tensor, *expected: float) -> None:
        torch.testing.assert_close(found, torch.tensor([*expected, math.nan], dtype=torch.float64), equal_nan=True)

    even = RoutingNotes(4, torch.device("cpu"))
    even.add(torch.full((8, 4), 0.25), torch.arange(4).repeat(4).view(8, 2))
    assert_is(summary(even.sums[None]), 0.25, 1.0, math.log(4))
    one = RoutingNotes(4, torch.device("cpu"))
    one.add(torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 3), torch.ones(3, 1, dtype=torch.int64))
    assert_is(summary(one.sums[None]), 1.0, 4.0, 0.0)
    assert_is(summary(torch.stack([even.sums, one.sums])), 0.625, 2.5, math.log(4) / 2)


def test_only_passes_with_gradients_are_noted(tmp_path: Path) -> None:
    experts = Experts(8, ExpertsSpec(count=4, per_token=2, intermediate_size=4, normalized=True, layers=(0,)))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    experts.notes = RoutingNotes(4, torch.device("cpu"))
    with torch.no_grad():
        experts(torch.randn(3, 8))
    assert not experts.notes.sums.any()
    experts(torch.randn(5, 8))
    assert experts.notes.sums[:4].sum() == 5 * 2
    assert experts.notes.sums[-3] == 5


def batch_of(engine: NativeEngine, prompt: np.ndarray) -> TrainBatch:
    [sampled] = engine.generate([GenerateRequest(prompt, SamplingParams(max_tokens=10, n=4))])
    unsampled = np.zeros(len(prompt), np.float32)
    length = len(prompt) + 10
    return TrainBatch(
        tokens=np.concatenate([part for one in sampled for part in (prompt, one.token_ids)]),
        cu_seqlens=np.arange(5, dtype=np.int64) * length,
        group_offsets=np.array([0, 4]),
        loss_mask=np.tile(np.arange(length) >= len(prompt), 4),
        old_logprobs=np.concatenate([part for one in sampled for part in (unsampled, one.logprobs)]),
        advantages=np.array([1, -1, 1, -1], np.float32),
        group_sequences=np.array([4]),
        group_tokens=np.array([40]),
        versions=VersionSpan(0, 0),
        version=0,
    )


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_trainer_learns_from_what_the_engine_sampled_and_says_what_the_routers_did(
    checkpointing: Checkpointing, tmp_path: Path
) -> None:
    decoder, oracle = load(tmp_path)
    config = TrainerConfig(learning_rate=1e-2, gradient_checkpointing=checkpointing)
    trainer = PolicyTrainer(decoder, torch.float32, config, Sampling())
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=4, kv_cache_memory_bytes=2**24))
    prompt = random_tokens(7, seed=1).numpy().astype(np.int32)
    batch = batch_of(engine, prompt)
    before = {name: tensor.clone() for name, tensor in trainer.weights().tensors.items()}
    report = trainer.step(batch)
    assert report.mismatch_kl < 1e-8
    changed = [name for name, tensor in trainer.weights().tensors.items() if not torch.equal(tensor, before[name])]
    assert len(changed) == len(before)
    expected = routing_of(oracle, batch)
    assert report.extra["router_entropy"] == pytest.approx(expected[0], rel=1e-4)
    assert report.extra["router_busiest"] == pytest.approx(expected[1], rel=1e-4)
    assert 1 / 6 <= report.extra["router_busiest"] <= 1
    again = trainer.step(batch)
    assert again.extra["router_entropy"] != report.extra["router_entropy"], "of each step anew"


def test_a_step_without_signal_says_nothing_of_routers(tmp_path: Path) -> None:
    decoder, _ = load(tmp_path)
    trainer = PolicyTrainer(decoder, torch.float32, TrainerConfig(), Sampling())
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=4, kv_cache_memory_bytes=2**24))
    sampled = batch_of(engine, random_tokens(7, seed=1).numpy().astype(np.int32))
    nothing = replace(
        sampled,
        tokens=sampled.tokens[:0],
        cu_seqlens=sampled.cu_seqlens[:1],
        group_offsets=sampled.group_offsets[:1],
        loss_mask=sampled.loss_mask[:0],
        old_logprobs=sampled.old_logprobs[:0],
        advantages=sampled.advantages[:0],
    )
    assert not [name for name in trainer.step(nothing).extra if name.startswith("router")]


@torch.no_grad()
def routing_of(oracle: PreTrainedModel, batch: TrainBatch) -> tuple[float, float]:
    """Mean entropy and busiest share over what a step computes: the prompt once, then each attempt's own tokens."""
    logits: list[list[Tensor]] = [[], []]
    for number, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        tokens = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        for layer, found in enumerate(oracle(tokens[None], output_router_logits=True).router_logits):
            logits[layer].append(found if number == 0 else found[7:])
    entropies, busiest = [], []
    for parts in logits:
        probabilities = torch.cat(parts).double().softmax(dim=-1)
        entropies.append(torch.special.entr(probabilities).sum(dim=-1).mean().item())
        counts = torch.bincount(probabilities.topk(3, dim=-1).indices.flatten(), minlength=6)
        busiest.append((counts.max() / counts.sum()).item())
    return float(np.mean(entropies)), float(np.mean(busiest))
