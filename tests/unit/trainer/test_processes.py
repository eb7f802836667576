"""`PolicyTrainer` on two processes ends in the weights of one, says the same on both, and shares its checkpoints with one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fakes import Attempt, train_batch
from support.policy_training import Bench, Outcome, assert_close, grow, make_bench, part_of, train
from support.rank_processes import Ranks, started_ranks
from support.small_models import llama
from transformers import AutoModelForCausalLM

from redline.types import TrainBatch

STRATEGIES: dict[str, dict[str, Any]] = {
    "data": {},
    "data, grad_op": {"sharding": "grad_op"},
    "data, full": {"sharding": "full"},
    "sequence": {"sequence_parallel_size": 2},
    "sequence, full": {"sequence_parallel_size": 2, "sharding": "full"},
    "stages": {"pipeline_parallel_size": 2},
}
QUICK = ("data", "data, full", "sequence")
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo, mask": {"algorithm": "dapo", "mismatch": {"kind": "token_mask", "high": 1.3}},
    "gspo, kl": {"algorithm": "gspo", "clip_low": 0.05, "clip_high": 0.05, "kl_coef": 0.3},
    "reinforce_pp, kl": {"algorithm": "reinforce_pp", "kl_coef": 0.3},
    "recomputed, entropy": {"recompute_old_logprobs": True, "entropy_coef": 0.1},
    "mini-batches": {"mini_batches": 3, "epochs": 2},
    "adapter, kl": {"lora": {"rank": 3}, "kl_coef": 0.3},
    "checkpointing": {"gradient_checkpointing": "full"},
}
SMALL_BATCHES = {"max_tokens_per_micro_batch": 50, "max_tokens_per_forward": 90}


def strategies(*quick: str) -> pytest.MarkDecorator:
    """All of them, those that are not named as slow tests."""
    params = [
        pytest.param(config, id=name, marks=() if name in quick else pytest.mark.slow) for name, config in STRATEGIES.items()
    ]
    return pytest.mark.parametrize("strategy", params)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with started_ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("model"), "qwen3, biases")


@pytest.fixture(scope="module")
def batches(bench: Bench) -> list[TrainBatch]:
    return bench.batches(3)


def assert_same_training(ranks: Ranks, bench: Bench, batches: list[TrainBatch], strategy: dict[str, Any], **keys: Any) -> None:
    alone = train(bench.folder, batches, keys | SMALL_BATCHES)
    together = ranks.run(train, bench.folder, batches, keys | SMALL_BATCHES | strategy)
    assert_same_outcome(together, alone)


def assert_same_outcome(together: list[Outcome], alone: Outcome) -> None:
    first, second = together
    assert first.reports == second.reports
    assert second.state == {}, "both have written the checkpoint"
    for ours, theirs in zip(first.reports, alone.reports, strict=True):
        for name in ("loss", "grad_norm", "entropy", "clip_fraction", "mismatch_kl", "max_ratio", "num_trained_tokens"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-4, abs=1e-6), name
        beside = {name: value for name, value in ours.extra.items() if name not in ("oom_retries", "rank_imbalance")}
        assert beside == pytest.approx(theirs.extra, rel=1e-3, abs=1e-6)
    # AdamW divides by the root of the second moment: where a gradient is all rounding, a step of six amplifies it.
    assert_close(part_of(first.state, "master/"), part_of(alone.state, "master/"), tolerance=3e-5)
    assert_close(part_of(first.state, "exp_avg/"), part_of(alone.state, "exp_avg/"), tolerance=1e-4)


@pytest.mark.slow
@strategies(*QUICK)
def test_three_steps_end_in_the_weights_of_a_single_process(
    strategy: dict[str, Any], two: Ranks, bench: Bench, batches: list[TrainBatch]
) -> None:
    assert_same_training(two, bench, batches, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.slow
def test_every_algorithm_does(name: str, strategy: dict[str, Any], two: Ranks, bench: Bench, batches: list[TrainBatch]) -> None:
    assert_same_training(two, bench, batches, strategy, **RECIPES[name])


def test_gradients_are_clipped_by_the_norm_of_them_all(two: Ranks, bench: Bench, batches: list[TrainBatch]) -> None:
    assert_same_training(two, bench, batches, {"sharding": "full"}, max_grad_norm=0.1)


def test_a_process_without_work_waits_for_the_others(two: Ranks, bench: Bench, batches: list[TrainBatch]) -> None:
    """One attempt for two processes, then none at all, then many."""
    lonely = train_batch([[Attempt([([3, 4, 5], False), ([6, 7], True)], 1.0, [-4.0, -5.0])]])
    nothing = train_batch([], num_sequences_sampled=4)
    alone = train(bench.folder, [lonely, nothing, batches[1]], {"kl_coef": 0.3} | SMALL_BATCHES)
    first, second = two.run(train, bench.folder, [lonely, nothing, batches[1]], {"kl_coef": 0.3} | SMALL_BATCHES)
    assert [report.num_padding_tokens for report in first.reports][:2] == [1, 0]
    assert first.reports[2] == second.reports[2]
    assert_close(part_of(first.state, "master/"), part_of(alone.state, "master/"))


@strategies(*QUICK)
def test_a_checkpoint_of_two_processes_continues_in_one_and_back(
    strategy: dict[str, Any], two: Ranks, bench: Bench, batches: list[TrainBatch], tmp_path: Path
) -> None:
    keys = {"betas": (0.8, 0.9)} | SMALL_BATCHES
    alone = train(bench.folder, batches, keys)
    two.run(train, bench.folder, batches[:1], keys | strategy, None, tmp_path / "one")
    middle = train(bench.folder, batches[1:2], keys, tmp_path / "one", tmp_path / "two")
    assert len(middle.reports) == 1
    first, second = two.run(train, bench.folder, batches[2:], keys | strategy, tmp_path / "two")
    assert first.reports == second.reports
    assert_close(part_of(first.state, "master/"), part_of(alone.state, "master/"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read from /proc")
def test_no_process_ever_has_more_than_its_part_and_one_tensor(tmp_path: Path) -> None:
    """A model of 31 M parameters in bfloat16; as float32 each of two processes has 63 MB of it, and of the moments twice that.
    All of it would be 126 MB more than a part."""
    shape = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 3, "vocab_size": 4000}
    config = llama(**shape, num_attention_heads=12, num_key_value_heads=12, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    with started_ranks(2) as two:  # of its own: it changes their allocator
        found = two.run(grow, tmp_path / "model", tmp_path / "step-000001", {"sharding": "full"})
    largest, slack = 4 * 2 * 3072 * 768, 8 * 2**20
    for rank, grown in enumerate(found):
        copy = grown.part if rank == 0 else 0  # to sample from: whole, in half the bytes
        assert grown.part < 70e6
        assert grown.start < 3 * grown.part + copy + 2 * largest + slack, found
        assert grown.save < 3 * grown.part + slack, "its own state, copied for the thread that writes"
        assert grown.resume < 2 * largest, "its own state is there already"
        assert grown.memory["weights"] == pytest.approx(grown.part + copy, rel=0.01)
        assert grown.memory["optimizer"] == pytest.approx(2 * grown.part, rel=0.01)
    assert sorted(path.name for path in (tmp_path / "step-000001").iterdir()) == [
        "state.json",
        "trainer-1-of-2.safetensors",
        "trainer-2-of-2.safetensors",
    ]


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [({}, 1), *(pytest.param(STRATEGIES["stages"], rank, marks=pytest.mark.slow) for rank in (0, 1))],
    ids=["data", "the first stage", "the last stage"],
)
def test_where_one_process_runs_out_of_memory_all_begin_again(
    strategy: dict[str, Any], rank: int, two: Ranks, bench: Bench, batches: list[TrainBatch]
) -> None:
    """Without gradients in the forward pass, with them in the backward pass; a stage is waited for in the middle of one."""
    keys = {"max_tokens_per_micro_batch": 10**6, "max_tokens_per_forward": 10**6, "kl_coef": 0.3}
    alone = train(bench.folder, batches, keys)
    together = two.run(train, bench.folder, batches, keys | strategy, None, None, {rank: 60})
    assert_same_outcome(together, alone)
    assert together[0].told == together[1].told
    assert any("the step begins again" in told for told in together[0].told)


def test_a_step_that_is_not_finite_is_skipped_by_all(two: Ranks, bench: Bench, batches: list[TrainBatch]) -> None:
    bad = replace(batches[1], advantages=batches[1].advantages.copy())
    bad.advantages[0] = math.nan
    alone = train(bench.folder, [batches[0], batches[2]], SMALL_BATCHES)
    first, second = two.run(train, bench.folder, [batches[0], bad, batches[2]], SMALL_BATCHES)
    assert [report.skipped for report in first.reports] == [report.skipped for report in second.reports] == [False, True, False]
    assert_close(part_of(first.state, "master/"), part_of(alone.state, "master/"))


def test_a_critic_is_for_one_process(two: Ranks, bench: Bench, batches: list[TrainBatch]) -> None:
    with pytest.raises(AssertionError, match="the critic is trained by one process"):
        two.run(train, bench.folder, batches, {"algorithm": "ppo"})
