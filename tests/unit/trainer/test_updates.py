"""Several updates per step, against an implementation that shares nothing with the trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fakes import trajectory
from support.independent_updates import Batch, IndependentTrainer, Settings, Told, Try
from support.policy_training import (
    MAX_NEW_TOKENS,
    TEMPERATURE,
    Bench,
    assert_close,
    assert_equal,
    by_hugging_face_name,
    gradient,
    make_bench,
    part_of,
    recipe,
    room_for,
    run,
    state_of,
)
from support.small_models import VOCAB_SIZE

from redline.buffer.packing import pack
from redline.errors import TrainingError
from redline.models.files.hf import load_decoder
from redline.trainer import PolicyTrainer, Sampling
from redline.trainer.batches.mini_batches import divide
from redline.trainer.batches.mini_batches import part_of as mini_batch_of
from redline.types import StepReport, TrainBatch, TrajectoryGroup

NUM_GROUPS, SEED, STEPS = 8, 5, 10
OPTIMIZER: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
RATES = {"learning_rate": 1e-2, "critic": {"learning_rate": 1e-2}}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("model"))


def random_groups(seed: int, silent: Sequence[int] = ()) -> Batch:
    """Eight groups of one or two attempts; those in `silent` have no advantage."""
    generator = np.random.default_rng(seed)
    groups = []
    for number in range(NUM_GROUPS):
        prompt = generator.integers(2, VOCAB_SIZE, generator.integers(1, 12)).tolist()
        lengths = generator.integers(1, MAX_NEW_TOKENS, 1 + number % 2)
        answers = [generator.integers(2, VOCAB_SIZE, length).tolist() for length in lengths]
        groups.append([Try(prompt, answer, 0.0 if number in silent else float(generator.normal())) for answer in answers])
    return groups


def packed(groups: Batch, *, keep_no_signal: bool = False) -> TrainBatch:
    """As the buffer hands them to the trainer."""
    made = []
    for group in groups:
        attempts = [trajectory(attempt.prompt, attempt.answer) for attempt in group]
        made.append(TrajectoryGroup("task", attempts, np.array([attempt.outcome for attempt in group], dtype=np.float32)))
    return pack(made, version=0, keep_no_signal=keep_no_signal)


def settings(**changes: Any) -> Settings:
    shape = {"mini_batches": 4, "epochs": 2, "seed": SEED, "clip_low": 0.2, "clip_high": 0.2}
    rates = {"learning_rate": RATES["learning_rate"], "critic_learning_rate": 1e-2}
    return Settings(temperature=TEMPERATURE, **OPTIMIZER, **rates, **shape | changes)


def trainer_of(bench: Bench, **keys: Any) -> PolicyTrainer:
    wanted = {"mini_batches": 4, "epochs": 2, "max_tokens_per_micro_batch": 90, **OPTIMIZER, **RATES}
    return bench.trainer(options={"seed": SEED, **keys.pop("options", {})}, **wanted | keys)


# ── against an independent implementation ──────────────────────────────────────────────────────────────────────────────


def assert_told_alike(report: StepReport, told: Told) -> None:
    assert report.loss == pytest.approx(np.mean(told.losses), rel=2e-3, abs=2e-5)
    assert report.grad_norm == pytest.approx(np.mean(told.norms), rel=5e-3)
    assert report.extra["grad_norm_max"] == pytest.approx(max(told.norms), rel=5e-3)
    assert report.clip_fraction == pytest.approx(np.mean(told.clipped), abs=3 / len(told.clipped))
    assert report.extra["updates"] == len(told.losses)
    assert report.num_trained_tokens == len(told.clipped)


def test_dapo_equals_an_independent_implementation_over_ten_steps(bench: Bench) -> None:
    """Four mini-batches, two epochs. In some steps groups are silent, and once so many that a mini-batch has no update."""
    theirs = IndependentTrainer(bench.oracle, settings(clip_high=0.28), with_critic=False)
    trainer, updates, clipped = trainer_of(bench, algorithm="dapo"), [], []
    for step in range(STEPS):
        groups = random_groups(step, silent={3: (0, 5), 6: (1, 2, 3, 4, 6, 7)}.get(step, ()))
        report, told = trainer.step(packed(groups)), theirs.step(groups)
        assert_told_alike(report, told)
        updates.append(report.extra["updates"])
        clipped.append(report.clip_fraction)
    assert min(clipped) > 0.01, "the clip never bound, so that it was not tested"
    assert set(updates[:3]) == {8}
    assert updates[6] < 8
    masters = by_hugging_face_name(bench, part_of(state_of(trainer), "master/"))
    assert_close(masters, {name: p.detach() for name, p in theirs.policy.named_parameters()}, tolerance=2e-3)


@pytest.mark.parametrize("steps", [5, pytest.param(STEPS, marks=pytest.mark.slow)])  # of eight updates each
def test_ppo_and_its_critic_equal_an_independent_implementation_over_many_steps(bench: Bench, steps: int) -> None:
    theirs = IndependentTrainer(bench.oracle, settings(), with_critic=True)
    trainer, clipped, values_clipped = trainer_of(bench, algorithm="ppo"), [], []
    for step in range(steps):
        groups = random_groups(100 + step)
        report, told = trainer.step(packed(groups, keep_no_signal=True)), theirs.step(groups)
        assert_told_alike(report, told)
        assert report.extra["value_loss"] == pytest.approx(np.mean(told.value_losses), rel=2e-3)
        found = report.extra["value_clip_fraction"]
        assert found == pytest.approx(np.mean(told.values_clipped), abs=3 / len(told.clipped))
        clipped.append(report.clip_fraction)
        values_clipped.append(found)
    assert min(clipped) > 0.01
    assert max(values_clipped) > 0.01
    masters = part_of(state_of(trainer), "critic/master/")
    assert theirs.critic is not None
    head = {name: p.detach() for name, p in theirs.critic.head.named_parameters()}
    assert_close(part_of(masters, "head."), head, tolerance=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_dapo_with_mini_batches_is_that_of_the_cpu(dtype: torch.dtype, bench: Bench) -> None:
    keys = {"algorithm": "dapo", "mini_batches": 4, "epochs": 2, **OPTIMIZER, **RATES}
    config = recipe(**keys)
    there = PolicyTrainer(
        load_decoder(bench.folder, torch.device("cuda")), dtype, config.trainer,
        Sampling(TEMPERATURE, max_new_tokens=MAX_NEW_TOKENS), seed=SEED,
    )  # fmt: skip
    theirs = IndependentTrainer(bench.oracle, settings(clip_high=0.28), with_critic=False)
    for step in range(STEPS if dtype == torch.float32 else 1):
        groups = random_groups(step)
        report, told = there.step(packed(groups)), theirs.step(groups)
        assert report.loss == pytest.approx(np.mean(told.losses), rel=2e-2, abs=5e-3 if dtype == torch.float32 else 5e-2)
        assert report.clip_fraction == pytest.approx(np.mean(told.clipped), abs=0.02 if dtype == torch.float32 else 0.1)
        assert report.clip_fraction > 0.01


# ── how a batch is divided ─────────────────────────────────────────────────────────────────────────────────────────────


def test_every_epoch_has_every_group_once_in_an_order_of_its_own() -> None:
    batch = packed(random_groups(0))
    parts = divide(batch, 3, 2, (SEED, 7))
    assert [len(part) for part in parts] == [3, 3, 2] * 2
    epochs = np.concatenate(parts[:3]), np.concatenate(parts[3:])
    assert all(sorted(epoch) == list(range(NUM_GROUPS)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()


def test_the_order_follows_from_seed_and_version_alone() -> None:
    batch = packed(random_groups(0))

    def order(*key: int) -> list[int]:
        return np.concatenate(divide(batch, 4, 1, key)).tolist()  # type: ignore[arg-type]

    assert order(SEED, 7) == order(SEED, 7)
    assert order(SEED, 7) != order(SEED, 8) != order(SEED + 1, 8)


def test_a_mini_batch_without_signal_is_no_update_and_a_batch_without_any_is_one() -> None:
    one_teaches = packed(random_groups(0, silent=range(1, NUM_GROUPS)))
    [part] = divide(one_teaches, 4, 1, (SEED, 0))
    assert 0 in part
    [everything] = divide(packed(random_groups(0, silent=range(NUM_GROUPS))), 4, 3, (SEED, 0))
    assert len(everything) == NUM_GROUPS


def test_one_update_is_the_batch_itself() -> None:
    batch = packed(random_groups(0))
    [groups] = divide(batch, 1, 1, (SEED, 0))
    assert mini_batch_of(batch, groups) is batch


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
def test_a_mini_batch_has_the_gradient_of_a_batch_of_its_groups(aggregation: str, bench: Bench) -> None:
    """Groups without signal count in the mean of their mini-batch and in no other."""
    groups = random_groups(0, silent=(2, 6))
    part = mini_batch_of(packed(groups), np.array([2, 5, 1]))
    alone = packed([groups[number] for number in (1, 2, 5)])
    assert part.num_sequences_sampled == alone.num_sequences_sampled == 5
    assert part.num_tokens_sampled == alone.num_tokens_sampled
    found, expected = (gradient(bench, batch, aggregation=aggregation) for batch in (part, alone))
    assert_close(found, expected, tolerance=2e-6)


# ── what several updates must not change ───────────────────────────────────────────────────────────────────────────────

KINDS: dict[str, dict[str, Any]] = {
    "dapo": {"algorithm": "dapo"},
    "ppo": {"algorithm": "ppo"},
    "gspo, kl": {"algorithm": "gspo", "kl_coef": 0.1},
    "cispo": {"algorithm": "cispo"},
    "rloo": {"algorithm": "rloo"},
    "adapter": {"lora": {"rank": 3}},
    "int8": {"optimizer_states": "int8"},
}


def batches(count: int, **keys: Any) -> list[TrainBatch]:
    return [packed(random_groups(seed), keep_no_signal=keys.get("algorithm") == "ppo") for seed in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_resumed_divides_its_batches_as_before(kind: str, bench: Bench, tmp_path: Path) -> None:
    keys = KINDS[kind]
    three = batches(3, **keys)
    undisturbed, first, second = (trainer_of(bench, mini_batches=3, **keys) for _ in range(3))
    run(undisturbed, three)
    run(first, three[:2])
    first.save(tmp_path / "two")
    first.flush()
    second.load(tmp_path / "two")
    run(second, three[2:])
    assert_equal(state_of(second), state_of(undisturbed))
    assert second.version == 3


def test_a_step_is_one_version_and_one_learning_rate_however_many_updates_it_takes(bench: Bench) -> None:
    trainer = trainer_of(bench, schedule={"warmup_steps": 4})
    reports = run(trainer, batches(3))
    assert trainer.version == trainer.weights().version == 3
    assert [report.learning_rate for report in reports] == pytest.approx([0.0025, 0.005, 0.0075])
    assert int(state_of(trainer)["step"]) == 3 * 8, "AdamW counts updates"


def test_whoever_shares_the_weights_sees_no_policy_between_two_steps(bench: Bench) -> None:
    trainer = trainer_of(bench)
    weight = next(iter(trainer.weights().tensors.values()))
    told: list[tuple[str, torch.Tensor]] = []

    @contextmanager
    def writing() -> Iterator[None]:
        told.append(("before", weight.clone()))
        yield
        told.append(("after", weight.clone()))

    trainer.writing = writing
    start = weight.clone()
    run(trainer, batches(2))
    assert [name for name, _ in told] == ["before", "after"] * 2
    assert torch.equal(told[0][1], start)
    assert torch.equal(told[1][1], told[2][1])
    assert torch.equal(told[3][1], weight)


def test_a_step_that_breaks_off_between_two_updates_never_says_that_it_has_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of the weights may be new: an engine that reads them must not go on."""
    trainer, told = trainer_of(bench), []

    @contextmanager
    def writing() -> Iterator[None]:
        told.append("begun")
        yield
        told.append("ended")

    trainer.writing = writing
    updates = iter([trainer._optimizer.update] * 2)
    monkeypatch.setattr(trainer._optimizer, "update", lambda *arguments: next(updates)(*arguments))
    with pytest.raises(StopIteration):
        trainer.step(batches(1)[0])
    assert told == ["begun"]


def test_with_lag_a_step_of_several_updates_is_clipped_around_its_own_beginning(bench: Bench) -> None:
    from dataclasses import replace

    batch = replace(batches(1)[0], lags=(1,) * NUM_GROUPS)
    report = trainer_of(bench, mismatch={"high": 100.0}).step(batch)
    assert report.extra["lag_corrected"] == 1
    assert report.clip_fraction > 0.01
    assert report.extra["update_kl"] > 1e-3
    first = bench.trainer().step(batch)
    assert report.mismatch_kl == pytest.approx(first.mismatch_kl, rel=1e-4), "it is measured before the policy has moved"


def test_one_update_per_step_makes_no_pass_for_old_logprobs(bench: Bench) -> None:
    [batch] = batches(1)
    with room_for(0) as refused, pytest.raises(TrainingError):
        bench.trainer(recompute_old_logprobs=True, max_tokens_per_forward=1000).step(batch)
    assert refused, "the pass with gradients is the first"
    plain = bench.trainer(recompute_old_logprobs=True).step(batch)
    assert (plain.clip_fraction, "update_kl" in plain.extra) == (0, False)


def test_after_running_out_of_memory_in_a_mini_batch_that_update_begins_again(bench: Bench) -> None:
    told: list[str] = []
    trainer = trainer_of(bench, max_tokens_per_micro_batch=10**6, max_tokens_per_forward=60, options={"tell": told.append})
    with room_for(60) as refused:
        run(trainer, batches(2))
    assert refused
    assert told
    plain = trainer_of(bench)
    run(plain, batches(2))
    assert_close(part_of(state_of(trainer), "master/"), part_of(state_of(plain), "master/"), tolerance=1e-4)


def test_updates_of_a_poisoned_group_are_skipped_and_the_others_are_taken(bench: Bench, tmp_path: Path) -> None:
    told: list[str] = []
    trainer = trainer_of(bench, max_bad_steps=2, options={"tell": told.append, "bad_steps": tmp_path})
    [poisoned] = batches(1)
    poisoned.advantages[0] = math.nan
    report = trainer.step(poisoned)
    assert report.skipped
    assert report.extra["updates"] == 6, "of eight, one in each epoch is skipped"
    assert math.isfinite(report.loss)
    assert len(told) == 2
    assert "step 1, update " in told[0]
    assert " of 8: " in told[0]
    with pytest.raises(TrainingError, match="2 steps in a row"):
        trainer.step(poisoned)
