"""Every option of the trainer through `PolicyTrainer`: against `naive_training.py` where it changes the loss, against the plain
path where it must change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support.fakes import Attempt, train_batch
from support.generic_models import ROUTED
from support.naive_training import Formula, NaiveTrainer, Rows
from support.policy_training import (
    MAX_NEW_TOKENS,
    OPTIMIZER,
    TEMPERATURE,
    Bench,
    assert_close,
    assert_equal,
    by_hugging_face_name,
    gradient,
    make_bench,
    make_trainer,
    part_of,
    recipe,
    room_for,
    run,
    state_of,
)
from support.small_models import write_model
from torch import Tensor, nn

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.errors import ConfigError, NoRoomError, RunFolderError, TrainingError
from redline.models.files.hf import load_decoder
from redline.models.layer_code import Checkpointing
from redline.models.lora.trainable import is_adapter
from redline.trainer import PolicyTrainer
from redline.trainer.parallel.processes import Parallel
from redline.types import GenerateRequest, SamplingParams, StepReport, TrainBatch, WeightUpdate

EVERYTHING_AT_ONCE = 10**6


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def batches(bench: Bench) -> list[TrainBatch]:
    return bench.batches(3)


# ── formulas ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def clipped(rows: Rows, advantages: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    ratio = torch.exp(rows.logprobs - rows.old)
    return torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def grpo(rows: Rows) -> Tensor:
    return -rows.by_sequence(clipped(rows, rows.outcomes))


def dr_grpo(rows: Rows) -> Tensor:
    return -(clipped(rows, rows.outcomes) * rows.chosen).sum() / (rows.num_sequences * MAX_NEW_TOKENS)


def dapo(rows: Rows) -> Tensor:
    return -rows.by_token(clipped(rows, rows.outcomes, high=0.28))


def rloo(rows: Rows) -> Tensor:
    return -(rows.outcomes * rows.logprobs).sum() / (rows.num_sequences * MAX_NEW_TOKENS)


def reinforce_pp(rows: Rows, kl_coef: float = 0.0) -> Tensor:
    """The reward less the KL of this token and all that follow, normalised over the tokens of the batch."""
    penalty = kl_coef * (rows.old - rows.reference) * rows.chosen
    advantages = rows.outcomes - penalty.flip(1).cumsum(1).flip(1)
    return -rows.by_sequence(clipped(rows, normalized(rows, advantages)))


def normalized(rows: Rows, advantages: Tensor) -> Tensor:
    there = advantages.expand(rows.chosen.shape)[rows.chosen]
    return (advantages - there.mean()) / there.std(correction=0)


def gspo(rows: Rows) -> Tensor:
    """The paper's equation 5: the ratio of whole sequences, and one term for each."""
    log_ratio = ((rows.logprobs - rows.old) * rows.chosen).sum(dim=1) / rows.lengths
    ratio, advantages = torch.exp(log_ratio), rows.outcomes.squeeze(1)
    return -torch.min(ratio * advantages, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages).sum() / rows.num_sequences


def cispo(rows: Rows) -> Tensor:
    weight = torch.exp(rows.logprobs - rows.old).detach().clamp(max=5.0)
    return -rows.by_token(weight * rows.outcomes * rows.logprobs)


def gae(rows: Rows, kl_coef: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, one token after the other from the end, with γ = 1 and λ = 0.95."""
    advantages = torch.zeros(rows.chosen.shape)
    for row in range(len(advantages)):
        positions, after, value_after = rows.chosen[row].nonzero().flatten().tolist(), 0.0, 0.0
        for position in reversed(positions):
            reward = float(rows.outcomes[row]) if position == positions[-1] else 0.0
            reward -= kl_coef * float(rows.old[row, position] - rows.reference[row, position])
            value = float(rows.values[row, position].detach())
            after = reward + value_after - value + 0.95 * after
            advantages[row, position], value_after = after, value
    return advantages, advantages + rows.values.detach()


def ppo(rows: Rows, kl_coef: float = 0.0) -> Tensor:
    return -rows.by_token(clipped(rows, normalized(rows, gae(rows, kl_coef)[0])))


def ppo_values(rows: Rows, kl_coef: float = 0.0) -> Tensor:
    return rows.by_token((rows.values - gae(rows, kl_coef)[1]).square()) / 2


def with_kl(estimate: Callable[[Tensor], Tensor]) -> Formula:
    """GRPO with 0.3 times a KL, estimated from log π_ref - log π."""
    return lambda rows: grpo(rows) + 0.3 * rows.by_sequence(estimate(rows.reference - rows.logprobs))


def with_correction(correct: Callable[[Rows, Tensor], Tensor]) -> Formula:
    """The policy gradient, each token weighed by what is made of π_trainer / π_engine."""

    def loss(rows: Rows) -> Tensor:
        now = rows.logprobs.detach()
        weight = correct(rows, torch.exp(now - rows.old))
        return -rows.by_sequence(weight * torch.exp(rows.logprobs - now) * rows.outcomes)

    return loss


def of_sequence(rows: Rows, ratio: Tensor) -> Tensor:
    return ((ratio.log() * rows.chosen).sum(dim=1, keepdim=True)).exp().expand(ratio.shape)


def between(low: float, high: float, ratio: Tensor) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


# ── losses ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def assert_trains_like(naive: NaiveTrainer, trainer: PolicyTrainer, bench: Bench, batches: list[TrainBatch]) -> StepReport:
    """Losses and gradient norms of every step, the last gradient and the last weights; gives the last report."""
    for batch in batches:
        report, loss = trainer.step(batch), naive.step(batch)
        assert report.loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in naive.gradient.values()))
        assert report.grad_norm == pytest.approx(norm, rel=1e-4)
    state = state_of(trainer)
    assert_close(by_hugging_face_name(bench, part_of(state, "exp_avg/")), naive.gradient, tolerance=1e-4)
    assert_close(by_hugging_face_name(bench, part_of(state, "master/")), weights_of(naive.model), tolerance=1e-5)
    return report


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


PRESETS: dict[str, Formula] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "cispo": cispo,
}


@pytest.mark.parametrize("algorithm", PRESETS)
def test_an_algorithm_by_its_name_is_its_papers_formula(algorithm: str, bench: Bench, batches: list[TrainBatch]) -> None:
    naive = NaiveTrainer(bench.oracle, PRESETS[algorithm])
    trainer = bench.trainer(algorithm=algorithm, max_tokens_per_micro_batch=80)
    report = assert_trains_like(naive, trainer, bench, batches)
    assert report.num_micro_batches > 1
    assert report.extra == {}
    ratio = torch.exp(naive.rows.logprobs - naive.rows.old).detach()[naive.rows.chosen]
    assert report.max_ratio == pytest.approx(float(ratio.max()), rel=1e-3)


def test_gspo_weighs_whole_sequences(bench: Bench) -> None:
    """On its first step, where the noise is what decides about the clips of so narrow a range."""
    batches = bench.batches(1, noise=2e-3)
    report = assert_trains_like(NaiveTrainer(bench.oracle, gspo), bench.trainer(algorithm="gspo"), bench, batches)
    assert 0 < report.clip_fraction < 1


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_ppo_trains_policy_and_critic(kl_coef: float, bench: Bench, batches: list[TrainBatch]) -> None:
    naive = NaiveTrainer(bench.oracle, lambda rows: ppo(rows, kl_coef), lambda rows: ppo_values(rows, kl_coef))
    critic = {"learning_rate": OPTIMIZER["learning_rate"], "max_tokens_per_micro_batch": 150}
    trainer = bench.trainer(algorithm="ppo", critic=critic, kl_coef=kl_coef, max_tokens_per_micro_batch=80)
    report = assert_trains_like(naive, trainer, bench, batches)
    rows = naive.rows
    if kl_coef:
        assert report.extra["kl"] == pytest.approx(float((rows.old - rows.reference)[rows.chosen].mean()), rel=1e-3)
    assert rows.values[rows.chosen].std() > 0.01, "the critic has no opinion, so that none was tested"
    _, returns = gae(rows, kl_coef)
    errors = (returns - rows.values.detach())[rows.chosen]
    assert report.extra["value_loss"] == pytest.approx(float(ppo_values(rows, kl_coef).detach()), rel=1e-3)
    explained = 1 - float(errors.var(correction=0) / returns[rows.chosen].var(correction=0))
    assert report.extra["explained_variance"] == pytest.approx(explained, rel=1e-2, abs=1e-3)
    assert report.extra["value_clip_fraction"] == 0
    assert report.extra["critic_grad_norm"] > 0
    masters = part_of(state_of(trainer), "critic/master/")
    trunk = by_hugging_face_name(bench, part_of(masters, "trunk."))
    assert_close(trunk, weights_of(naive.critic.trunk), tolerance=5e-5)
    assert_close(part_of(masters, "head."), weights_of(naive.critic.head), tolerance=5e-5)


# ── terms of the loss ──────────────────────────────────────────────────────────────────────────────────────────────────

KL_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: -x,
    "k2": lambda x: x.square() / 2,
    "k3": lambda x: x.exp() - 1 - x,
}


@pytest.mark.parametrize(("estimator", "offload"), [("k1", False), ("k2", False), ("k3", False), ("k3", True)])
def test_a_kl_in_the_loss_is_that_from_a_frozen_copy(
    estimator: str, offload: bool, bench: Bench, batches: list[TrainBatch]
) -> None:
    naive = NaiveTrainer(bench.oracle, with_kl(KL_ESTIMATES[estimator]))
    trainer = bench.trainer(kl_coef=0.3, kl_estimator=estimator, reference_offload=offload, max_tokens_per_forward=70)
    report = assert_trains_like(naive, trainer, bench, batches)
    rows = naive.rows
    kl = KL_ESTIMATES[estimator](rows.reference - rows.logprobs.detach())[rows.chosen]
    assert kl.abs().max() > 1e-2, "the policy is where it began, so that no KL was tested"
    assert report.extra == {"kl": pytest.approx(float(kl.mean()), rel=1e-3)}


def test_a_kl_in_the_reward_reaches_every_token_before_it(bench: Bench, batches: list[TrainBatch]) -> None:
    naive = NaiveTrainer(bench.oracle, lambda rows: reinforce_pp(rows, kl_coef=0.5))
    report = assert_trains_like(naive, bench.trainer(algorithm="reinforce_pp", kl_coef=0.5), bench, batches)
    rows = naive.rows
    assert report.extra == {"kl": pytest.approx(float((rows.old - rows.reference)[rows.chosen].mean()), rel=1e-3)}


def test_an_entropy_bonus_is_the_mean_entropy_off_the_loss(bench: Bench, batches: list[TrainBatch]) -> None:
    naive = NaiveTrainer(bench.oracle, lambda rows: grpo(rows) - 0.1 * rows.by_sequence(rows.entropies))
    report = assert_trains_like(naive, bench.trainer(entropy_coef=0.1), bench, batches)
    assert report.entropy == pytest.approx(float(naive.rows.entropies.detach()[naive.rows.chosen].mean()), rel=1e-4)


CORRECTIONS: dict[str, Callable[[Rows, Tensor], Tensor]] = {
    "token_truncate": lambda rows, ratio: ratio.clamp(0.7, 1.3),
    "token_mask": lambda rows, ratio: between(0.7, 1.3, ratio),
    "sequence_truncate": lambda rows, ratio: of_sequence(rows, ratio).clamp(0.7, 1.3),
    "sequence_mask": lambda rows, ratio: between(0.7, 1.3, of_sequence(rows, ratio)),
    "geometric_truncate": lambda rows, ratio: of_sequence(rows, ratio).pow(1 / rows.lengths[:, None]).clamp(0.7, 1.3),
    "geometric_mask": lambda rows, ratio: between(0.95, 1.05, of_sequence(rows, ratio).pow(1 / rows.lengths[:, None])),
}


@pytest.mark.parametrize(("mismatch", "recomputed"), [*((name, False) for name in CORRECTIONS), ("token_mask", True)])
def test_samples_are_weighed_by_how_far_the_engine_was_off(
    mismatch: str, recomputed: bool, bench: Bench, batches: list[TrainBatch]
) -> None:
    """The policy at the start of a step is the policy during it: to recompute its logprobs changes nothing."""
    naive = NaiveTrainer(bench.oracle, with_correction(CORRECTIONS[mismatch]))
    bound = 0.05 if mismatch == "geometric_mask" else 0.3
    weighed = {"kind": mismatch, "low": 1 - bound, "high": 1 + bound}
    keys = {"mismatch": weighed, "recompute_old_logprobs": recomputed}
    report = assert_trains_like(naive, bench.trainer(**keys), bench, batches[:2])
    rows = naive.rows
    dropped = CORRECTIONS[mismatch](rows, torch.exp(rows.logprobs.detach() - rows.old))[rows.chosen] == 0
    assert report.extra == {"masked": pytest.approx(float(dropped.float().mean()))}
    assert bool(dropped.any()) == mismatch.endswith("mask")
    assert report.clip_fraction == 0, "the ratio of a policy to itself is 1"


def test_recomputed_logprobs_are_those_of_the_old_policy(bench: Bench, batches: list[TrainBatch]) -> None:
    def plain(rows: Rows) -> Tensor:
        return -rows.by_sequence(torch.exp(rows.logprobs - rows.logprobs.detach()) * rows.outcomes)

    trainer = bench.trainer(recompute_old_logprobs=True, max_tokens_per_forward=60)
    report = assert_trains_like(NaiveTrainer(bench.oracle, plain), trainer, bench, batches)
    assert report.clip_fraction == 0
    assert report.mismatch_kl > 1e-3, "what the engine had is still measured"


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["llama, tied", "qwen3, biases"])
@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["", "lora"])
def test_what_the_backward_pass_computes_again_changes_no_bit(family: str, lora: dict[str, Any], tmp_path: Path) -> None:
    bench = make_bench(tmp_path, family)
    [batch] = bench.batches(1)
    found = {kind: gradient(bench, batch, gradient_checkpointing=kind, lora=lora) for kind in get_args(Checkpointing)}
    assert_equal(found["light"], found["none"])
    assert_equal(found["selective"], found["none"])
    assert_equal(found["full"], found["none"])


def test_gradient_checkpointing_keeps_less_for_the_backward_pass(bench: Bench, batches: list[TrainBatch]) -> None:
    kept = {kind: bytes_kept(bench, batches[0], kind) for kind in get_args(Checkpointing)}
    assert kept["full"] < 0.6 * kept["selective"]
    assert kept["selective"] < 0.9 * kept["light"]
    assert kept["light"] < 0.95 * kept["none"]  # the product of gate and up alone, where the activation keeps no more


def bytes_kept(bench: Bench, batch: TrainBatch, kind: str) -> int:
    """Of tensors saved for the backward pass of a single micro-batch, weights aside."""
    trainer = bench.trainer(gradient_checkpointing=kind, max_tokens_per_micro_batch=EVERYTHING_AT_ONCE)
    weights = {tensor.untyped_storage().data_ptr() for tensor in trainer.weights().tensors.values()}
    storages: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            storages[tensor.untyped_storage().data_ptr()] = tensor.detach()  # alive, so that its address stays its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.step(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def test_int8_states_train_nearly_as_float32_ones_and_resume_bit_for_bit(bench: Bench, tmp_path: Path) -> None:
    batches = bench.batches(6)
    keys: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8, "learning_rate": 1e-3}
    exact, rounded = bench.trainer(**keys), bench.trainer(**keys, optimizer_states="int8")
    before = {name: master.detach().clone() for name, master in exact.masters.items()}
    run(exact, batches)
    run(rounded, batches[:3])
    rounded.save(tmp_path / "checkpoint")
    run(rounded, batches[3:])
    moved, apart = (
        torch.cat([(exact.masters[name] - other[name]).detach().flatten() for name in before])
        for other in (before, rounded.masters)
    )
    assert apart.norm() < 0.1 * moved.norm()
    assert part_of(state_of(rounded), "exp_avg/")["embed"].dtype == torch.int8
    resumed = bench.trainer(**keys, optimizer_states="int8")
    resumed.load(tmp_path / "checkpoint")
    run(resumed, batches[3:])
    assert_equal(state_of(resumed), state_of(rounded))
    with pytest.raises(RunFolderError, match="optimizer states are not float32"):
        bench.trainer(**keys).load(tmp_path / "checkpoint")


def test_the_rate_of_every_step_is_the_schedules(bench: Bench, batches: list[TrainBatch]) -> None:
    schedule = {"kind": "cosine", "warmup_steps": 2, "decay_steps": 4, "min_ratio": 0.1}
    trainer = bench.trainer(learning_rate=1e-3, schedule=schedule)
    rates = [trainer.step(batches[0]).learning_rate for _ in range(8)]
    falls = [0.1 + 0.9 * (1 + math.cos(math.pi * done / 4)) / 2 for done in (0, 1, 2, 3, 4, 4)]
    assert rates == pytest.approx([0.5e-3, 1e-3, *(1e-3 * fall for fall in falls)])


def test_a_budget_that_nobody_gave_is_told(bench: Bench, batches: list[TrainBatch]) -> None:
    told: list[str] = []
    run(bench.trainer(options={"tell": told.append}), batches)
    assert told == ["trainer.max_tokens_per_micro_batch = 4096 (auto: enough to keep a CPU busy)"]
    told.clear()
    run(bench.trainer(options={"tell": told.append}, max_tokens_per_micro_batch=100), batches)
    assert told == []


# ── running out of memory ──────────────────────────────────────────────────────────────────────────────────────────────


def step_in_little_room(bench: Bench, batch: TrainBatch, room: int, **keys: Any) -> tuple[PolicyTrainer, StepReport, list[str]]:
    """A step that wants everything at once; the last is what was told."""
    told: list[str] = []
    trainer = bench.trainer(options={"tell": told.append}, max_tokens_per_micro_batch=EVERYTHING_AT_ONCE, **keys)
    with room_for(room) as refused:
        report = trainer.step(batch)
        assert len(refused) == len(told) > 0
        trainer.step(batch)
        assert len(refused) == len(told), "what did not fit once was tried again"
    return trainer, report, told


def test_after_running_out_of_memory_the_step_begins_again_with_less(bench: Bench, batches: list[TrainBatch]) -> None:
    trainer, report, told = step_in_little_room(bench, batches[0], 70)
    plain = bench.trainer()
    run(plain, [batches[0], batches[0]])
    assert_close(state_of(trainer), state_of(plain), tolerance=2e-6)
    assert "the step begins again with at most" in told[0]
    assert "trainer.max_tokens_per_micro_batch=" in told[-1]
    assert report.num_micro_batches > 1


def test_a_sequence_that_does_not_fit_alone_ends_the_run_with_what_to_do(bench: Bench, batches: list[TrainBatch]) -> None:
    trainer = bench.trainer()
    with room_for(20), pytest.raises(TrainingError, match=r"a sequence of \d+ tokens does not fit, even alone") as caught:
        trainer.step(batches[0])
    assert "trainer.gradient_checkpointing=full" in caught.value.hint


class Meeting(Parallel):
    """A process that others wait for in every layer."""

    meets_in_layers = True


def test_a_rank_that_others_wait_for_in_layers_ends_with_what_to_do(bench: Bench, batches: list[TrainBatch]) -> None:
    """It cannot begin again while they wait; they hear its message as the reason why it ended."""
    trainer = bench.trainer(options={"parallel": Meeting()})
    key = "trainer.max_tokens_per_micro_batch"
    with (
        room_for(70),
        pytest.raises(NoRoomError, match=rf"out of memory with \d+ tokens in a micro-batch; {key}=\d+") as caught,
    ):
        trainer.step(batches[0])
    assert f"--resume {key}=" in caught.value.hint


EXTRA_PASSES: dict[str, dict[str, Any]] = {
    "old logprobs": {"epochs": 2},
    "reference": {"kl_coef": 0.3},
    "critic": {"algorithm": "ppo"},
}


@pytest.mark.parametrize("name", EXTRA_PASSES)
def test_every_pass_has_a_budget_that_shrinks(name: str, bench: Bench, batches: list[TrainBatch]) -> None:
    trainer, _, told = step_in_little_room(bench, batches[0], 70, **EXTRA_PASSES[name])
    plain = bench.trainer(**EXTRA_PASSES[name])
    run(plain, [batches[0], batches[0]])
    assert_close(state_of(trainer), state_of(plain), tolerance=2e-6)
    keys = [message.rpartition(" would have spared it")[0].rpartition(" ")[2].partition("=")[0] for message in told]
    expected = ["trainer.max_tokens_per_forward", "trainer.max_tokens_per_micro_batch"]
    expected += ["trainer.critic.max_tokens_per_micro_batch"] if name == "critic" else []
    assert list(dict.fromkeys(keys)) == expected


# ── adapters ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_all_that_is_trained(dtype: torch.dtype, bench: Bench, batches: list[TrainBatch]) -> None:
    trainer = bench.trainer(dtype, lora={"rank": 4})
    frozen = {name: p for name, p in trainer._decoder.named_parameters() if not is_adapter(name)}
    before = {name: parameter.detach().clone() for name, parameter in frozen.items()}
    run(trainer, batches)
    assert_equal({name: p.detach() for name, p in frozen.items()}, before)
    tensors = trainer.weights().tensors
    assert all(is_adapter(name) for name in tensors)
    assert tensors.keys() == trainer.masters.keys()
    assert all(tensor.dtype == dtype and tensor.any() for tensor in tensors.values())
    assert all(master.dtype == torch.float32 for master in trainer.masters.values())


RESUMED: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"rank": 4}, "kl_coef": 0.1},
    "ppo": {"algorithm": "ppo"},
    "ppo, lora": {"algorithm": "ppo", "lora": {"rank": 4}, "kl_coef": 0.1},
}


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        *((RESUMED[name], torch.float32) for name in RESUMED),
        (RESUMED["lora"], torch.bfloat16),
        *(pytest.param(RESUMED[name], torch.bfloat16, marks=pytest.mark.slow) for name in ("ppo", "ppo, lora")),
    ],
    ids=[*RESUMED, *(f"{name}, bfloat16" for name in RESUMED)],
)
def test_a_resumed_run_ends_in_the_same_weights_to_the_bit(
    keys: dict[str, Any], dtype: torch.dtype, bench: Bench, tmp_path: Path
) -> None:
    batches = bench.batches(4)
    straight, resumed = bench.trainer(dtype, **keys), bench.trainer(dtype, **keys, options={"seed": 5})
    run(straight, batches[:2])
    straight.save(tmp_path / "checkpoint")
    run(straight, batches[2:])
    straight.flush()
    resumed.load(tmp_path / "checkpoint")
    assert resumed.version == 2
    run(resumed, batches[2:])
    assert_equal(state_of(resumed), state_of(straight))
    assert_equal(dict(resumed.weights().tensors), dict(straight.weights().tensors))


def test_a_reference_beside_an_adapter_is_the_network_without_it(bench: Bench, batches: list[TrainBatch]) -> None:
    """The first step's KL is zero, and every later one is measured from the same place, whatever was loaded meanwhile."""
    trainer = bench.trainer(lora={"rank": 4}, kl_coef=0.1)
    first, *_, last = run(trainer, [*batches, batches[0]])
    assert first.extra["kl"] == pytest.approx(0.0, abs=1e-7)
    assert last.extra["kl"] > 1e-4


def test_an_engine_on_the_trainers_network_samples_with_the_adapter(bench: Bench, batches: list[TrainBatch]) -> None:
    decoder = load_decoder(bench.folder)
    trainer = bench.trainer(options={"decoder": decoder}, lora={"rank": 4})
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=8, max_num_batched_tokens=64))
    first = sampled(engine, seed=0)
    run(trainer, batches)
    engine.apply(WeightUpdate(trainer.version, tuple(trainer.weights().tensors), bytes_moved=0))
    second = sampled(engine, seed=0)
    assert second.tokens.tolist() != first.tokens.tolist()
    assert trainer.step(second).max_ratio == pytest.approx(1.0, abs=1e-4)


def sampled(engine: NativeEngine, seed: int) -> TrainBatch:
    """Four attempts at one prompt, with the engine's logprobs."""
    prompt = np.arange(5, 14, dtype=np.int32)
    sampling = SamplingParams(max_tokens=20, n=4, temperature=TEMPERATURE, stop_token_ids=(1,), seed=seed)
    [completions] = engine.generate([GenerateRequest(prompt, sampling)])
    return train_batch(
        [[Attempt([(prompt, False), (c.token_ids, True)], (-1.0) ** i, c.logprobs) for i, c in enumerate(completions)]]
    )


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ppo_refuses_a_checkpoint_without_a_critic(bench: Bench, tmp_path: Path) -> None:
    trainer = bench.trainer()
    trainer.save(tmp_path / "checkpoint")
    trainer.flush()
    with pytest.raises(RunFolderError):
        bench.trainer(algorithm="ppo").load(tmp_path / "checkpoint")


def test_layers_that_transformers_runs_are_not_computed_again(tmp_path: Path) -> None:
    write_model(tmp_path, ROUTED["gpt2"])
    with pytest.raises(ConfigError, match="model family 'gpt2' is run by transformers") as caught:
        make_trainer(tmp_path, recipe(gradient_checkpointing="full"))
    assert "trainer.gradient_checkpointing=none" in caught.value.hint
