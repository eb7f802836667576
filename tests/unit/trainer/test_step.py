"""The trainer against GRPO as anyone would write it: transformers, whole sequences, padding, torch's own AdamW."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.fakes import Attempt, train_batch
from support.fresh_memory import fresh_memory_is_nan
from support.small_models import CONFIGS, VOCAB_SIZE, write_model
from torch import Tensor
from transformers import PreTrainedModel

from redline.config.sections.engine import EngineConfig
from redline.config.sections.trainer import TrainerConfig
from redline.engine import NativeEngine
from redline.errors import TrainingError
from redline.models.files.hf import hf_tensors, load_decoder
from redline.trainer import PolicyTrainer, Sampling
from redline.trainer.optimizer.adamw import MasterAdamW
from redline.trainer.optimizer.finite import load_batch
from redline.types import GenerateRequest, SamplingParams, TrainBatch

CLIP_LOW, CLIP_HIGH = 0.2, 0.3
EVERYTHING_AT_ONCE = 10**6
OPTIONS = ("bad_steps", "tell")
SAMPLING = ("advantages", "max_new_tokens")
"""Of the trainer, beside its section of the recipe."""

# With β₁ = 0 AdamW's first moment is the gradient itself, and the checkpoint shows it.
SHOW_GRADIENT: dict[str, Any] = {"betas": (0.0, 0.9), "max_grad_norm": 1e9}


@dataclass
class Bench:
    """One set of weights: redline's trainer on it, and the oracle."""

    folder: Path
    oracle: PreTrainedModel
    temperature: float = 1.0

    def trainer(self, dtype: torch.dtype = torch.float32, **config: Any) -> PolicyTrainer:
        options = {name: config.pop(name) for name in OPTIONS if name in config}
        sampling = Sampling(self.temperature, **{name: config.pop(name) for name in SAMPLING if name in config})
        settings = TrainerConfig(**{"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "learning_rate": 1e-3, **config})
        return PolicyTrainer(load_decoder(self.folder), dtype, settings, sampling, **options)

    def gradient(self, batch: TrainBatch, dtype: torch.dtype = torch.float32, **config: Any) -> dict[str, Tensor]:
        """By Hugging Face name."""
        trainer = self.trainer(dtype, **SHOW_GRADIENT | config)
        trainer.step(batch)
        with tempfile.TemporaryDirectory() as folder:
            trainer.save(Path(folder) / "checkpoint")
            trainer.flush()
            trainer.flush()
            state = load_file(Path(folder) / "checkpoint" / "trainer.safetensors")
        ours = {name.removeprefix("exp_avg/"): value for name, value in state.items() if name.startswith("exp_avg/")}
        return dict(hf_tensors(load_decoder(self.folder), ours))


def make_bench(folder: Path, family: str, temperature: float = 1.0) -> Bench:
    return Bench(folder, write_model(folder, CONFIGS[family], seed=1, std=0.15), temperature)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("model"), "llama, tied", temperature=0.8)


# ── the oracle ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Naive:
    """What one pass over the padded batch gives."""

    loss: Tensor
    ratios: Tensor
    clipped: Tensor
    entropies: Tensor


def naive_grpo(model: PreTrainedModel, batch: TrainBatch, temperature: float) -> Naive:
    """Right-padded rows through transformers, a log-softmax over everything, and the formula of the paper."""
    bounds = list(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True))
    width = max(end - start for start, end in bounds)
    ids = torch.zeros(len(bounds), width, dtype=torch.long)
    chosen, there = torch.zeros(ids.shape, dtype=torch.bool), torch.zeros(ids.shape, dtype=torch.long)
    old = torch.zeros(ids.shape)
    for row, (start, end) in enumerate(bounds):
        length = end - start
        ids[row, :length] = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        chosen[row, :length] = torch.from_numpy(batch.loss_mask[start:end])
        old[row, :length] = torch.from_numpy(batch.old_logprobs[start:end])
        there[row, :length] = 1
    everything = torch.log_softmax(model(ids, attention_mask=there).logits[:, :-1] / temperature, dim=-1)
    logprobs = everything.gather(2, ids[:, 1:, None]).squeeze(2)
    chosen, old = chosen[:, 1:], old[:, 1:]
    advantage = torch.from_numpy(batch.advantages)[:, None]
    ratio = torch.exp(torch.where(chosen, logprobs - old, 0.0))
    clipped = torch.clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
    per_token = torch.min(ratio * advantage, clipped * advantage)
    per_sequence = (per_token * chosen).sum(dim=1) / chosen.sum(dim=1)
    return Naive(
        loss=-per_sequence.sum() / batch.num_sequences_sampled,
        ratios=ratio[chosen].detach(),
        clipped=((per_token < ratio * advantage) & chosen)[chosen],
        entropies=-(everything.exp() * everything).sum(dim=-1)[chosen].detach(),
    )


def naive_gradient(bench: Bench, batch: TrainBatch) -> tuple[Naive, dict[str, Tensor]]:
    bench.oracle.zero_grad()
    result = naive_grpo(bench.oracle, batch, bench.temperature)
    result.loss.backward()
    return result, {name: p.grad.clone() for name, p in bench.oracle.named_parameters() if p.grad is not None}


def random_batch(bench: Bench, seed: int = 0, noise: float = 0.3) -> TrainBatch:
    """Three groups; old logprobs are the policy's own, moved by enough that some tokens clip on either side."""
    generator = np.random.default_rng(seed)
    groups = []
    for attempts in (3, 1, 4):
        prompt = generator.integers(2, VOCAB_SIZE, generator.integers(1, 20)).tolist()
        groups.append([random_attempt(bench, prompt, generator, noise) for _ in range(attempts)])
    return train_batch(groups, num_sequences_sampled=11)


@torch.no_grad()
def random_attempt(bench: Bench, prompt: list[int], generator: np.random.Generator, noise: float) -> Attempt:
    answer = generator.integers(2, VOCAB_SIZE, generator.integers(1, 30)).tolist()
    ids = torch.tensor([prompt + answer])
    logits = bench.oracle(ids).logits[0, len(prompt) - 1 : -1] / bench.temperature
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(answer)[:, None]).squeeze(1).numpy()
    old = logprobs + noise * generator.standard_normal(len(answer)).astype(np.float32)
    return Attempt([(prompt, False), (answer, True)], float(generator.normal()), old.tolist())


def assert_same_gradient(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Each tensor within `tolerance` of the largest entry of them all."""
    assert found.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    assert largest > 0
    for name in expected:
        assert float((found[name] - expected[name]).abs().max()) < tolerance * largest, name


# ── the gradient ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "family", ["llama, tied", "llama, all biases", "mistral, own head size", "qwen2, untied", "qwen3, biases"]
)
def test_the_gradient_is_that_of_grpo_on_whole_padded_sequences(family: str, tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "model", family, temperature=0.8)
    batch = random_batch(bench)
    found = bench.gradient(batch)
    result, expected = naive_gradient(bench, batch)
    assert result.clipped.any(), "nothing clips, so that clipping is not tested"
    assert_same_gradient(found, expected)


@pytest.mark.parametrize("budget", [1, 40, 64, 100, 150])
def test_the_gradient_does_not_depend_on_the_micro_batch_budget(bench: Bench, budget: int) -> None:
    batch = random_batch(bench)
    whole = bench.gradient(batch, max_tokens_per_micro_batch=EVERYTHING_AT_ONCE)
    assert_same_gradient(bench.gradient(batch, max_tokens_per_micro_batch=budget), whole, tolerance=2e-6)


def test_attempts_with_words_of_an_environment_in_between_train_only_on_the_policys(bench: Bench) -> None:
    prompt = [5, 6, 7]
    turns = [[(prompt, False), ([20 + i, 30], True), ([40, 41], False), ([50 + i], True)] for i in range(3)]
    attempts = [Attempt(turn, advantage, [-4.0, -5.0, -4.5]) for turn, advantage in zip(turns, (1.0, -0.5, 0.25), strict=True)]
    batch = train_batch([attempts])
    assert_same_gradient(bench.gradient(batch), naive_gradient(bench, batch)[1])


def test_leaving_out_attempts_without_advantage_changes_nothing(bench: Bench) -> None:
    generator = np.random.default_rng(3)
    prompts = [generator.integers(2, VOCAB_SIZE, 9).tolist() for _ in range(3)]
    groups = [[random_attempt(bench, prompt, generator, 0.3) for _ in range(3)] for prompt in prompts]
    silent = [[dataclasses.replace(attempt, advantage=0.0) for attempt in groups[1]]]
    mixed = [groups[0][0], dataclasses.replace(groups[0][1], advantage=0.0), groups[0][2]]
    everything = train_batch([mixed, *silent, groups[2]])
    kept = train_batch([[mixed[0], mixed[2]], groups[2]], num_sequences_sampled=9)
    assert_same_gradient(bench.gradient(kept), bench.gradient(everything), tolerance=2e-6)


def test_memory_that_nobody_wrote_is_never_read(bench: Bench) -> None:
    batch = random_batch(bench)
    expected = bench.gradient(batch)
    with fresh_memory_is_nan():
        found = bench.gradient(batch)
    assert_same_gradient(found, expected, tolerance=1e-6)


# ── the report ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("budget", [50, EVERYTHING_AT_ONCE])
def test_the_report_says_what_the_oracle_finds(bench: Bench, budget: int) -> None:
    batch = random_batch(bench)
    report = bench.trainer(max_tokens_per_micro_batch=budget).step(batch)
    result, gradient = naive_gradient(bench, batch)
    logs = result.ratios.double().log()
    assert report.loss == pytest.approx(result.loss.item(), rel=1e-4)
    assert report.grad_norm == pytest.approx(
        math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values())), rel=1e-4
    )
    assert report.entropy == pytest.approx(float(result.entropies.mean()), rel=1e-4)
    assert report.clip_fraction == pytest.approx(float(result.clipped.float().mean()))
    assert report.mismatch_kl == pytest.approx(float((logs.exp() - 1 - logs).mean()), rel=1e-3)
    assert report.max_ratio == pytest.approx(float(result.ratios.max()), rel=1e-4)
    assert report.num_trained_tokens == batch.loss_mask.sum() == len(result.ratios)


def test_a_groups_prompt_counts_once_in_the_tokens_that_went_through(bench: Bench) -> None:
    attempts = [Attempt([([3, 4, 5, 6], False), ([20 + i, 30], True)], 1.0 - i, [-4.0, -4.0]) for i in range(3)]
    report = bench.trainer().step(train_batch([attempts]))
    assert (report.num_tokens, report.num_trained_tokens, report.num_micro_batches) == (4 + 3 * 2, 6, 1)


@pytest.mark.parametrize("family", ["llama, tied", "qwen2, yarn rope", "qwen3, biases"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_engines_logprobs_are_the_trainers(family: str, temperature: float, tmp_path: Path) -> None:
    """On the first step the policy trained is the one that sampled: every ratio is 1."""
    bench = make_bench(tmp_path / "model", family, temperature)
    batch = sampled_batch(bench)
    report = bench.trainer().step(batch)
    assert report.max_ratio == pytest.approx(1.0, abs=1e-4)
    assert abs(report.mismatch_kl) < 1e-8
    assert report.clip_fraction == 0
    assert report.loss == pytest.approx(-float(batch.advantages.mean()), abs=1e-5)


def sampled_batch(bench: Bench, seed: int = 0) -> TrainBatch:
    """Attempts that redline's engine sampled from the bench's weights."""
    generator = np.random.default_rng(seed)
    engine = NativeEngine(load_decoder(bench.folder), EngineConfig(max_num_seqs=64, max_num_batched_tokens=64))
    requests = [
        GenerateRequest(
            generator.integers(2, VOCAB_SIZE, length).astype(np.int32),
            SamplingParams(max_tokens=24, n=4, temperature=bench.temperature, stop_token_ids=(1, 2, 3, 4), seed=seed + length),
        )
        for length in (3, 11, 30)
    ]
    groups = [
        [
            Attempt(
                [(request.prompt_ids.tolist(), False), (c.token_ids.tolist(), True)], generator.normal(), c.logprobs.tolist()
            )
            for c in completions
        ]
        for request, completions in zip(requests, engine.generate(requests), strict=True)
    ]
    return train_batch(groups)


# ── the optimizer ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("max_grad_norm", [1e9, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_steps_are_those_of_torchs_adamw_on_the_oracle(
    bench: Bench, max_grad_norm: float, warmup_steps: int, tmp_path: Path
) -> None:
    config = {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "learning_rate": 1e-2}
    trainer = bench.trainer(max_grad_norm=max_grad_norm, schedule={"warmup_steps": warmup_steps}, **config)
    oracle = write_model(tmp_path / "oracle", CONFIGS["llama, tied"], seed=1, std=0.15)
    matrices = [p for p in oracle.parameters() if p.dim() == 2]
    vectors = [p for p in oracle.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-3, foreach=False, fused=False)
    for step in range(5):
        batch = random_batch(bench, seed=step)
        rate = 1e-2 * min(1.0, (step + 1) / max(1, warmup_steps))
        assert trainer.step(batch).learning_rate == pytest.approx(rate)
        adamw.zero_grad()
        naive_grpo(oracle, batch, bench.temperature).loss.backward()
        torch.nn.utils.clip_grad_norm_(oracle.parameters(), max_grad_norm)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
    start = dict(bench.oracle.named_parameters())
    found = dict(hf_tensors(load_decoder(bench.folder), trainer.masters))
    for name, parameter in oracle.named_parameters():
        moved = float((parameter - start[name]).detach().abs().max())
        assert moved > 1e-4
        assert float((found[name] - parameter).detach().abs().max()) < 1e-3 * moved, name


def test_the_rate_rises_to_its_height_and_falls_linearly_to_zero() -> None:
    config = TrainerConfig(learning_rate=1.0, schedule={"kind": "linear", "warmup_steps": 2, "decay_steps": 4})
    optimizer = MasterAdamW(torch.nn.Linear(1, 1), torch.float32, config)
    assert [optimizer.learning_rate(step) for step in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_weight_decay_shrinks_matrices_and_nothing_else(bench: Bench) -> None:
    """Without a gradient AdamW's step is p ← p · (1 - rate · decay)."""
    trainer = bench.trainer(weight_decay=0.5, learning_rate=0.01)
    before = {name: tensor.detach().clone() for name, tensor in trainer.masters.items()}
    trainer.step(train_batch([], num_sequences_sampled=4))
    for name, tensor in trainer.masters.items():
        expected = before[name] * (1 - 0.01 * 0.5) if tensor.dim() == 2 else before[name]
        torch.testing.assert_close(tensor.detach(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_network_is_the_master_weights_rounded_after_every_step(bench: Bench, dtype: torch.dtype) -> None:
    trainer = bench.trainer(dtype)
    assert all(master.dtype == torch.float32 for master in trainer.masters.values())
    for step in range(4):
        weights, masters = trainer.weights(), trainer.masters
        assert weights.version == step
        assert weights.tensors.keys() == masters.keys()
        for name, tensor in weights.tensors.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, masters[name].to(dtype)), name
        trainer.step(random_batch(bench, seed=step))


def test_the_first_masters_are_the_weights_of_the_folder_unrounded(bench: Bench) -> None:
    masters = dict(hf_tensors(load_decoder(bench.folder), bench.trainer(torch.bfloat16).masters))
    assert all(torch.equal(masters[name], parameter) for name, parameter in bench.oracle.named_parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_weights_never_move_to_other_storage(bench: Bench, dtype: torch.dtype, tmp_path: Path) -> None:
    """Whoever shares it, the engine first of all, must see every step without being told."""
    trainer = bench.trainer(dtype)
    held = dict(trainer.weights().tensors)
    addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
    trainer.save(tmp_path / "first")
    trainer.flush()
    values = {name: tensor.clone() for name, tensor in held.items()}
    for step in range(3):
        trainer.step(random_batch(bench, seed=step))
        assert {name: tensor.data_ptr() for name, tensor in trainer.weights().tensors.items()} == addresses
        assert not any(torch.equal(held[name], values[name]) for name in held)
    trainer.load(tmp_path / "first")
    assert {name: tensor.data_ptr() for name, tensor in trainer.weights().tensors.items()} == addresses
    assert all(torch.equal(held[name], values[name]) for name in held)


@pytest.mark.slow
def test_steps_too_small_for_bfloat16_add_up_in_the_masters(bench: Bench) -> None:
    """One step of 1e-5 rounds away in bfloat16 around 0.1; a hundred must not."""
    trainer = bench.trainer(torch.bfloat16, learning_rate=1e-5)
    before = {name: tensor.clone() for name, tensor in trainer.weights().tensors.items()}
    batch = random_batch(bench)
    trainer.step(batch)
    first = changed_fraction(before, trainer)
    for _ in range(40):
        trainer.step(batch)
    assert changed_fraction(before, trainer) > max(0.1, 2 * first)


def changed_fraction(before: dict[str, Tensor], trainer: PolicyTrainer) -> float:
    after = trainer.weights().tensors
    return sum(int((after[name] != before[name]).sum()) for name in before) / sum(t.numel() for t in before.values())


def test_in_bfloat16_the_gradient_still_points_where_it_should(bench: Bench) -> None:
    batch = random_batch(bench, noise=0.02)
    found = bench.gradient(batch, torch.bfloat16, max_tokens_per_micro_batch=64)
    _, expected = naive_gradient(bench, batch)
    mine, right = (torch.cat([tensors[name].flatten().double() for name in sorted(expected)]) for tensors in (found, expected))
    assert float(mine @ right / mine.norm() / right.norm()) > 0.99


# ── what must not break a run ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_skipped_and_explained(bench: Bench, dtype: torch.dtype, bad: float) -> None:
    good, poisoned = random_batch(bench), random_batch(bench)
    poisoned.advantages[2] = bad
    told: list[str] = []
    trainer, undisturbed = bench.trainer(dtype, tell=told.append), bench.trainer(dtype)
    for each in (trainer, undisturbed):
        each.step(good)
    report = trainer.step(poisoned)
    assert report.skipped
    assert "advantage of token 0 of sequence 2" in told[-1]
    assert "the weights are unchanged" in told[-1]
    for each in (trainer, undisturbed):
        assert not (last := each.step(good)).skipped
        assert last.grad_norm > 0
    for name, master in trainer.masters.items():
        assert torch.equal(master, undisturbed.masters[name]), name


def test_too_many_bad_steps_in_a_row_end_the_run_and_keep_the_batch(bench: Bench, tmp_path: Path) -> None:
    good, poisoned = random_batch(bench), random_batch(bench)
    poisoned.advantages[2] = math.nan
    trainer = bench.trainer(max_bad_steps=2, bad_steps=tmp_path)
    for batch in (poisoned, good, poisoned):  # a good one in between starts the count again
        trainer.step(batch)
    with pytest.raises(TrainingError, match="2 steps in a row that are not finite") as caught:
        trainer.step(poisoned)
    assert "trainer.learning_rate" in caught.value.hint
    kept = load_batch(tmp_path / "step-000004")
    np.testing.assert_array_equal(kept.tokens, poisoned.tokens)
    np.testing.assert_array_equal(kept.advantages, poisoned.advantages)


def test_a_batch_without_any_signal_is_a_step_that_changes_nothing(bench: Bench) -> None:
    trainer = bench.trainer()
    before = {name: tensor.detach().clone() for name, tensor in trainer.masters.items()}
    report = trainer.step(train_batch([], num_sequences_sampled=8))
    assert trainer.version == 1
    assert (report.loss, report.grad_norm, report.num_tokens, report.num_micro_batches) == (0.0, 0.0, 0, 0)
    assert all(torch.equal(master, before[name]) for name, master in trainer.masters.items())
    assert trainer.step(random_batch(bench)).grad_norm > 0


def test_the_version_counts_steps(bench: Bench) -> None:
    trainer = bench.trainer()
    for version in range(3):
        assert trainer.version == trainer.weights().version == version
        trainer.step(random_batch(bench, seed=version))


def test_whoever_shares_the_weights_is_told_before_and_after_they_are_written(bench: Bench) -> None:
    trainer = bench.trainer()
    name, weight = next(iter(trainer.weights().tensors.items()))
    seen: list[Tensor] = []

    @contextmanager
    def writing() -> Iterator[None]:
        seen.append(weight.clone())
        yield
        seen.append(weight.clone())

    trainer.writing = writing
    trainer.step(random_batch(bench))
    before, after = seen
    assert not torch.equal(before, after)
    assert torch.equal(after, trainer.weights().tensors[name])


@pytest.mark.gpu
def test_a_step_is_over_for_the_host_before_the_device_has_written_the_weights(bench: Bench) -> None:
    """Whatever the device is given to do between the norms and the end of the update, the report does not wait for it."""
    decoder = load_decoder(bench.folder, torch.device("cuda"))
    trainer = PolicyTrainer(decoder, torch.bfloat16, TrainerConfig(max_tokens_per_micro_batch=EVERYTHING_AT_ONCE), Sampling())
    batch = random_batch(bench)
    trainer.step(batch)
    trainer.writing = lambda: nullcontext(torch.cuda._sleep(10**9))  # half a second
    started = time.perf_counter()
    report = trainer.step(batch)
    reported = time.perf_counter() - started
    torch.cuda.synchronize()
    written = time.perf_counter() - started
    assert math.isfinite(report.grad_norm)
    assert reported < 0.5 * written
