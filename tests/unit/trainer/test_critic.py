"""The critic against closed forms, and against a value head on transformers' hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fakes import Attempt, train_batch
from support.small_models import CONFIGS, SHAPE, VOCAB_SIZE, llama, random_model, write_model
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from redline.config.sections.lora import LoraConfig
from redline.config.sections.trainer import TrainerConfig
from redline.models.files.hf import load_decoder
from redline.models.generic import GenericDecoder
from redline.models.lora.trainable import add_adapter, is_adapter
from redline.models.value_head import ValueNetwork, value_network
from redline.trainer.batches.micro_batches import micro_batches
from redline.trainer.optimizer.adamw import MasterAdamW
from redline.trainer.passes.critic import Critic, critic_settings, explained_variance, value_loss
from redline.trainer.passes.forward import by_token
from redline.types import TrainBatch

NO_LORA, LORA = LoraConfig(), LoraConfig(rank=4)


class PlainDescent:
    """An optimizer of one line, in float32."""

    def __init__(self, network: nn.Module) -> None:
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.accumulated = 0

    def accumulate(self) -> None:
        self.accumulated += 1

    @torch.no_grad()
    def step(self, learning_rate: float) -> float:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter -= learning_rate * parameter.grad
                parameter.grad = None
        return norm


def random_batch(seed: int = 0) -> TrainBatch:
    generator = np.random.default_rng(seed)
    groups = []
    for attempts in (3, 1, 2):
        prompt = generator.integers(2, VOCAB_SIZE, generator.integers(1, 15)).tolist()
        answers = [generator.integers(2, VOCAB_SIZE, generator.integers(1, 20)).tolist() for _ in range(attempts)]
        groups.append([Attempt([(prompt, False), (answer, True)], 1.0) for answer in answers])
    return train_batch(groups)


def token_mean(batch: TrainBatch) -> np.ndarray:
    return (batch.loss_mask / batch.loss_mask.sum()).astype(np.float32)


def random_targets(batch: TrainBatch, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Old values and returns, float32[T]."""
    drawn = np.random.default_rng(seed).standard_normal((2, len(batch.tokens))).astype(np.float32)
    return drawn[0], drawn[1]


@torch.no_grad()
def randomize_head(network: ValueNetwork, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    network.head.weight.copy_(torch.randn(network.head.weight.shape, generator=generator))
    network.head.bias.fill_(0.25)


def oracle_values(model: PreTrainedModel, network: ValueNetwork, batch: TrainBatch) -> Tensor:
    """float32[T] by transformers: the head on the last hidden state before each trained token, one sequence at a time."""
    rows = []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        hidden_TE = model.model(ids[None]).last_hidden_state[0]
        values = hidden_TE @ network.head.weight[0] + network.head.bias
        rows.append(torch.cat((torch.zeros(1), values[:-1])))
    return torch.where(torch.from_numpy(batch.loss_mask), torch.cat(rows), 0.0)


# ── the loss ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "old", "returned", "loss", "gradient"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0),  # nowhere yet: ½ · 2²
        (1.1, 1.0, 3.0, 1.805, -1.9),  # inside the window it is the squared error
        (2.0, 1.0, 3.0, 1.62, 0.0),  # nearer than the window allows: ½ · (1.2 - 3)², and no pull
        (0.0, 1.0, 3.0, 4.5, -3.0),  # strayed: called back by its own error
        (4.0, 1.0, 3.0, 1.62, 0.0),  # past the return, yet nearer than the window's edge
        (6.0, 1.0, 3.0, 4.5, 3.0),  # far past it
    ],
)
def test_the_clipped_value_loss_and_its_gradient_by_hand(
    value: float, old: float, returned: float, loss: float, gradient: float
) -> None:
    values_M = torch.tensor([value], requires_grad=True)
    found = value_loss(values_M, torch.tensor([old]), torch.tensor([returned]), torch.ones(1), clip=0.2)
    found.loss.backward()
    assert values_M.grad is not None
    assert (float(found.loss.detach()), float(values_M.grad)) == pytest.approx((loss, gradient), abs=1e-5)
    assert bool(found.clipped_M) == (gradient == 0.0)


def test_a_value_inside_the_window_is_never_counted_as_clipped() -> None:
    """However the window's edges are rounded: old + (value - old) is often not the value."""
    old, values, returns = 0.1 * torch.randn(3, 10_000, generator=torch.Generator().manual_seed(0))
    found = value_loss(values, old, returns, torch.ones(10_000), clip=0.2)
    assert found.clipped_M.any()
    assert not found.clipped_M[(values - old).abs() < 0.199].any()


def test_the_clipped_value_loss_equals_a_loop_of_the_formula() -> None:
    generator = np.random.default_rng(0)
    values, old, returns = generator.standard_normal((3, 200))
    weights = generator.random(200)
    expected = 0.0
    for v, o, r, w in zip(values, old, returns, weights, strict=True):
        expected += 0.5 * w * max((v - r) ** 2, (min(max(v, o - 0.3), o + 0.3) - r) ** 2)
    found = value_loss(*map(torch.from_numpy, (values, old, returns, weights)), clip=0.3)
    assert float(found.loss) == pytest.approx(expected, rel=1e-12)
    assert 0 < int(found.clipped_M.sum()) < 200


def test_the_gradient_of_the_value_loss_is_that_of_finite_differences() -> None:
    values, old, returns, weights = torch.from_numpy(np.random.default_rng(1).standard_normal((4, 30)))
    for clip in (0.3, None):
        torch.autograd.gradcheck(
            lambda v, clip=clip: value_loss(v, old, returns, weights.abs(), clip).loss, values.clone().requires_grad_()
        )


def test_without_clipping_it_is_half_the_weighted_squared_error() -> None:
    values, old, returns = torch.tensor([[5.0, 1.0], [0.0, 0.0], [1.0, 2.0]])
    found = value_loss(values, old, returns, torch.tensor([0.5, 0.25]), clip=None)
    assert float(found.loss) == pytest.approx(0.5 * (0.5 * 16 + 0.25 * 1))
    assert not found.clipped_M.any()


def test_explained_variance() -> None:
    returns = np.array([0.0, 1.0, 2.0, 3.0], dtype=np.float32)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(4, 7.0, np.float32), returns) == 0.0
    assert explained_variance(returns + 5, returns) == 1.0
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(returns, np.ones(4, np.float32)))
    assert math.isnan(explained_variance(np.zeros(0, np.float32), np.zeros(0, np.float32)))


# ── the network ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lora", [NO_LORA, LORA], ids=["copy", "adapter"])
@pytest.mark.parametrize("family", ["llama, untied", "qwen2, tied", "qwen3, own head size"])
def test_values_are_the_head_on_the_states_that_chose_each_token(family: str, lora: LoraConfig, tmp_path: Path) -> None:
    model, batch = write_model(tmp_path, CONFIGS[family]), random_batch()
    network = value_network(load_decoder(tmp_path), lora, torch.float32, seed=0)
    randomize_head(network)
    parts = list(micro_batches(batch, 60))
    found = Critic(network, PlainDescent(network), clip=0.2).values(parts)
    assert not any(values_M.requires_grad for values_M in found)
    expected = oracle_values(model, network, batch).detach().numpy()
    np.testing.assert_allclose(by_token(parts, found, len(batch.tokens)), expected, atol=1e-4)


def test_an_untrained_critic_says_zero(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    network = value_network(load_decoder(tmp_path), NO_LORA, torch.float32, seed=0)
    values = Critic(network, PlainDescent(network), clip=0.2).values(micro_batches(random_batch(), 10**6))
    assert all(not values_M.any() for values_M in values)


def test_the_critic_learns_without_touching_the_policy(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, untied"])
    for lora in (NO_LORA, LORA):
        policy = load_decoder(tmp_path)
        if lora.rank:
            add_adapter(policy, lora, torch.float32, seed=0)
        before = {name: (p.detach().clone(), p.requires_grad) for name, p in policy.named_parameters()}
        network = value_network(policy, lora, torch.float32, seed=0)
        run(network, random_batch(), learning_rate=0.05, steps=2)
        for name, parameter in policy.named_parameters():
            assert torch.equal(parameter, before[name][0])
            assert parameter.requires_grad == before[name][1]
            assert parameter.grad is None


def test_a_copy_trains_all_its_layers_and_holds_no_language_head(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, untied"])
    network = value_network(load_decoder(tmp_path), NO_LORA, torch.float32, seed=0)
    names = dict(network.named_parameters())
    assert "trunk.lm_head" not in names
    assert all(parameter.requires_grad for parameter in names.values())
    assert {"head.weight", "head.bias", "trunk.embed", "trunk.layers.1.down.weight"} <= names.keys()


def test_beside_an_adapted_policy_the_critic_has_an_adapter_of_its_own_and_the_same_frozen_weights(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, untied"])
    policy = load_decoder(tmp_path)
    add_adapter(policy, LORA, torch.float32, seed=0)
    network = value_network(policy, LORA, torch.float32, seed=1)
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert all(is_adapter(name) or name.startswith("head.") for name in trained)
    ours = {id(parameter) for name, parameter in network.trunk.named_parameters() if is_adapter(name)}
    assert ours.isdisjoint(map(id, policy.parameters()))
    frozen = {id(parameter) for name, parameter in network.trunk.named_parameters() if not is_adapter(name)}
    assert frozen <= set(map(id, policy.parameters()))


def test_a_network_of_another_family_can_be_a_critic() -> None:
    model, batch = random_model(AutoConfig.for_model("olmo2", **SHAPE)), random_batch()
    network = value_network(GenericDecoder(random_model(AutoConfig.for_model("olmo2", **SHAPE))), NO_LORA, torch.float32, 0)
    randomize_head(network)
    parts = list(micro_batches(batch, 60))
    found = by_token(parts, Critic(network, PlainDescent(network), None).values(parts), len(batch.tokens))
    np.testing.assert_allclose(found, oracle_values(model, network, batch).detach().numpy(), atol=1e-3)
    assert not network.trunk.output_weight.requires_grad


# ── steps ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def run(network: ValueNetwork, batch: TrainBatch, *, learning_rate: float, steps: int, clip: float | None = None) -> list[Any]:
    """Fit the random returns of the batch, the old values being the critic's own."""
    _, returns_T = random_targets(batch)
    critic, reports = Critic(network, PlainDescent(network), clip), []
    for _ in range(steps):
        parts = list(micro_batches(batch, 10**6))
        old_values_T = by_token(parts, critic.values(parts), len(batch.tokens))
        reports.append(critic.step(parts, old_values_T, returns_T, token_mean(batch), learning_rate))
    return reports


@pytest.mark.parametrize("clip", [0.2, None])
def test_a_packed_step_gives_the_gradients_of_transformers(clip: float | None, tmp_path: Path) -> None:
    model, batch = write_model(tmp_path, CONFIGS["qwen2, untied"]), random_batch()
    network = value_network(load_decoder(tmp_path), NO_LORA, torch.float32, seed=0)
    randomize_head(network)
    old_T, returns_T = random_targets(batch)
    optimizer = PlainDescent(network)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    report = Critic(network, optimizer, clip).step(micro_batches(batch, 60), old_T, returns_T, token_mean(batch), 1.0)
    after = {name: p.detach().clone() for name, p in network.named_parameters()}
    assert optimizer.accumulated > 1

    network.load_state_dict(before)  # the oracle uses the same head
    values_T = oracle_values(model, network, batch)
    chosen = torch.from_numpy(batch.loss_mask)
    inputs = (values_T[chosen], *(torch.from_numpy(a[batch.loss_mask]) for a in (old_T, returns_T, token_mean(batch))))
    expected = value_loss(*inputs, clip)
    expected.loss.backward()
    assert report.value_loss == pytest.approx(float(expected.loss.detach()), rel=1e-4)
    assert report.clip_fraction == pytest.approx(float(expected.clipped_M.float().mean()))
    assert report.explained_variance == pytest.approx(explained_variance(old_T[batch.loss_mask], returns_T[batch.loss_mask]))
    theirs = {"trunk.norm": model.model.norm.weight, "trunk.layers.0.o.weight": model.model.layers[0].self_attn.o_proj.weight}
    theirs |= {"trunk.embed": model.model.embed_tokens.weight, "head.weight": network.head.weight}
    for name, parameter in theirs.items():
        assert parameter.grad is not None
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(before[name] - after[name], parameter.grad, atol=1e-4 * largest + 1e-6, rtol=1e-3)


@pytest.mark.parametrize("lora", [NO_LORA, LORA], ids=["copy", "adapter"])
def test_the_critic_comes_to_explain_the_returns(lora: LoraConfig, tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    network = value_network(load_decoder(tmp_path), lora, torch.float32, seed=0)
    reports = run(network, random_batch(), learning_rate=0.02, steps=60)
    losses: Sequence[float] = [report.value_loss for report in reports]
    assert losses[-1] < 0.7 * losses[0]
    assert reports[0].explained_variance == pytest.approx(0.0)
    assert reports[-1].explained_variance > 0.2


def test_micro_batches_add_up(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    batch = random_batch()
    old_T, returns_T = random_targets(batch)
    found = []
    for budget in (30, 10**6):
        network = value_network(load_decoder(tmp_path), NO_LORA, torch.float32, seed=0)
        randomize_head(network)
        critic = Critic(network, PlainDescent(network), clip=0.2)
        found.append(critic.step(micro_batches(batch, budget), old_T, returns_T, token_mean(batch), 0.1))
    assert found[0].value_loss == pytest.approx(found[1].value_loss, rel=1e-5)
    assert found[0].grad_norm == pytest.approx(found[1].grad_norm, rel=1e-4)
    assert found[0].clip_fraction == found[1].clip_fraction


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [NO_LORA, LORA], ids=["copy", "adapter"])
def test_the_trainers_optimizer_drives_the_critic(dtype: torch.dtype, lora: LoraConfig, tmp_path: Path) -> None:
    write_model(tmp_path, llama(hidden_size=24, intermediate_size=32, num_attention_heads=3, num_key_value_heads=1))
    settings, batch = critic_settings(TrainerConfig(critic={"learning_rate": 1e-2})), random_batch()
    policy = load_decoder(tmp_path)
    if lora.rank:
        add_adapter(policy, lora, dtype, seed=0)
    network = value_network(policy, lora, dtype, seed=1)
    critic = Critic(network, MasterAdamW(network, dtype, settings), settings.critic.clip)
    _, returns_T = random_targets(batch)
    losses = []
    for _ in range(30):
        parts = list(micro_batches(batch, settings.max_tokens_per_micro_batch))
        old_values_T = by_token(parts, critic.values(parts), len(batch.tokens))
        losses.append(critic.step(parts, old_values_T, returns_T, token_mean(batch), settings.learning_rate).value_loss)
    assert losses[-1] < 0.8 * losses[0]


def test_the_critic_has_a_rate_and_a_budget_of_its_own() -> None:
    config = TrainerConfig(learning_rate=1e-6, max_grad_norm=0.5, critic={"learning_rate": 3e-5, "warmup_steps": 7})
    settings = critic_settings(config)
    assert (settings.learning_rate, settings.schedule.warmup_steps) == (3e-5, 7)
    assert settings.max_tokens_per_micro_batch == config.critic.max_tokens_per_micro_batch
    assert settings.max_grad_norm == 0.5
