"""What the stages say they hold, beside what their tensors are; and the rest, beside what the system says."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.policy_training import Bench, make_bench
from support.tiny_engines import BYTES_PER_BLOCK, ask, make_model

from redline.models.sizes.in_use import MemoryUse, weight_bytes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("model"))


def num_parameters(bench: Bench) -> int:
    return sum(parameter.numel() for parameter in bench.oracle.parameters())


@pytest.mark.parametrize(
    ("dtype", "keys", "weights", "optimizer"),
    [
        (torch.float32, {}, 4, 8),
        (torch.bfloat16, {}, 2, 8 + 4),
        (torch.float32, {"optimizer_states": "int8"}, 4, 2),
        (torch.float32, {"kl_coef": 0.1}, 4 + 4, 8),
    ],
)
def test_a_trainer_says_how_many_bytes_each_parameter_takes(
    bench: Bench, dtype: torch.dtype, keys: dict[str, Any], weights: int, optimizer: int
) -> None:
    trainer, count = bench.trainer(dtype, **keys), num_parameters(bench)
    before = trainer.memory()
    assert before["weights"] == weights * count
    assert before["optimizer"] == pytest.approx(optimizer * count, rel=0.05)  # scales of int8, and rounding up of lengths
    assert before["gradients"] == before["activations_planned"] == 0
    trainer.step(bench.batches(1)[0])
    after = trainer.memory()
    assert after["gradients"] == pytest.approx(4 * count, rel=0.05)
    assert after["activations_planned"] > 0
    assert after["weights"] == before["weights"]


def test_a_critic_counts_and_what_it_shares_counts_once(bench: Bench) -> None:
    alone = bench.trainer().memory()
    with_critic = bench.trainer(advantages="gae").memory()
    assert with_critic["weights"] > 1.9 * alone["weights"]
    assert with_critic["optimizer"] > 1.9 * alone["optimizer"]
    network = bench.trainer()._decoder
    assert weight_bytes([network, network]) == weight_bytes([network]) == {"cpu": alone["weights"]}


def test_the_cache_of_an_engine_on_the_cpu_takes_the_blocks_that_were_used(tmp_path: Path) -> None:
    engine = make_model(tmp_path).engine(num_blocks=100, enable_prefix_caching=False)
    scratch = engine.memory()["kv_cache"]
    assert scratch == BYTES_PER_BLOCK
    engine.generate([ask(8, max_tokens=4, n=2)])
    used = engine.memory()["kv_cache"]
    assert 2 * BYTES_PER_BLOCK < used < 20 * BYTES_PER_BLOCK
    engine.generate([ask(8, max_tokens=4, n=2, seed=1)])
    assert engine.memory()["kv_cache"] == used, "the same blocks again"
    engine.sleep()
    assert engine.memory() == {"kv_cache": 0}


def test_with_prefixes_kept_other_blocks_are_used_until_all_were(tmp_path: Path) -> None:
    engine = make_model(tmp_path).engine(num_blocks=20)
    for seed in range(20):
        engine.generate([ask(9, max_tokens=4, seed=seed)])
    assert engine.memory()["kv_cache"] == (20 + 1) * BYTES_PER_BLOCK


# ── the rest ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_on_the_cpu_the_kinds_sum_to_resident_memory() -> None:
    held = torch.ones(2**22)
    use = MemoryUse(CPU, lambda: {"weights": held.nbytes, "activations_planned": 10**15})
    found, resident = use(), psutil.Process().memory_info().rss
    assert found["memory/weights_bytes"] == held.nbytes
    assert found["memory/weights_bytes"] + found["memory/other_bytes"] == pytest.approx(resident, rel=0.05)
    assert found["memory/peak_bytes"] == 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_on_cuda_the_kinds_sum_to_what_torch_has_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = {"memory_allocated": 700, "memory_reserved": 900, "max_memory_allocated": 800, "max_memory_reserved": 1000}
    for name, value in allocator.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    gradients = [200, 0]
    use = MemoryUse(torch.device("cuda"), lambda: {"weights": 300, "gradients": gradients.pop(0), "offloaded": 10_000})
    use()
    found = {key.removeprefix("memory/").removesuffix("_bytes"): size for key, size in use().items()}
    assert found == {
        "weights": 300,
        "gradients": 0,
        "offloaded": 10_000,
        "activations": 400,
        "activations_peak": 300,  # the gradients were there when it was reached
        "fragmentation": 200,
        "peak": 1000,
    }
    assert found["weights"] + found["gradients"] + found["activations"] + found["fragmentation"] == 900
