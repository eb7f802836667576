"""What a step is said to need, beside what torch counts and what one counts by hand; and the peak it is a share of."""

from __future__ import annotations

import pytest
import torch
from support.fakes import Attempt, train_batch
from support.policy_training import Bench, make_bench
from torch.utils.flop_counter import FlopCounterMode

from redline.kernels.cpu import attention
from redline.models.attention import padded
from redline.models.sizes.peak import data_sheet, find_peak
from redline.trainer.batches.micro_batches import plan_micro_batches

CPU = torch.device("cpu")
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(autouse=True)
def attention_in_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts no operation of its fused attention on a CPU, nor of C."""
    monkeypatch.setattr(padded, "has_batched_products", lambda: True)
    monkeypatch.setattr(attention, "is_there", lambda *_: False)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("model"), "llama, untied")


def attempt(prompt: list[int], length: int) -> Attempt:
    return Attempt([(prompt, False), ([1] * length, True)], 1.0)


def triangle(length: int) -> int:
    return length * (length + 1) // 2


@pytest.mark.parametrize("max_tokens", [1000, 12])
def test_the_load_of_a_plan_has_each_prompt_once_however_it_is_cut(max_tokens: int) -> None:
    batch = train_batch([[attempt(PROMPT, 3), attempt(PROMPT, 5)], [attempt([3, 4], 2)], [attempt(PROMPT, 4)]])
    load = plan_micro_batches(batch, max_tokens).load
    assert load.sampled_tokens == (7 + 3) + (7 + 5) + (2 + 2) + (7 + 4)
    assert load.tokens == (7 + 3 + 5) + 4 + 11
    assert load.trained_tokens == 3 + 5 + 2 + 4
    shared = triangle(7) + (3 * 7 + triangle(3)) + (5 * 7 + triangle(5))
    assert load.pairs == shared + triangle(4) + triangle(11)


def test_sequences_without_a_trained_token_cost_nothing() -> None:
    batch = train_batch([[attempt(PROMPT, 3), Attempt([(PROMPT, False)], 0.0)]])
    load = plan_micro_batches(batch, 1000).load
    assert (load.sampled_tokens, load.trained_tokens, load.pairs) == (10, 3, triangle(10))


def counted(bench: Bench, **keys: object) -> tuple[int, int]:
    """Of a step on one long batch: what it reports, and the products that torch counts."""
    prompt = list(range(2, 20))
    batch = train_batch([[attempt(prompt, 30), attempt(prompt, 40)]])
    trainer = bench.trainer(**keys)
    with FlopCounterMode(display=False) as counter:
        report = trainer.step(batch)
    return report.flops, counter.get_total_flops()


def test_a_step_reports_what_torch_counts_but_for_pairs_that_nobody_sees(bench: Bench) -> None:
    reported, products = counted(bench)
    assert reported <= products
    assert reported == pytest.approx(products, rel=0.15)


def test_with_frozen_weights_a_step_reports_less(bench: Bench) -> None:
    whole, _ = counted(bench)
    reported, products = counted(bench, lora={"rank": 2})
    assert reported < 0.8 * whole
    assert reported == pytest.approx(products, rel=0.15)


def test_what_is_computed_again_does_not_count(bench: Bench) -> None:
    once, products = counted(bench)
    again, more_products = counted(bench, gradient_checkpointing="full")
    assert more_products > 1.2 * products
    assert again == once


# ── the peak ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
    ],
)
def test_the_data_sheet_is_that_of_the_very_gpu(name: str, tflops: float | None) -> None:
    assert data_sheet(name) == tflops


def test_a_cpu_has_no_peak_unless_somebody_says_it_or_it_is_measured() -> None:
    assert find_peak(CPU, torch.float32, "auto") is None
    stated = find_peak(CPU, torch.float32, 1.5)
    assert stated is not None
    assert stated.flops == 1.5e12
    measured = find_peak(CPU, torch.float32, "measure")
    assert measured is not None
    assert 1e9 < measured.flops < 1e15
    assert "1024³" in measured.why
