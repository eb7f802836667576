"""Loss and gradients do not depend on how a batch is laid out: prompts shared or not, packed or one sequence at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.fakes import Attempt, train_batch
from support.small_models import CONFIGS, VOCAB_SIZE, write_model
from torch import Tensor

from redline.kernels.segments import NO_PARENT
from redline.models.attention import padded
from redline.models.attention.packed import PackedAttention
from redline.models.files.hf import AnyDecoder, load_decoder
from redline.trainer.batches.cost import CostModel
from redline.trainer.batches.micro_batches import MicroBatch, plan_micro_batches
from redline.types import TrainBatch

ALWAYS_SHARE, NEVER_SHARE = CostModel(per_segment=0), CostModel(per_segment=1e9)
EVERYTHING_AT_ONCE, ONE_AT_A_TIME = 10**6, 1


@pytest.fixture(scope="module", params=["llama, tied", "qwen3, biases"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    write_model(folder, CONFIGS[request.param], seed=1, std=0.15)
    return folder


def some_batch() -> TrainBatch:
    """Groups of one turn, of several, with prompts that differ at the end, and of one attempt."""
    random = np.random.default_rng(0)

    def words(low: int, high: int) -> list[int]:
        return random.integers(2, VOCAB_SIZE, random.integers(low, high)).tolist()

    plain, turns, tools, single = words(8, 16), words(8, 16), words(8, 16), words(8, 16)
    return train_batch(
        [
            [Attempt([(plain, False), (words(1, 20), True)], 1.0) for _ in range(4)],
            [Attempt([(turns, False), (words(1, 9), True), (words(1, 4), False), (words(1, 9), True)], 1.0) for _ in range(3)],
            [Attempt([(tools + words(1, 5), False), (words(1, 9), True), (words(1, 4), False)], 1.0) for _ in range(3)],
            [Attempt([(single, False), (words(1, 9), True)], 1.0)],
        ]
    )


def gradients(
    decoder: AnyDecoder, batch: TrainBatch, micro_batches: Iterable[MicroBatch]
) -> tuple[float, dict[str, Tensor], list[MicroBatch]]:
    """Of a sum over trained tokens, each with a weight of its own."""
    weights_T = torch.from_numpy(np.random.default_rng(1).normal(size=len(batch.tokens)))
    decoder.zero_grad()
    total, seen = 0.0, []
    for micro in micro_batches:
        attend = PackedAttention(micro.segments)
        hidden_TE = decoder(torch.from_numpy(micro.tokens_T), attend.positions_T, attend)
        logits_MV = decoder.logits(hidden_TE[torch.from_numpy(micro.predicted_from_M)])
        logprobs_M = torch.log_softmax(logits_MV, dim=-1)[torch.arange(len(micro.targets_M)), torch.from_numpy(micro.targets_M)]
        loss = (logprobs_M * weights_T[torch.from_numpy(micro.index_M)]).sum()
        loss.backward()
        total += loss.item()
        seen.append(micro)
    return (
        total,
        {name: parameter.grad.clone() for name, parameter in decoder.named_parameters() if parameter.grad is not None},
        seen,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
@pytest.mark.parametrize(
    ("budget", "num_ranks", "cost"),
    [
        pytest.param(EVERYTHING_AT_ONCE, 1, ALWAYS_SHARE, id="shared"),
        pytest.param(EVERYTHING_AT_ONCE, 1, NEVER_SHARE, id="plain"),
        pytest.param(60, 1, ALWAYS_SHARE, id="groups cut by the budget"),
        pytest.param(60, 3, CostModel(), id="three ranks"),
        pytest.param(EVERYTHING_AT_ONCE, 16, CostModel(), id="more ranks than sequences"),
    ],
)
def test_loss_and_gradients_are_those_of_one_sequence_at_a_time(
    folder: Path,
    budget: int,
    num_ranks: int,
    cost: CostModel,
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(padded, "MAX_SCORES", 0)  # the written-out attention computes in float32
    decoder, batch = load_decoder(folder).to(dtype), some_batch()
    expected_loss, expected, alone = gradients(decoder, batch, plan_micro_batches(batch, ONE_AT_A_TIME).of_rank(0))
    plan = plan_micro_batches(batch, budget, num_ranks, cost)
    laid_out = (micro for rank in range(num_ranks) for micro in plan.of_rank(rank))
    found_loss, found, seen = gradients(decoder, batch, laid_out)

    assert all(len(micro.segments.parents) == 1 for micro in alone)
    assert any((micro.segments.parents != NO_PARENT).any() for micro in seen) == (cost is not NEVER_SHARE and num_ranks < 16)
    assert found_loss == pytest.approx(expected_loss, rel=1e3 * tolerance)
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name in expected:
        assert float((found[name] - expected[name]).abs().max()) <= tolerance * largest, name


def test_attempts_with_the_same_tokens_have_the_gradients_that_each_has_by_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded, "MAX_SCORES", 0)
    prompt, answers = list(range(2, 14)), ([5, 6, 7], [8, 9], [5, 6, 7], [5, 6], [8, 9], [5, 6, 7])
    group = [Attempt([(prompt, False), (answer, True)], 1.0) for answer in answers]
    decoder, together, apart = load_decoder(folder).double(), train_batch([group]), train_batch([[each] for each in group])
    expected_loss, expected, _ = gradients(decoder, apart, plan_micro_batches(apart, ONE_AT_A_TIME).of_rank(0))
    found_loss, found, (micro,) = gradients(decoder, together, plan_micro_batches(together, EVERYTHING_AT_ONCE).of_rank(0))

    assert len(micro.tokens_T) == len(prompt) + 3 + 2 + 2
    assert found_loss == pytest.approx(expected_loss, rel=1e-9)
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name in expected:
        assert float((found[name] - expected[name]).abs().max()) <= 1e-12 * largest, name
