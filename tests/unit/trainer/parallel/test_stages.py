"""`PolicyTrainer` in stages takes the steps of one process: losses, norms, weights, optimizer states, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fakes import Attempt, train_batch
from support.policy_training import Bench, Outcome, assert_close, part_of, train
from support.rank_processes import Ranks, started_ranks
from support.small_models import llama, write_model
from support.stage_messages import message_tokens
from torch import Tensor

from redline.models.files.hf import load_decoder
from redline.models.stage import cut_stage
from redline.trainer.batches.micro_batches import micro_batches
from redline.trainer.batches.staging import Staging
from redline.trainer.parallel.passing import Passing
from redline.trainer.passes.forward import network_inputs, whole
from redline.types import TrainBatch

pytestmark = pytest.mark.slow  # torch's pipelining takes seconds to import, in every process

SMALL_BATCHES = {"max_tokens_per_micro_batch": 50, "max_tokens_per_forward": 90}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
CLIPPED = {"max_grad_norm": 0.1}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with started_ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with started_ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Five layers, which no number of stages divides evenly, and an embedding that is the head too."""
    folder = tmp_path_factory.mktemp("tied")
    return Bench(folder, write_model(folder, llama(num_hidden_layers=5, tie_word_embeddings=True), seed=1, std=0.15))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("untied")
    return Bench(folder, write_model(folder, llama(num_hidden_layers=5, tie_word_embeddings=False), seed=1, std=0.15))


@pytest.fixture(scope="module")
def batches(bench: Bench) -> list[TrainBatch]:
    return bench.batches(3)


def assert_same(together: list[Outcome], alone: Outcome, tolerance: float = 1e-5) -> None:
    first, *others = together
    for other in others:
        assert other.reports == first.reports
        assert other.state == {}
    for ours, theirs in zip(first.reports, alone.reports, strict=True):
        for name in ("loss", "grad_norm", "entropy", "clip_fraction", "mismatch_kl", "max_ratio", "num_trained_tokens"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=10 * tolerance, abs=1e-6), name
        beside = {name: value for name, value in ours.extra.items() if name != "rank_imbalance"}  # of several pipelines alone
        assert beside == pytest.approx(theirs.extra, rel=1e-3, abs=1e-6)
    assert_close(part_of(first.state, "master/"), part_of(alone.state, "master/"), tolerance)
    for moment in ("exp_avg/", "exp_avg_sq/"):
        assert_close(part_of(first.state, moment), part_of(alone.state, moment), tolerance=10 * tolerance)
    assert_close(first.sampled_from, alone.sampled_from, tolerance)


def test_two_stages_take_the_steps_of_one_process(two: Ranks, bench: Bench, batches: list[TrainBatch]) -> None:
    """With a reference, several updates in a step, clipping by the norm of all, and an embedding that both stages have."""
    keys = {"kl_coef": 0.3, "mini_batches": 2, **CLIPPED} | SMALL_BATCHES
    together = two.run(train, bench.folder, batches[:2], keys | STAGES)
    assert_same(together, train(bench.folder, batches[:2], keys))
    assert together[0].reports[0].num_micro_batches > 2 * 2, "stages have more micro-batches than they are"


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "four stages": {"pipeline_parallel_size": 4},
    "two pipelines of two": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS.values(), ids=ARRANGEMENTS)
def test_four_processes_in_every_arrangement(
    arrangement: dict[str, Any], tied: bool, four: Ranks, bench: Bench, untied: Bench, batches: list[TrainBatch]
) -> None:
    folder = (bench if tied else untied).folder
    for keys, tolerance in (
        ({"kl_coef": 0.3, **CLIPPED}, 1e-5),
        # Begins at zero, where AdamW makes more of a rounding, the more the smaller its eps.
        ({"lora": {"rank": 3}, "kl_coef": 0.3, "eps": 1e-2}, 1e-4),
        ({"mini_batches": 3, "epochs": 2, "eps": 1e-2}, 1e-4),  # eighteen updates
    ):
        together = four.run(train, folder, batches, keys | SMALL_BATCHES | arrangement)
        assert_same(together, train(folder, batches, keys | SMALL_BATCHES), tolerance)


@pytest.mark.parametrize("checkpointing", ["light", "selective", "full"])
def test_a_stage_may_compute_again_instead_of_keeping(
    checkpointing: str, two: Ranks, bench: Bench, batches: list[TrainBatch]
) -> None:
    keys = {"gradient_checkpointing": checkpointing} | SMALL_BATCHES
    assert_same(two.run(train, bench.folder, batches, keys | STAGES), train(bench.folder, batches, keys))


def test_in_bfloat16_only_the_rounding_differs(two: Ranks, bench: Bench, batches: list[TrainBatch]) -> None:
    keys = {"kl_coef": 0.3} | SMALL_BATCHES
    run = (None, None, None, torch.bfloat16)
    first, _ = two.run(train, bench.folder, batches[:1], keys | STAGES, *run)
    alone = train(bench.folder, batches[:1], keys, *run)
    assert first.reports[0].loss == pytest.approx(alone.reports[0].loss, rel=0.02)
    assert_close(part_of(first.state, "exp_avg/"), part_of(alone.state, "exp_avg/"), tolerance=2**-6)
    assert {tensor.dtype for tensor in first.sampled_from.values()} == {torch.bfloat16}


@pytest.mark.parametrize("states", ["float32", "int8"])
def test_a_checkpoint_of_stages_continues_on_ranks_of_any_kind_and_back(
    states: str, two: Ranks, bench: Bench, batches: list[TrainBatch], tmp_path: Path
) -> None:
    keys = {"betas": (0.8, 0.9), "optimizer_states": states} | SMALL_BATCHES
    others = {"sharding": "full"} if states == "float32" else {}
    alone = train(bench.folder, batches, keys)
    two.run(train, bench.folder, batches[:1], keys | STAGES, None, tmp_path / "one")
    two.run(train, bench.folder, batches[1:2], keys | others, tmp_path / "one", tmp_path / "two")
    first, second = two.run(train, bench.folder, batches[2:], keys | STAGES, tmp_path / "two")
    assert first.reports == second.reports
    # 8-bit states are rounded at random, each stage by draws of its own.
    tolerance = 1e-5 if states == "float32" else 1e-2
    assert_close(part_of(first.state, "master/"), part_of(alone.state, "master/"), tolerance)
    assert first.state.keys() == alone.state.keys()
    assert {name: t.shape for name, t in first.state.items()} == {name: t.shape for name, t in alone.state.items()}


def test_one_attempt_none_and_many(two: Ranks, bench: Bench, batches: list[TrainBatch]) -> None:
    """Two stages want two micro-batches: the second of one attempt is a token that nobody is trained on."""
    lonely = train_batch([[Attempt([([3, 4, 5], False), ([6, 7], True)], 1.0, [-4.0, -5.0])]])
    nothing = train_batch([], num_sequences_sampled=4)
    steps = [lonely, nothing, batches[1]]
    keys = {"kl_coef": 0.3} | SMALL_BATCHES
    first, second = two.run(train, bench.folder, steps, keys | STAGES)
    assert [report.num_padding_tokens for report in first.reports][:2] == [1, 0]
    assert first.reports[2] == second.reports[2]
    assert_close(part_of(first.state, "master/"), part_of(train(bench.folder, steps, keys).state, "master/"))


def test_a_step_that_is_not_finite_is_skipped_by_all_and_explained_by_rank_0(
    two: Ranks, bench: Bench, batches: list[TrainBatch]
) -> None:
    bad = replace(batches[1], advantages=batches[1].advantages.copy())
    bad.advantages[0] = math.nan
    alone = train(bench.folder, [batches[0], batches[2]], SMALL_BATCHES)
    first, second = two.run(train, bench.folder, [batches[0], bad, batches[2]], SMALL_BATCHES | STAGES)
    assert [report.skipped for report in first.reports] == [report.skipped for report in second.reports] == [False, True, False]
    assert "norm" in first.told[-1], "a parameter of the last stage"
    assert "advantage of token" in first.told[-1], "what the last stage alone has seen"
    assert_close(part_of(first.state, "master/"), part_of(alone.state, "master/"))


def test_a_stage_has_room_for_the_messages_under_way_alone(two: Ranks, bench: Bench) -> None:
    """Many short micro-batches and a long one: not as many messages as there are, each as long as the longest."""
    short = [[Attempt([([3] * 3, False), ([5] * 4, True)], 1.0, [-4.0] * 4)] for _ in range(30)]
    long = [[Attempt([([3] * 90, False), ([5] * 4, True)], 1.0, [-4.0] * 4)]]
    keys = {"max_tokens_per_micro_batch": 8, "max_tokens_per_forward": 8, "kl_coef": 0.3, **STAGES}
    for rank, found in enumerate(two.run(message_tokens, bench.folder, train_batch(short + long), keys)):
        assert found.micro_batches > 30
        assert max(found.of_inputs) <= 94, rank
        assert max(found.of_gradients) <= 94, rank
        assert sum(found.of_inputs) + sum(found.of_gradients) < 4 * (30 * 7 + 94), "each as long as its micro-batch"


@pytest.fixture
def single_group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_what_a_stage_raises_comes_out_as_it_is(bench: Bench, single_group: dist.ProcessGroup) -> None:
    """Such as that memory ran out, which torch would wrap."""
    from redline.trainer.parallel.pipeline import Pipeline

    def refuse(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    parts = list(micro_batches(bench.batches(1)[0], 50))
    items = Staging(torch.device("cpu")).sent((part, network_inputs(part, whole(part))) for part in parts)
    passing = Passing(cut_stage(load_decoder(bench.folder), 0, 1), items, len(parts), 1.0, refuse)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        Pipeline(torch.device("cpu"), torch.float32, single_group).train(passing)
