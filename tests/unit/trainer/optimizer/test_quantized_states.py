"""8-bit moments: what a level means, that rounding is right on average, and that training does not notice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from redline.config.sections.trainer import TrainerConfig
from redline.kernels.flat_state import BLOCK
from redline.trainer.optimizer.adamw import MasterAdamW
from redline.trainer.optimizer.quantized_states import Int8Codec, bytes_per_moments

GO = torch.tensor(0.0)


def kept_for(size: int) -> dict[str, Tensor]:
    return {name: torch.zeros(size // per_entry, dtype=dtype) for name, (dtype, per_entry) in Int8Codec.kept.items()}


def there_and_back(first: Tensor, second: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    kept = kept_for(len(first))
    Int8Codec().encode((first, second), kept, GO, seed)
    return Int8Codec().decode(kept)


def wild(size: int = 4 * BLOCK, decades: float = 3.0) -> Tensor:
    """Signed values over several orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, generator=generator).sign() * 10 ** (-decades * torch.rand(size, generator=generator))


def test_a_value_comes_back_within_one_level_of_itself() -> None:
    values = wild()
    first, second = there_and_back(values, values.square())
    assert float((first / values - 1).abs().max()) < 0.1
    assert float((second / values.square() - 1).abs().max()) < 0.1
    assert torch.equal(first.sign(), values.sign())


def test_the_largest_of_a_block_comes_back_exactly() -> None:
    values = wild().view(-1, BLOCK)
    first, _ = there_and_back(values.flatten(), values.flatten().square())
    assert torch.equal(first.view(-1, BLOCK).abs().amax(dim=1), values.abs().amax(dim=1))


def test_rounding_is_right_on_average() -> None:
    values = wild()
    draws = [there_and_back(values, values.square(), seed) for seed in range(400)]
    for index, expected in ((0, values), (1, values.square())):
        mean = torch.stack([draw[index] for draw in draws]).mean(dim=0)
        assert float((mean / expected - 1).abs().max()) < 0.012  # five standard deviations of a mean of 400


def test_a_positive_second_moment_never_becomes_zero_and_zero_stays_zero() -> None:
    second = torch.full((2 * BLOCK,), 1e-20)
    second[0], second[5], second[BLOCK:] = 1.0, 0.0, 0.0
    first, back = there_and_back(torch.zeros_like(second), second)
    assert bool((back[:BLOCK] > 0).equal(second[:BLOCK] > 0))
    assert back[5] == 0
    assert not back[BLOCK:].any()
    assert not first.any()


def test_the_same_seed_rounds_the_same_way_and_another_does_not() -> None:
    values = wild()
    once, again, other = (there_and_back(values, values.square(), seed)[0] for seed in (1, 1, 2))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_skipping_leaves_every_code_and_scale() -> None:
    values = wild()
    kept = kept_for(len(values))
    Int8Codec().encode((values, values.square()), kept, GO, seed=0)
    before = {name: tensor.clone() for name, tensor in kept.items()}
    Int8Codec().encode((values * torch.nan, values), kept, torch.tensor(1.0), seed=1)
    assert all(torch.equal(kept[name], before[name]) for name in before)


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class TinyModel(nn.Module):
    """Predicts the next token from the last two."""

    def __init__(self, vocabulary: int = 64, size: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, size)
        self.hidden = nn.Linear(2 * size, 4 * size)
        self.norm = nn.RMSNorm(4 * size)
        self.out = nn.Linear(4 * size, vocabulary, bias=False)

    def forward(self, tokens_B2: Tensor) -> Tensor:
        return self.out(self.norm(nn.functional.silu(self.hidden(self.embed(tokens_B2).flatten(1)))))


def losses(kept: str, steps: int = 300) -> Tensor:
    model = TinyModel()
    config = TrainerConfig(
        learning_rate=3e-3, schedule={"warmup_steps": 20}, optimizer_states=kept, max_grad_norm=1.0, weight_decay=0.01
    )
    optimizer = MasterAdamW(model, torch.float32, config)
    generator = torch.Generator().manual_seed(1)
    rule = torch.randint(0, 64, (64, 64), generator=generator)
    found = []
    for step in range(steps):
        tokens_B2 = torch.randint(0, 64, (128, 2), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens_B2), rule[tokens_B2[:, 0] // 8, tokens_B2[:, 1]])
        loss.backward()
        optimizer.step(optimizer.learning_rate(step))
        found.append(loss.detach())
    return torch.stack(found)


def test_training_with_8_bit_moments_follows_float32() -> None:
    exact, quantized = losses("float32"), losses("int8")
    learned = float(exact[0] - exact[-20:].mean())
    assert learned > 2, "the task teaches nothing"
    smooth_exact, smooth_quantized = (each.unfold(0, 20, 10).mean(dim=1) for each in (exact, quantized))
    assert float((smooth_quantized - smooth_exact).abs().max()) < 0.03 * learned


def test_8_bit_moments_take_a_quarter_of_the_memory() -> None:
    sizes = {}
    for kept in ("float32", "int8"):
        state = MasterAdamW(TinyModel(), torch.float32, TrainerConfig(optimizer_states=kept)).state()
        sizes[kept] = sum(tensor.nbytes for key, tensor in state.items() if key.startswith("exp_avg"))
    assert sizes["int8"] < 0.26 * sizes["float32"]


@pytest.mark.parametrize("states", ["float32", "int8"])
def test_the_bytes_of_the_moments_are_those_that_the_optimizer_holds(states: str) -> None:
    network = nn.Linear(BLOCK, 7 * BLOCK, bias=False)  # whole blocks: nothing is filled up
    optimizer = MasterAdamW(network, torch.float32, TrainerConfig(optimizer_states=states))
    assert optimizer.state_bytes == bytes_per_moments(states) * network.weight.numel()
