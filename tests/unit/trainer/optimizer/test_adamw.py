"""AdamW on master weights against torch's own, in every way the state can be kept."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from support.fresh_memory import fresh_memory_is_nan
from torch import Tensor, nn

from redline.config.sections.trainer import TrainerConfig
from redline.errors import ConfigError, RunFolderError
from redline.kernels.flat_state import BLOCK
from redline.trainer.optimizer import adamw as optimizer_module
from redline.trainer.optimizer.adamw import MasterAdamW
from redline.trainer.optimizer.flat_layout import FlatLayout
from redline.trainer.optimizer.offload import HostMemory

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1, "max_grad_norm": 1e9}


class Small(nn.Module):
    """Matrices, vectors, a parameter used twice, one that is never used, and sizes that fill no block."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(37, 24))
        self.norm = nn.Parameter(torch.ones(24))
        self.hidden = nn.Linear(24, 40)
        self.out = nn.Linear(40, 24, bias=False)
        self.unused = nn.Parameter(torch.randn(3, 5))

    def forward(self, tokens_T: Tensor) -> Tensor:
        x_TE = self.embed[tokens_T] * self.norm
        return self.out(torch.tanh(self.hidden(x_TE))) @ self.embed.T


def loss_on(network: Small, seed: int, count: int = 16) -> Tensor:
    """Sum over tokens, so that micro-batches add up."""
    generator = torch.Generator().manual_seed(seed)
    tokens_T = torch.randint(0, 37, (count,), generator=generator)
    return nn.functional.cross_entropy(network(tokens_T).float(), (tokens_T * 7 + 3) % 37, reduction="sum") / count


def make(dtype: torch.dtype = torch.float32, **config: Any) -> tuple[Small, MasterAdamW]:
    network = Small()
    return network, MasterAdamW(network, dtype, TrainerConfig(**{**SETTINGS, **config}))


def torchs_adamw(network: Small, **options: Any) -> torch.optim.AdamW:
    matrices = [p for p in network.parameters() if p.dim() > 1]
    vectors = [p for p in network.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), **options)


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


# ── AdamW ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_steps_in_float32_are_those_of_torchs_fused_adamw_bit_for_bit() -> None:
    network, optimizer = make()
    oracle = Small()
    adamw = torchs_adamw(oracle, fused=True)
    for step in range(20):
        loss_on(network, step).backward()
        optimizer.step(1e-2)
        adamw.zero_grad()
        loss_on(oracle, step).backward()
        oracle.unused.grad = torch.zeros_like(oracle.unused)
        adamw.step()
    assert_equal(copied(dict(network.named_parameters())), copied(dict(oracle.named_parameters())))


@pytest.mark.parametrize("max_grad_norm", [1e9, 0.3], ids=["unclipped", "clipped"])
def test_steps_are_those_of_torchs_plain_adamw_with_its_clipping(max_grad_norm: float) -> None:
    network, optimizer = make(max_grad_norm=max_grad_norm)
    oracle = Small()
    adamw = torchs_adamw(oracle, foreach=False, fused=False)
    for step in range(10):
        loss_on(network, step).backward()
        norm = optimizer.step(1e-2)
        adamw.zero_grad()
        loss_on(oracle, step).backward()
        oracle.unused.grad = torch.zeros_like(oracle.unused)
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(oracle.parameters(), max_grad_norm)), rel=1e-5)
        adamw.step()
    for name, parameter in oracle.named_parameters():
        torch.testing.assert_close(dict(network.named_parameters())[name], parameter, rtol=1e-6, atol=2e-7)


def test_in_bfloat16_the_weights_are_a_float32_reference_rounded() -> None:
    """The reference gets the bfloat16 gradients, and sees nothing else of the network."""
    network, optimizer = make(torch.bfloat16)
    oracle = Small()
    adamw = torchs_adamw(oracle, fused=True)
    for step in range(10):
        loss_on(network, step).backward()
        for name, gradient in optimizer.gradients().items():
            oracle.get_parameter(name).grad = gradient.clone()
        optimizer.step(1e-2)
        adamw.step()
        assert_equal(copied(optimizer.masters), copied(dict(oracle.named_parameters())))
        assert_equal(copied(dict(network.named_parameters())), {n: p.detach().bfloat16() for n, p in oracle.named_parameters()})


def test_the_weights_stay_where_they_are() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        network, optimizer = make(dtype)
        addresses = {name: p.data_ptr() for name, p in network.named_parameters()}
        before = copied(dict(network.named_parameters()))
        loss_on(network, 0).backward()
        optimizer.step(1e-2)
        assert {name: p.data_ptr() for name, p in network.named_parameters()} == addresses
        assert not torch.equal(network.embed, before["embed"])


def test_frozen_parameters_are_converted_and_otherwise_left_alone() -> None:
    network = Small()
    network.embed.requires_grad_(False)
    optimizer = MasterAdamW(network, torch.bfloat16, TrainerConfig(**SETTINGS))
    before = network.embed.clone()
    loss_on(network, 0).backward()
    optimizer.step(1e-2)
    assert network.embed.dtype == torch.bfloat16
    assert torch.equal(network.embed, before)
    assert "embed" not in optimizer.masters
    assert "hidden.weight" in optimizer.masters


# ── gradients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_handed_over_by_the_backward_pass_itself(dtype: torch.dtype) -> None:
    network, optimizer = make(dtype)
    loss_on(network, 0).backward()
    assert all(parameter.grad is None for parameter in network.parameters())
    assert all(gradient.dtype == torch.float32 for gradient in optimizer.gradients().values())
    assert float(optimizer.gradients()["embed"].abs().sum()) > 0


def test_no_two_gradients_of_the_network_are_alive_at_once() -> None:
    network, _optimizer = make(torch.bfloat16)
    alive = []
    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: alive.append([p.grad for p in network.parameters()]))
    loss_on(network, 0).backward()
    assert alive == [[None] * 6] * 5


def test_micro_batches_add_up_to_one_batch_in_float32() -> None:
    whole, at_once = make()
    pieces, in_parts = make()
    generator = torch.Generator().manual_seed(0)
    tokens_T = torch.randint(0, 37, (24,), generator=generator)
    targets_T = (tokens_T * 7 + 3) % 37
    nn.functional.cross_entropy(whole(tokens_T), targets_T, reduction="sum").backward()
    for tokens, targets in zip(tokens_T.split(7), targets_T.split(7), strict=True):
        nn.functional.cross_entropy(pieces(tokens), targets, reduction="sum").backward()
        in_parts.accumulate()
    found, expected = in_parts.gradients(), at_once.gradients()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5)


def test_sums_over_micro_batches_keep_what_bfloat16_would_round_away() -> None:
    network, optimizer = make(torch.bfloat16)
    for value in (1.0, *[1e-3] * 100):
        network.norm.grad = torch.full_like(network.norm, value)
        optimizer.accumulate()
    expected = 1.0 + 100 * float(torch.tensor(1e-3, dtype=torch.bfloat16))
    torch.testing.assert_close(optimizer.gradients()["norm"], torch.full((24,), expected))


def test_a_step_without_a_gradient_is_a_step_of_zero_gradients() -> None:
    network, optimizer = make(weight_decay=0.0)
    before = copied(dict(network.named_parameters()))
    with fresh_memory_is_nan():
        assert optimizer.step(1e-2) == 0.0
        loss_on(network, 0).backward()
        assert optimizer.step(1e-2) > 0
    assert torch.equal(network.unused, before["unused"])


def test_discarded_gradients_leave_no_trace() -> None:
    (network, optimizer), (other, undisturbed) = make(), make()
    loss_on(network, 5).backward()
    optimizer.discard()
    for each, its_optimizer in ((network, optimizer), (other, undisturbed)):
        loss_on(each, 0).backward()
        its_optimizer.step(1e-2)
    assert_equal(copied(optimizer.masters), copied(undisturbed.masters))


def test_an_optimizer_that_is_gone_takes_no_gradients() -> None:
    network, optimizer = make()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    loss_on(network, 0).backward()
    assert network.embed.grad is not None


def test_the_squared_norms_may_be_summed_over_processes() -> None:
    network, optimizer = make()
    optimizer.sum_squares = lambda names, squares_P: (names, 4 * squares_P)
    loss_on(network, 0).backward()
    norm = nn.utils.get_total_norm(list(copied(optimizer.gradients()).values()))
    assert optimizer.step(1e-2) == pytest.approx(2 * float(norm), rel=1e-6)


# ── what is not finite ─────────────────────────────────────────────────────────────────────────────────────────────────

KEPT = [{"optimizer_states": "float32"}, {"optimizer_states": "int8"}]


@pytest.mark.parametrize("kept", KEPT, ids=["float32", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_no_bit(dtype: torch.dtype, kept: dict[str, Any], bad: float) -> None:
    network, optimizer = make(dtype, **kept)
    loss_on(network, 0).backward()
    optimizer.step(1e-2)
    weights, state = copied(dict(network.named_parameters())), copied(optimizer.state())
    loss_on(network, 1).backward()
    optimizer.gradients()["hidden.weight"][3, 4] = bad
    norms = optimizer.norms()
    optimizer.update(1e-2, norms)
    assert float(norms.skip) == 1.0
    assert norms.bad_parameters() == ["hidden.weight"]
    assert not math.isfinite(float(norms.total))
    assert_equal(copied(dict(network.named_parameters())), weights)
    state["updates"] += 1  # how often it was asked to; seeds the rounding
    assert_equal(copied(optimizer.state()), state)
    loss_on(network, 1).backward()
    assert optimizer.step(1e-2) > 0


def test_a_loss_that_is_not_finite_skips_the_step_whatever_the_gradient() -> None:
    network, optimizer = make()
    before = copied(dict(network.named_parameters()))
    loss_on(network, 0).backward()
    norms = optimizer.norms(loss=torch.tensor(math.inf))
    optimizer.update(1e-2, norms)
    assert float(norms.skip) == 1.0
    assert norms.bad_parameters() == []
    assert_equal(copied(dict(network.named_parameters())), before)


# ── the state in parts ─────────────────────────────────────────────────────────────────────────────────────────────────


def cut_small(monkeypatch: pytest.MonkeyPatch, elements: int = 2 * BLOCK) -> None:
    """Stretches so short that parameters lie across them."""
    monkeypatch.setattr(optimizer_module, "STRETCH_ELEMENTS", elements)


def train(network: Small, optimizer: MasterAdamW, steps: int = 8) -> dict[str, Tensor]:
    for step in range(steps):
        loss_on(network, step).backward()
        optimizer.step(1e-2)
    return copied(dict(network.named_parameters()))


@pytest.mark.parametrize("most", [BLOCK, 2 * BLOCK, 5 * BLOCK, None])
def test_every_element_is_in_exactly_one_stretch_and_no_stretch_mixes_matrices_and_vectors(most: int | None) -> None:
    tensors = dict(Small().named_parameters())
    layout = FlatLayout(tensors)
    seen = {name: torch.zeros(tensor.numel()) for name, tensor in tensors.items()}
    end = 0
    for stretch in layout.stretches(most):
        assert stretch.start == end
        assert stretch.length <= (most or layout.num_elements)
        end += stretch.length
        for piece in stretch.pieces:
            seen[piece.name][piece.start : piece.start + piece.length] += 1
            assert (tensors[piece.name].dim() > 1) == stretch.decayed
    assert end == layout.num_elements
    assert all(bool((count == 1).all()) for count in seen.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_passage_through_host_memory_changes_nothing(dtype: torch.dtype) -> None:
    """On the CPU the copies are real, only the streams are not."""
    expected = train(*make(dtype))
    network, optimizer = make(dtype)
    layout = FlatLayout(dict(network.named_parameters()))
    host = HostMemory(dict.fromkeys(optimizer._memory.tensors, (torch.float32, 1)), layout.num_elements, CPU)
    for name, tensor in optimizer._memory.tensors.items():
        host.tensors[name].copy_(tensor)
    optimizer._memory = host
    optimizer._stretches = layout.stretches(2 * BLOCK)
    found = train(network, optimizer)
    for name in expected:  # vectorised loops and their tails round differently, and a cut moves the tails
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)
    assert_equal({n: m.detach().to(dtype) for n, m in optimizer.masters.items()}, found)


def test_offloading_on_the_cpu_is_refused_with_a_reason() -> None:
    with pytest.raises(ConfigError, match="in host memory already") as caught:
        make(offload_optimizer=True)
    assert "int8" in caught.value.hint


# ── checkpoints ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kept", KEPT, ids=["float32", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_is_saved_and_loaded_continues_bit_for_bit(
    dtype: torch.dtype, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small(monkeypatch)
    network, optimizer = make(dtype, **kept)
    train(network, optimizer, 3)
    saved = copied(optimizer.state())
    expected = train(network, optimizer)
    other, resumed = make(dtype, **kept)
    train(other, resumed, 1)
    loss_on(other, 9).backward()  # a gradient that belongs to the past
    resumed.load_state(saved)
    assert_equal(train(other, resumed), expected)
    assert_equal(copied(resumed.state()), copied(optimizer.state()))


def test_a_state_of_another_kind_is_refused_with_the_key_to_set() -> None:
    saved = make(optimizer_states="int8")[1].state()
    with pytest.raises(RunFolderError, match="optimizer states are not float32") as caught:
        make()[1].load_state(saved)
    assert "trainer.optimizer_states" in caught.value.hint


def test_a_state_of_another_model_is_refused_and_changes_nothing() -> None:
    network, optimizer = make()
    saved = copied(optimizer.state()) | {"master/embed": torch.zeros(2, 2)}
    train(network, optimizer, 1)
    before = copied(optimizer.state())
    with pytest.raises(RunFolderError, match="another model: embed differs"):
        optimizer.load_state(saved)
    assert_equal(copied(optimizer.state()), before)
