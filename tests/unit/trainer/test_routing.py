"""Routers in training, where the engine has recorded where tokens went: what is reported, and what is replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_models import CONFIGS, VOCAB_SIZE, random_tokens, write_model
from torch import Tensor, nn

from redline.buffer.packing import pack
from redline.config.sections.engine import EngineConfig
from redline.config.sections.trainer import TrainerConfig
from redline.engine import NativeEngine
from redline.models.decoder import Decoder
from redline.models.files.hf import load_decoder
from redline.models.layers.experts import Experts
from redline.models.layers.routing_notes import RoutingNotes
from redline.models.spec import ExpertsSpec
from redline.trainer import PolicyTrainer, Sampling
from redline.types import (
    UNKNOWN_EXPERT,
    Completion,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TrainBatch,
    Trajectory,
    TrajectoryGroup,
)

LAYERS, CHOICES = 2, 3


def attempt(prompt: np.ndarray, completion: Completion) -> Trajectory:
    tokens = np.concatenate([prompt, completion.token_ids])
    return Trajectory(
        token_ids=tokens,
        loss_mask=np.arange(len(tokens)) >= len(prompt),
        logprobs=np.concatenate([np.zeros(len(prompt), np.float32), completion.logprobs]),
        versions=completion.versions,
        finish_reason=FinishReason.LENGTH,
        text="",
        routing=completion.routing,
    )


def sampled_batch(decoder: Decoder) -> TrainBatch:
    """Two groups of four attempts, of different lengths."""
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=8, kv_cache_memory_bytes=2**24, record_routing=True))
    groups = []
    for seed, length in enumerate((7, 4)):
        prompt = random_tokens(length, seed=seed).numpy().astype(np.int32)
        stops = tuple(range(2, VOCAB_SIZE, 17))
        [found] = engine.generate([GenerateRequest(prompt, SamplingParams(14, n=4, seed=seed, stop_token_ids=stops))])
        advantages = np.array([1, -1, 0.5, -0.5], np.float32)
        groups.append(TrajectoryGroup(f"task/{seed}", [attempt(prompt, one) for one in found], advantages, seed))
    return pack(groups, 0, keep_no_signal=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, CONFIGS["qwen3_moe"], seed=3, std=0.2)
    return tmp_path


def loaded(folder: Path) -> Decoder:
    decoder = load_decoder(folder)
    assert isinstance(decoder, Decoder)
    return decoder


def trainer_on(folder: Path, **keys: Any) -> PolicyTrainer:
    return PolicyTrainer(loaded(folder), torch.float32, TrainerConfig(learning_rate=1e-2, **keys), Sampling())


def weights_after(folder: Path, batch: TrainBatch, **keys: Any) -> tuple[dict[str, Tensor], float | None]:
    """Those of a step on the batch, and the mismatch that it reports."""
    trainer = trainer_on(folder, **keys)
    report = trainer.step(batch)
    return trainer.weights().tensors, report.extra.get("routing_mismatch")


def elsewhere(batch: TrainBatch, tokens: np.ndarray) -> TrainBatch:
    """The batch as if these tokens had gone to the next experts, in every layer."""
    routing = np.asarray(batch.routing).reshape(len(batch.tokens), -1).copy()
    moved = routing[tokens]
    routing[tokens] = np.where(moved == UNKNOWN_EXPERT, moved, (moved + 1) % 6)
    return replace(batch, routing=routing.ravel())


def test_a_batch_has_the_experts_of_all_its_tokens(folder: Path) -> None:
    batch = sampled_batch(loaded(folder))
    assert batch.routing is not None
    assert batch.routing_width == LAYERS * CHOICES
    known = np.asarray(batch.routing).reshape(-1, batch.routing_width)[:, 0] != UNKNOWN_EXPERT
    np.testing.assert_array_equal(np.flatnonzero(~known), batch.cu_seqlens[1:] - 1)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_routers_of_the_same_weights_agree_and_replay_changes_nothing(folder: Path, checkpointing: str) -> None:
    batch = sampled_batch(loaded(folder))
    plain, none = weights_after(folder, replace(batch, routing=None), gradient_checkpointing=checkpointing)
    told, mismatch = weights_after(folder, batch, gradient_checkpointing=checkpointing)
    replayed, same = weights_after(folder, batch, gradient_checkpointing=checkpointing, replay_routing=True)
    assert none is None
    assert mismatch == same == 0.0
    for name, tensor in plain.items():
        assert torch.equal(tensor, told[name])
        torch.testing.assert_close(replayed[name], tensor, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("max_tokens", [16, 4096], ids=["one attempt at a time", "all at once"])
def test_the_mismatch_is_the_share_of_tokens_and_layers_that_went_elsewhere(
    folder: Path, max_tokens: int, checkpointing: str
) -> None:
    """Tokens of answers only: each stands once, however the batch is divided."""
    batch = sampled_batch(loaded(folder))
    budget = {"max_tokens_per_micro_batch": max_tokens, "gradient_checkpointing": checkpointing}
    chosen = np.flatnonzero(batch.loss_mask)[::3]
    counted = np.setdiff1d(chosen, batch.cu_seqlens[1:] - 1)
    _, mismatch = weights_after(folder, elsewhere(batch, chosen), **budget)
    _, everywhere = weights_after(folder, elsewhere(batch, np.arange(len(batch.tokens))), **budget)
    assert everywhere == 1.0
    if max_tokens == 4096:  # each prompt stands once, and the last token of a sequence has no record
        prompts = 7 + 4
        assert mismatch == pytest.approx(len(counted) / (prompts + np.count_nonzero(batch.loss_mask) - batch.num_sequences))
    else:
        assert mismatch is not None
        assert 0 < mismatch < 0.5


class Forced(nn.Module):
    """Experts one token at a time, each sent where it is told, with the weights that the router gives those."""

    def __init__(self, experts: Experts, routing_TC: np.ndarray) -> None:
        super().__init__()
        self.experts, self.routing_TC = experts, routing_TC

    def forward(self, x_TE: Tensor) -> Tensor:
        own, rows = self.experts, []
        gate_up, down = own._of_each(own.gate_up), own._of_each(own.down)
        for x_E, chosen_C in zip(x_TE, self.routing_TC, strict=True):
            probability_X = (own.router @ x_E).softmax(dim=-1)
            weights_C = probability_X[torch.from_numpy(chosen_C.astype(np.int64))]
            weights_C = weights_C / weights_C.sum()
            gates, ups = (gate_up[chosen_C.astype(np.int64)] @ x_E).chunk(2, dim=-1)
            outs_CE = (down[chosen_C.astype(np.int64)] @ (nn.functional.silu(gates) * ups)[..., None]).squeeze(-1)
            rows.append(weights_C @ outs_CE)
        return torch.stack(rows)


def test_replayed_tokens_pass_through_the_experts_that_they_are_told_and_through_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    experts = Experts(8, ExpertsSpec(count=6, per_token=3, intermediate_size=4, normalized=True, layers=(5,)))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, generator=generator)
    experts.notes = RoutingNotes(6, torch.device("cpu"), replays=True)
    x_TE = torch.randn(9, 8, generator=generator)
    routing_TC = np.stack([np.random.default_rng(t).permutation(5)[:3] for t in range(9)]).astype(np.uint8)

    class Told:
        def sampled(self, layer: int) -> Tensor:
            assert layer == 5
            return torch.from_numpy(routing_TC)

        def record(self, layer: int, experts_TC: Tensor) -> None:
            np.testing.assert_array_equal(experts_TC.numpy(), routing_TC)

    found, expected = experts(x_TE, routes=Told(), layer=5), Forced(experts, routing_TC)(x_TE)
    torch.testing.assert_close(found, expected)
    names = dict(experts.named_parameters())
    ours = torch.autograd.grad(found.square().sum(), list(names.values()))
    theirs = torch.autograd.grad(expected.square().sum(), list(names.values()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 * float(other.abs().max()), rtol=1e-4)
    assert not experts._of_each(ours[list(names).index("down")])[5].any(), "nobody went to the last expert"
    with torch.no_grad():  # as an anchor's pass, which notes nothing
        noted = experts.notes.sums.clone()
        torch.testing.assert_close(experts(x_TE, routes=Told(), layer=5), expected)
        assert torch.equal(experts.notes.sums, noted)


def test_tokens_without_a_record_go_where_their_router_sends_them() -> None:
    notes = RoutingNotes(6, torch.device("cpu"), replays=True)
    own = torch.tensor([[0, 1, 2], [3, 4, 5], [0, 2, 4]])
    told = torch.tensor([[2, 1, 0], [UNKNOWN_EXPERT] * 3, [1, 2, 4]], dtype=torch.uint8)
    assert notes.compare(own, told).tolist() == [[2, 1, 0], [3, 4, 5], [1, 2, 4]]
    assert notes.sums[-2:].tolist() == [1, 2]


def test_a_replayed_step_learns_from_other_experts_than_the_routers_would_choose(folder: Path) -> None:
    batch = sampled_batch(loaded(folder))
    moved = elsewhere(batch, np.arange(len(batch.tokens)))
    told, _ = weights_after(folder, moved)
    replayed, mismatch = weights_after(folder, moved, replay_routing=True)
    plain, _ = weights_after(folder, replace(batch, routing=None))
    assert mismatch is not None
    assert mismatch > 0.9, "behind experts that it would not have chosen, a router may choose as it is told"
    assert all(torch.equal(tensor, told[name]) for name, tensor in plain.items()), "to report is to change nothing"
    assert not torch.allclose(replayed["layers.0.experts.down"], plain["layers.0.experts.down"])


def test_the_anchor_of_several_updates_is_replayed_too_and_the_reference_is_not(folder: Path) -> None:
    """At the first update nothing has changed yet: the anchor's logprobs are those of the training pass only if both follow the
    same experts. A reference is a network of its own, and routes as it does."""
    batch = elsewhere(sampled_batch(loaded(folder)), np.arange(0, 60, 2))
    keys: dict[str, Any] = {"mini_batches": 2, "recompute_old_logprobs": True, "kl_coef": 0.1, "replay_routing": True}
    report = PolicyTrainer(loaded(folder), torch.float32, TrainerConfig(learning_rate=1e-12, **keys), Sampling()).step(batch)
    assert report.extra["update_kl"] < 1e-9
    assert report.extra["kl"] > 1e-6, "the reference has the same weights, and sends tokens elsewhere"
