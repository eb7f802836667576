from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from support.fakes import Attempt, train_batch
from support.model_specs import QWEN_HALF_BILLION
from support.small_models import CONFIGS, write_model
from torch import Tensor, nn

from redline.errors import TrainingError
from redline.models.attention.packed import PackedAttention
from redline.models.files.hf import load_decoder
from redline.models.layer_code import Checkpointing, layer_code
from redline.models.sizes.memory import ParameterBytes, parameter_bytes, token_bytes
from redline.trainer.batches.budget import (
    BUSY_TOKENS,
    MOST_TOKENS,
    STEP,
    MemoryPlan,
    TokenBudget,
    find_budgets,
    logits_bytes,
    tokens_kept,
    with_oom_retry,
)
from redline.trainer.batches.micro_batches import MicroBatchPlan, plan_micro_batches
from redline.trainer.loss.logprobs import KEPT_BYTES
from redline.types import TrainBatch

GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    write_model(folder, CONFIGS["llama, tied"], seed=1)
    return folder


# ── the plan ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def plan_for(device: int, others: int = 0, checkpointing: Checkpointing = "none") -> MemoryPlan:
    parameters = 494_000_000
    return MemoryPlan(
        device=device,
        others=others,
        parameters=ParameterBytes(2 * parameters, 4 * parameters, 4 * parameters, 8 * parameters),
        logits=logits_bytes(QWEN_HALF_BILLION),
        keeps=tokens_kept(QWEN_HALF_BILLION, torch.bfloat16),
        per_token=token_bytes(
            QWEN_HALF_BILLION,
            parameters,
            torch.bfloat16,
            checkpointing,
            layer_code(QWEN_HALF_BILLION, torch.bfloat16, checkpointing, kernels=True, whole=True),
        ),
    )


def test_what_is_planned_fits_the_device() -> None:
    plan = plan_for(24 * GIB, others=4 * GIB)
    budgets = plan.budgets()
    for tokens, each in ((budgets.training, plan.per_token.training), (budgets.forward, plan.per_token.forward)):
        assert tokens % STEP == 0
        needed = plan.others + plan.parameters.total + plan.logits + tokens * each
        assert needed <= 24 * GIB
        assert tokens == MOST_TOKENS or needed + STEP * each > 0.9 * 24 * GIB


def test_passes_without_gradients_have_the_larger_budget() -> None:
    budgets = plan_for(24 * GIB).budgets()
    assert budgets.forward >= 4 * budgets.training


def test_computing_layers_again_buys_tokens() -> None:
    none, light, selective, full = (
        plan_for(16 * GIB, checkpointing=kind).budgets().training for kind in ("none", "light", "selective", "full")
    )
    assert none < light < selective < full


def test_a_large_device_is_not_filled_for_nothing() -> None:
    plan = dataclasses.replace(plan_for(1000 * GIB), keeps=10 * MOST_TOKENS)
    assert plan.budgets().training == plan.budgets().forward == MOST_TOKENS
    assert "the most that is of use" in plan.budgets().reason


def test_no_logits_are_made_twice_for_the_sake_of_larger_micro_batches() -> None:
    plan = plan_for(141 * GIB)
    tokens = plan.budgets().training
    bytes_per_token = 2 * QWEN_HALF_BILLION.vocab_size
    assert tokens * bytes_per_token <= KEPT_BYTES["cuda"] < (tokens + STEP) * bytes_per_token
    assert plan.budgets().forward == MOST_TOKENS
    assert "the most that is of use" in plan.budgets().reason


def test_a_large_vocabulary_does_not_make_micro_batches_too_small_to_keep_a_device_busy() -> None:
    plan = dataclasses.replace(plan_for(141 * GIB), keeps=100)
    assert plan.budgets().training == BUSY_TOKENS


def test_the_reason_is_one_line_with_the_sizes() -> None:
    assert plan_for(20 * GIB).budgets().reason == "auto: 6.1 GiB of 20.0 GiB are left for tokens of 978.2 KiB"


def test_a_device_without_room_is_refused_with_what_fills_it() -> None:
    with pytest.raises(TrainingError, match=r"others hold 20\.0 GiB") as caught:
        plan_for(24 * GIB, others=20 * GIB).budgets()
    assert "engine.gpu_memory_utilization" in caught.value.hint


def test_the_cpu_has_modest_budgets_with_a_reason(folder: Path) -> None:
    decoder = load_decoder(folder)
    budgets = find_budgets(decoder, torch.float32, parameter_bytes(decoder, torch.float32), 0, "none")
    assert budgets.training < budgets.forward < MOST_TOKENS
    assert budgets.reason.startswith("auto: ")


# ── after running out of memory ────────────────────────────────────────────────────────────────────────────────────────


class SmallDevice(nn.Module):
    """A network on a device that holds so many tokens, and no more."""

    def __init__(self, network: nn.Module, holds: int) -> None:
        super().__init__()
        self.network = network
        self.holds = holds
        self.refused: list[int] = []

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: PackedAttention) -> Tensor:
        hidden_TE: Tensor = self.network(tokens_T, positions_T, attend)
        if len(tokens_T) > self.holds:
            self.refused.append(len(tokens_T))
            raise torch.OutOfMemoryError(f"no room for {len(tokens_T)} tokens")
        return hidden_TE


def some_batch() -> TrainBatch:
    lengths = [30, 9, 14, 3, 22, 17, 8, 8]
    return train_batch([[Attempt([([n, 2], False), ([7] * (n - 2), True)], 1.0)] for n in lengths])


def step(network: SmallDevice, batch: TrainBatch, budget: TokenBudget) -> tuple[dict[str, Tensor], int, list[str]]:
    """Gradients of a sum over all trained tokens, how many tokens counted, and what was said."""
    said: list[str] = []

    def run(plan: MicroBatchPlan) -> int:
        trained = 0
        for micro in plan.of_rank(0):
            attend = PackedAttention(micro.segments)
            hidden_TE = network(torch.from_numpy(micro.tokens_T), attend.positions_T, attend)
            hidden_TE[torch.from_numpy(micro.predicted_from_M)].square().sum().backward()
            trained += len(micro.index_M)
        return trained

    trained = with_oom_retry(
        budget, lambda tokens: plan_micro_batches(batch, tokens), run, lambda: network.zero_grad(set_to_none=True), said.append
    )
    grads = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
    return grads, trained, said


def test_a_step_that_ran_out_of_memory_begins_again_and_loses_nothing(folder: Path) -> None:
    batch = some_batch()
    expected, all_trained, said = step(SmallDevice(load_decoder(folder), 1000), batch, TokenBudget(1000))
    assert (said, all_trained) == ([], int(batch.loss_mask.sum()))
    small, budget = SmallDevice(load_decoder(folder), 40), TokenBudget(1000)
    found, trained, said = step(small, batch, budget)
    assert trained == all_trained
    assert 30 <= budget.current <= 40
    assert len(said) == len(small.refused)
    assert small.refused == sorted(small.refused, reverse=True)
    assert f"at most {budget.current:,}" in said[-1]
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_a_budget_that_shrank_spares_the_next_step(folder: Path) -> None:
    small, budget = SmallDevice(load_decoder(folder), 40), TokenBudget(1000)
    step(small, some_batch(), budget)
    refused = len(small.refused)
    assert step(small, some_batch(), budget)[2] == []
    assert len(small.refused) == refused


def test_a_micro_batch_late_in_the_step_may_be_the_one_that_fails(folder: Path) -> None:
    batch = some_batch()

    class FailsOnce(SmallDevice):
        calls = 0

        def forward(self, *inputs: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                raise torch.OutOfMemoryError("another program took it")
            hidden_TE: Tensor = self.network(*inputs)
            return hidden_TE

    expected, _, _ = step(SmallDevice(load_decoder(folder), 1000), batch, TokenBudget(1000))
    found, _, said = step(FailsOnce(load_decoder(folder), 0), batch, TokenBudget(40))
    assert len(said) == 1
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_a_sequence_that_does_not_fit_alone_ends_the_run_with_the_fix(folder: Path) -> None:
    with pytest.raises(TrainingError, match="a sequence of 30 tokens does not fit, even alone") as caught:
        step(SmallDevice(load_decoder(folder), 29), some_batch(), TokenBudget(1000))
    assert "rollouts.max_new_tokens" in caught.value.hint


def test_any_other_error_is_not_taken_for_want_of_memory(folder: Path) -> None:
    def run(plan: MicroBatchPlan) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        with_oom_retry(TokenBudget(10), lambda tokens: plan_micro_batches(some_batch(), tokens), run, lambda: None, print)


def test_all_ranks_begin_again_where_one_ran_out_of_memory() -> None:
    plans: list[int] = []
    elsewhere = iter([True, False])
    batch, budget = some_batch(), TokenBudget(1000)

    def plan(tokens: int) -> MicroBatchPlan:
        plans.append(tokens)
        return plan_micro_batches(batch, tokens, num_ranks=2)

    undone: list[None] = []
    result = with_oom_retry(
        budget,
        plan,
        lambda planned: "done",
        lambda: undone.append(None),
        lambda said: None,
        lambda here: here or next(elsewhere),
    )
    assert result == "done"
    assert len(undone) == 1
    assert plans == [1000, budget.current]
    assert [budget.take_retries(), budget.take_retries()] == [1, 0]


@pytest.mark.parametrize(("tried", "longest"), [(16_384, 100), (1000, 400), (1000, 999), (2, 1)])
def test_a_budget_shrinks_by_a_sequence_or_to_a_sequence(tried: int, longest: int) -> None:
    budget = TokenBudget(32_768)
    budget.after_oom(tried, longest)
    assert longest <= budget.current < tried
    assert budget.current <= tried - longest or budget.current == longest


def test_the_plan_counts_what_others_hold() -> None:
    alone = plan_for(24 * GIB)
    shared = dataclasses.replace(alone, others=6 * GIB)
    assert alone.room - shared.room == 6 * GIB
    assert alone.budgets().training > shared.budgets().training
