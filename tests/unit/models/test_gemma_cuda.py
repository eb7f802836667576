"""Gemma 2 and 3 on a GPU beside transformers on the same one: caps on scores and logits, and far beyond sliding windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.generic_models import ROUTED
from support.small_models import random_tokens, write_model
from torch import Tensor
from transformers import PreTrainedModel

from redline.config.sections.engine import EngineConfig
from redline.config.sections.trainer import TrainerConfig
from redline.engine import NativeEngine
from redline.kernels.segments import Segments
from redline.models.attention.flash import packed_attention
from redline.models.files.hf import load_decoder
from redline.models.generic import GenericDecoder
from redline.trainer import PolicyTrainer, Sampling
from redline.types import Completion, GenerateRequest, SamplingParams, TrainBatch, VersionSpan

pytestmark = pytest.mark.gpu
NAMES = ["gemma2", "gemma2, no cap on scores", "gemma3_text"]
LENGTHS = (1, 7, 8, 9, 17, 100)
"""Of prompts: windows are 8 tokens, and 24."""
NEW = 60
CUDA = torch.device("cuda")


def load(folder: Path, name: str, dtype: torch.dtype) -> tuple[GenericDecoder, PreTrainedModel]:
    """Ours, and the model that transformers wrote, on the GPU. Weights this wide give choices that rounding does not change."""
    oracle = write_model(folder, ROUTED[name], seed=2, std=0.2).to(CUDA, dtype)
    decoder = load_decoder(folder, CUDA, dtype)
    assert isinstance(decoder, GenericDecoder)
    return decoder, oracle


def sampled(decoder: GenericDecoder, temperature: float) -> list[tuple[Tensor, Completion]]:
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=8, kv_cache_memory_bytes=2**26))
    prompts = [random_tokens(length, seed=length) for length in LENGTHS]
    sampling = SamplingParams(max_tokens=NEW, temperature=temperature)
    found = engine.generate([GenerateRequest(prompt.numpy().astype(np.int32), sampling) for prompt in prompts])
    return [(prompt, one) for prompt, [one] in zip(prompts, found, strict=True)]


@torch.no_grad()
def logprobs_of(oracle: PreTrainedModel, prompt: Tensor, completion: Completion) -> np.ndarray:
    """By transformers, the whole sequence in one pass."""
    tokens = torch.cat([prompt, torch.from_numpy(completion.token_ids.astype(np.int64))]).to(CUDA)
    logits = oracle(tokens[None]).logits[0].float().log_softmax(dim=-1)
    return logits[len(prompt) - 1 : -1].gather(1, tokens[len(prompt) :, None])[:, 0].cpu().numpy()


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers_far_beyond_the_window(name: str, tmp_path: Path) -> None:
    decoder, oracle = load(tmp_path, name, torch.float32)
    for prompt, completion in sampled(decoder, temperature=0.0):
        ids = prompt[None].to(CUDA)
        expected = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None
        )
        assert completion.token_ids.tolist() == expected[0, len(prompt) :].tolist(), f"a prompt of {len(prompt)}"


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-3), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_transformers(name: str, dtype: torch.dtype, most: float, tmp_path: Path) -> None:
    """In bfloat16 both round, each in its own way: the mean says more than the worst."""
    decoder, oracle = load(tmp_path, name, dtype)
    for prompt, completion in sampled(decoder, temperature=1.0):
        differences = np.abs(completion.logprobs - logprobs_of(oracle, prompt, completion))
        assert (differences.max() if dtype == torch.float32 else differences.mean()) < most, f"a prompt of {len(prompt)}"


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_attempts_behind_one_prompt_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    decoder, oracle = load(tmp_path, name, torch.float32)
    prompt, *attempts = (random_tokens(length, seed=length).to(CUDA) for length in (30, 41, 9))
    attend = packed_attention(Segments(np.cumsum([0, 30, 41, 9]), np.array([-1, 0, 0])), CUDA)
    hidden = decoder(torch.cat([prompt, *attempts]), attend.positions_T, attend)
    ours = decoder.logits(hidden).log_softmax(dim=-1)[:, 5].split([30, 41, 9])
    (2 * ours[0].sum() + ours[1].sum() + ours[2].sum()).backward()
    for attempt in attempts:
        oracle(torch.cat([prompt, attempt])[None]).logits[0].log_softmax(dim=-1)[:, 5].sum().backward()
    found = {name.removeprefix("network."): parameter.grad for name, parameter in decoder.named_parameters()}
    for parameter, tensor in oracle.named_parameters():
        assert tensor.grad is not None
        grad = found[parameter]
        assert grad is not None
        torch.testing.assert_close(grad, tensor.grad, rtol=1e-3, atol=1e-4 * float(tensor.grad.abs().max()))


def batch_of(prompt: np.ndarray, attempts: list[Completion]) -> TrainBatch:
    length = len(prompt) + NEW
    unsampled = np.zeros(len(prompt), np.float32)
    return TrainBatch(
        tokens=np.concatenate([part for one in attempts for part in (prompt, one.token_ids)]),
        cu_seqlens=np.arange(len(attempts) + 1, dtype=np.int64) * length,
        group_offsets=np.array([0, len(attempts)]),
        loss_mask=np.tile(np.arange(length) >= len(prompt), len(attempts)),
        old_logprobs=np.concatenate([part for one in attempts for part in (unsampled, one.logprobs)]),
        advantages=np.resize(np.array([1, -1], np.float32), len(attempts)),
        group_sequences=np.array([len(attempts)]),
        group_tokens=np.array([len(attempts) * NEW]),
        versions=VersionSpan(0, 0),
        version=0,
    )


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_learns_from_what_the_engine_sampled(name: str, dtype: torch.dtype, most: float, tmp_path: Path) -> None:
    """Attempts of 160 tokens: what the engine sampled beyond the window has the trainer's logprob, and a step changes it."""
    decoder, _ = load(tmp_path, name, dtype)
    trainer = PolicyTrainer(decoder, dtype, TrainerConfig(learning_rate=1e-3), Sampling())
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=8, kv_cache_memory_bytes=2**26))
    prompt = random_tokens(100, seed=1).numpy().astype(np.int32)
    [found] = engine.generate([GenerateRequest(prompt, SamplingParams(max_tokens=NEW, n=4))])
    batch = batch_of(prompt, found)
    report = trainer.step(batch)
    assert report.mismatch_kl < most
    assert np.isfinite(report.grad_norm)
    assert report.grad_norm > 0
    assert not report.skipped
    again = trainer.step(batch)
    assert again.mismatch_kl > 2 * report.mismatch_kl, "the policy is another one now"
