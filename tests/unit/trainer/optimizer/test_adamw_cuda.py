"""The optimizer and the checkpoint writer on a CUDA device."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.config.sections.trainer import TrainerConfig
from redline.kernels import available
from redline.trainer.checkpoints.background import CheckpointWriter
from redline.trainer.checkpoints.folder import load_checkpoint
from redline.trainer.optimizer import adamw as optimizer_module
from redline.trainer.optimizer.adamw import MasterAdamW

pytestmark = pytest.mark.gpu

WAYS = {
    "float32": {},
    "int8": {"optimizer_states": "int8"},
    "float32 on the host": {"offload_optimizer": True},
    "int8 on the host": {"optimizer_states": "int8", "offload_optimizer": True},
}
DTYPES = [torch.float32, torch.bfloat16]


def make(dtype: torch.dtype, size: int = 300, **config: Any) -> tuple[nn.Sequential, MasterAdamW]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(1000, size), nn.Linear(size, 2 * size), nn.SiLU(), nn.Linear(2 * size, 1000)).cuda()
    settings = TrainerConfig(**{"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, **config})
    return network, MasterAdamW(network, dtype, settings)


def train(network: nn.Sequential, optimizer: MasterAdamW, steps: range) -> dict[str, Tensor]:
    for step in steps:
        for micro_batch in range(2):
            generator = torch.Generator("cuda").manual_seed(2 * step + micro_batch)
            tokens_T = torch.randint(0, 1000, (256,), device="cuda", generator=generator)
            nn.functional.cross_entropy(network(tokens_T).float(), (tokens_T * 7 + 3) % 1000).backward()
            optimizer.accumulate()
        optimizer.update(1e-3, optimizer.norms())
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_are_those_of_torchs_adamw_with_its_clipping(dtype: torch.dtype) -> None:
    network, optimizer = make(dtype)
    masters = {name: master.detach().clone().requires_grad_() for name, master in optimizer.masters.items()}
    groups = [
        {"params": [m for m in masters.values() if m.dim() > 1], "weight_decay": 0.1},
        {"params": [m for m in masters.values() if m.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    for step in range(5):
        tokens_T = torch.arange(200 * step, 200 * step + 200, device="cuda") % 1000
        nn.functional.cross_entropy(network(tokens_T).float(), (tokens_T * 7 + 3) % 1000).backward()
        for name, gradient in optimizer.gradients().items():
            masters[name].grad = gradient.clone()
        norm = nn.utils.clip_grad_norm_(masters.values(), 0.5)
        adamw.step()
        assert optimizer.step(1e-3) == pytest.approx(float(norm), rel=1e-5)
    assert_close(dict(optimizer.masters), masters, 1e-6)
    for name, master in optimizer.masters.items():
        assert torch.equal(network.get_parameter(name), master.to(dtype)), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("states", ["float32", "int8"])
def test_a_passage_through_host_memory_changes_nothing(
    dtype: torch.dtype, states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stretches so short that the streams have something to get wrong."""
    monkeypatch.setattr(optimizer_module, "STRETCH_ELEMENTS", 2**14)
    expected = train(*make(dtype, optimizer_states=states), range(10))
    network, optimizer = make(dtype, optimizer_states=states, offload_optimizer=True)
    there = train(network, optimizer, range(10))
    assert_close(there, expected, 0.0)
    assert all(tensor.is_pinned() and not tensor.is_cuda for tensor in optimizer._memory.tensors.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("states", "apart"), [("float32", 0.01), ("int8", 0.15)])
def test_without_triton_training_is_the_same(
    dtype: torch.dtype, states: str, apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the numbers that 8-bit moments are rounded by."""
    before, by_kernel = (train(*make(dtype, optimizer_states=states), range(steps)) for steps in (0, 5))
    monkeypatch.setattr(available, "has_triton", lambda: False)
    network, optimizer = make(dtype, optimizer_states=states)
    assert optimizer._kernel is None
    by_torch = train(network, optimizer, range(5))
    for name, start in before.items():
        moved = float((by_torch[name].float() - start.float()).norm())
        assert float((by_kernel[name].float() - by_torch[name].float()).norm()) < apart * moved, name


def test_weights_that_have_moved_are_found() -> None:
    """An engine that sleeps frees the weights it shares, and they come back elsewhere."""
    results = []
    for moves in (False, True):
        network, optimizer = make(torch.bfloat16)
        train(network, optimizer, range(2))
        for parameter in network.parameters() if moves else ():
            parameter.data = parameter.data.clone()
        results.append(train(network, optimizer, range(2, 4)))
    assert_close(results[1], results[0], 0.0)


def test_offloaded_state_takes_no_device_memory_between_steps() -> None:
    used = {}
    for offload in (False, True):
        gc.collect()
        before = torch.cuda.memory_allocated()
        network, optimizer = make(torch.bfloat16, size=2000, offload_optimizer=offload)
        train(network, optimizer, range(2))
        torch.cuda.synchronize()
        used[offload] = torch.cuda.memory_allocated() - before
        weights = sum(parameter.nbytes for parameter in network.parameters())
        del network, optimizer
    assert used[False] > 6.9 * weights  # bfloat16 weights, float32 masters and two moments: 2 + 12 bytes each
    assert used[True] < 1.2 * weights


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_is_not_finite_changes_no_bit(dtype: torch.dtype, way: dict[str, Any]) -> None:
    network, optimizer = make(dtype, **way)
    before = train(network, optimizer, range(2))
    state = {name: tensor.clone() for name, tensor in optimizer.state().items() if name != "updates"}
    network(torch.arange(10, device="cuda")).sum().backward()
    optimizer.gradients()["1.weight"][0, 0] = math.nan
    norms = optimizer.norms()
    optimizer.update(1e-3, norms)
    assert norms.bad_parameters() == ["1.weight"]
    assert_close({name: tensor.detach() for name, tensor in network.state_dict().items()}, before, 0.0)
    after = optimizer.state()
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("states", ["float32", "int8"])
def test_an_update_does_not_wait_for_the_device(states: str) -> None:
    network, optimizer = make(torch.bfloat16, optimizer_states=states)
    train(network, optimizer, range(2))
    network(torch.arange(10, device="cuda")).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norms = optimizer.norms()
        optimizer.update(1e-3, norms)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(float(norms.total))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_checkpoint_taken_between_steps_continues_as_if_nothing_was(way: dict[str, Any], tmp_path: Path) -> None:
    writer = CheckpointWriter()
    network, optimizer = make(torch.bfloat16, size=1000, **way)
    train(network, optimizer, range(3))
    writer.save(tmp_path / "step-000003", 3, optimizer.state())
    expected = train(network, optimizer, range(3, 6))  # while the copy and the write go on
    writer.close()
    resumed_network, resumed = make(torch.bfloat16, size=1000, **way)
    resumed.load_state(load_checkpoint(tmp_path / "step-000003").tensors)
    assert_close(train(resumed_network, resumed, range(3, 6)), expected, 0.0)
