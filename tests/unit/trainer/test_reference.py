"""Logprobs without gradients: of the policy before training, and of the policy as it is, held against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.fakes import Attempt, train_batch
from support.small_models import CONFIGS, SHAPE, VOCAB_SIZE, random_model, write_model
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from redline.config.sections.lora import LoraConfig
from redline.models.copies import copy_network, second_network
from redline.models.decoder import Decoder
from redline.models.files.hf import AnyDecoder, load_decoder
from redline.models.generic import GenericDecoder
from redline.models.lora.trainable import add_adapter, has_adapter, is_adapter, without_adapter
from redline.trainer.batches.micro_batches import micro_batches
from redline.trainer.passes.forward import by_token, recompute
from redline.trainer.passes.reference import Reference
from redline.types import TrainBatch

TEMPERATURE = 0.8
LORA = LoraConfig(rank=4)


def random_batch(seed: int = 0) -> TrainBatch:
    """Groups of 3, 1 and 2, one of them a conversation of two turns."""
    generator = np.random.default_rng(seed)

    def some(most: int) -> list[int]:
        return generator.integers(2, VOCAB_SIZE, generator.integers(1, most)).tolist()

    groups = []
    for attempts in (3, 1, 2):
        prompt = some(15)
        groups.append([Attempt([(prompt, False), (some(20), True)], 1.0) for _ in range(attempts)])
    groups.append([Attempt([(some(15), False), (some(9), True), (some(5), False), (some(9), True)], 1.0)])
    return train_batch(groups)


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, batch: TrainBatch) -> np.ndarray:
    """float32[T] by transformers, one whole sequence at a time; 0 where nothing is trained."""
    logprobs_T = np.zeros(len(batch.tokens), dtype=np.float32)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        everything = torch.log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, dim=-1)
        logprobs_T[start + 1 : end] = everything.gather(1, ids[1:, None]).squeeze(1).numpy()
    return np.where(batch.loss_mask, logprobs_T, 0)


@torch.no_grad()
def change(decoder: AnyDecoder, std: float = 0.1) -> None:
    """As the optimizer does it: what is trained, in place."""
    for parameter in decoder.parameters():
        if parameter.requires_grad:
            parameter.add_(std * torch.randn_like(parameter))


def reference_logprobs(reference: Reference, batch: TrainBatch, budget: int = 60) -> np.ndarray:
    parts = list(micro_batches(batch, budget))
    return by_token(parts, reference.logprobs(parts), len(batch.tokens))


@pytest.mark.parametrize("family", ["llama, untied", "qwen2, tied"])
@pytest.mark.parametrize("kind", ["copy", "offloaded copy", "adapter off"])
def test_the_reference_stays_what_the_policy_was_while_the_policy_learns(kind: str, family: str, tmp_path: Path) -> None:
    model, batch = write_model(tmp_path, CONFIGS[family]), random_batch()
    decoder = load_decoder(tmp_path)
    if kind == "adapter off":
        add_adapter(decoder, LORA, torch.float32, seed=0)
    reference = Reference(decoder, torch.float32, TEMPERATURE, offload=kind == "offloaded copy")
    expected = logprobs_of(model, batch)
    for _ in range(2):
        np.testing.assert_allclose(reference_logprobs(reference, batch), expected, atol=1e-4)
        change(decoder)
    parts = list(micro_batches(batch, 60))
    current = by_token(parts, recompute(decoder, parts, TEMPERATURE), len(batch.tokens))
    assert np.abs(current - expected).max() > 0.1


def test_recomputed_logprobs_are_those_of_the_current_weights(tmp_path: Path) -> None:
    model, batch = write_model(tmp_path, CONFIGS["llama, all biases"]), random_batch()
    parts = list(micro_batches(batch, 60))
    found = recompute(load_decoder(tmp_path), parts, TEMPERATURE)
    assert all(logprobs_M.dtype == torch.float32 and not logprobs_M.requires_grad for logprobs_M in found)
    np.testing.assert_allclose(by_token(parts, found, len(batch.tokens)), logprobs_of(model, batch), atol=1e-4)


@pytest.mark.parametrize("budget", [1, 25, 70, 10**6])
def test_the_token_budget_changes_nothing(budget: int, tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    decoder, batch = load_decoder(tmp_path), random_batch()
    reference = Reference(decoder, torch.float32, TEMPERATURE, offload=False)
    whole = reference_logprobs(reference, batch, 10**7)
    assert np.count_nonzero(whole) == np.count_nonzero(batch.loss_mask)
    np.testing.assert_allclose(reference_logprobs(reference, batch, budget), whole, atol=1e-5)


def test_a_network_of_another_family_has_a_reference_too() -> None:
    model, batch = random_model(AutoConfig.for_model("olmo2", **SHAPE)), random_batch()
    expected, decoder = logprobs_of(model, batch), GenericDecoder(model)
    reference = Reference(decoder, torch.float32, TEMPERATURE, offload=False)
    change(decoder)
    np.testing.assert_allclose(reference_logprobs(reference, batch), expected, atol=1e-3)


@pytest.mark.gpu
def test_a_reference_in_host_memory_gives_the_logprobs_of_one_on_the_device(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, untied"])
    decoder, batch = load_decoder(tmp_path, "cuda"), random_batch()
    here, away = (Reference(decoder, torch.bfloat16, TEMPERATURE, offload=offload) for offload in (False, True))
    assert {p.device.type for p in away._network.parameters()} == {"cpu"}
    for _ in range(2):
        np.testing.assert_array_equal(reference_logprobs(away, batch), reference_logprobs(here, batch))
    assert all(p.device.type == "cpu" and p.is_pinned() for p in away._network.parameters())


def test_a_batch_without_sequences_has_no_logprobs(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    reference = Reference(load_decoder(tmp_path), torch.float32, TEMPERATURE, offload=False)
    assert reference.logprobs(micro_batches(train_batch([]), 100)) == []


def test_a_frozen_copy_is_in_the_compute_dtype_and_asks_for_no_gradients(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    decoder = load_decoder(tmp_path)
    copied = copy_network(decoder, torch.bfloat16, trainable=False)
    assert isinstance(copied, Decoder)
    assert copied.rotary_frequencies.dtype == torch.float32
    for name, parameter in copied.named_parameters():
        original = decoder.get_parameter(name)
        assert (parameter.dtype, parameter.requires_grad) == (torch.bfloat16, False)
        assert (original.dtype, original.requires_grad) == (torch.float32, True)
        assert parameter.data_ptr() != original.data_ptr()
        assert torch.equal(parameter, original.bfloat16())


def test_an_adapter_switched_off_takes_no_copy(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    decoder = load_decoder(tmp_path)
    add_adapter(decoder, LORA, torch.float32, seed=0)
    reference = Reference(decoder, torch.float32, TEMPERATURE, offload=True)
    assert reference._network is decoder


# ── second networks on the same weights ────────────────────────────────────────────────────────────────────────────────


def test_a_second_network_shares_every_parameter(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, untied"])
    one = load_decoder(tmp_path)
    other = second_network(one)
    assert one.layers is not other.layers
    assert {id(p) for p in one.parameters()} == {id(p) for p in other.parameters()}


def test_a_network_without_its_adapter_leaves_the_adapter_where_it_was(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, all biases"])
    decoder = load_decoder(tmp_path)
    plain: dict[str, Tensor] = dict(decoder.named_parameters())
    add_adapter(decoder, LORA, torch.float32, seed=0)
    bare = without_adapter(decoder)
    assert has_adapter(decoder)
    assert not has_adapter(bare)
    assert {name: id(p) for name, p in bare.named_parameters()} == {name: id(p) for name, p in plain.items()}
    add_adapter(bare, LORA, torch.float32, seed=1)
    ours, theirs = ({n: p for n, p in d.named_parameters() if is_adapter(n)} for d in (decoder, bare))
    assert all(parameter.requires_grad and parameter is not theirs[name] for name, parameter in ours.items())
