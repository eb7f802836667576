"""`redline bench memory`: the search, what it is told by one try, and how a step's memory is divided."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from redline.errors import ConfigError, TrainingError
from redline.lab.bench import memory_probe
from redline.lab.bench.cases import memory
from redline.lab.bench.cases.memory import largest
from redline.lab.bench.memory_probe import Found
from redline.lab.bench.settings import MemorySettings, make_settings
from redline.lab.material.networks import make_network
from redline.lab.measure.machine import MemoryMeter
from redline.lab.measure.phases import memory_by_kind
from redline.lab.measure.roofline import micro_batch_bound
from redline.lab.peers.training_sides import RedlineTraining
from redline.models.sizes.memory import token_bytes
from redline.telemetry import span

MEGABYTE = 2**20
COMMON = ["model=builtin:tiny", "device=cpu", "dtype=float32", "num_threads=1"]


# ── the search ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("first", [1, 7, 64, 500])
@pytest.mark.parametrize("limit", [1, 2, 6, 7, 8, 63, 64, 99, 100])
def test_the_search_finds_the_limit_whatever_it_tries_first(limit: int, first: int) -> None:
    assert largest(lambda number: number <= limit, first, most=100) == limit


def test_no_number_is_tried_twice_nor_beyond_the_most() -> None:
    tried: list[int] = []
    largest(lambda number: tried.append(number) or number <= 37, first=1, most=60)
    assert tried == [1, 2, 4, 8, 16, 32, 60, 46, 39, 35, 37, 38]


def test_if_nothing_fits_the_answer_is_nothing() -> None:
    assert largest(lambda _: False, first=8, most=100) == 0


def test_a_tolerance_saves_tries() -> None:
    tried: list[int] = []
    found = largest(lambda number: tried.append(number) or number <= 1000, first=1, most=10**6, tolerance=0.05)
    assert 950 <= found <= 1000
    assert len(tried) == 15


# ── what fills the memory ──────────────────────────────────────────────────────────────────────────────────────────────


def touched(megabytes: int) -> np.ndarray:
    block = np.zeros(megabytes * MEGABYTE, np.uint8)
    block[::4096] = 1
    return block


def test_a_step_is_divided_into_what_stays_what_the_optimizer_finds_and_the_rest() -> None:
    gc.collect()
    meter = MemoryMeter(torch.device("cpu"))
    weights, states = touched(32), touched(64)

    def step() -> None:
        with span("trainer.forward"):
            activations = touched(96)
        with span("trainer.backward"):
            gradients = touched(16)
            del activations
        with span("trainer.optimizer"):
            gradients[0] = 2

    found = memory_by_kind(step, meter, weights.nbytes)
    by_hand = {"weights": 32, "optimizer states": 64, "gradients": 16, "activations": 96}
    assert found.as_json() == pytest.approx({kind: size * MEGABYTE for kind, size in by_hand.items()}, abs=4 * MEGABYTE)
    assert found.peak == sum(found.as_json().values())
    del states


def test_a_micro_batch_has_room_for_the_inputs_of_its_layers() -> None:
    bound = micro_batch_bound(limit_bytes=10_000, all_weights=1_000, trained=1_000, bytes_per_token=100)
    assert bound.value == 80
    assert micro_batch_bound(limit_bytes=1_000, all_weights=1_000, trained=1_000, bytes_per_token=100).value == 0


# ── a try ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def settings(*overrides: str) -> MemorySettings:
    made = make_settings("memory", [*COMMON, "tokens=16", "limit_bytes=100_000_000", *overrides])
    assert isinstance(made, MemorySettings)
    return made


@pytest.mark.parametrize("side", ["redline", "transformers"])
def test_a_try_says_what_filled_the_memory(side: str) -> None:
    found = memory_probe.train(settings(), side, sequences=3)
    assert found.memory.keys() == {"weights", "optimizer states", "gradients", "activations"}
    assert found.bytes_per_token == 3 * 64 * 4  # two layers' inputs and the last one's output, 64 float32 each
    assert found.planned is None  # a trainer on a CPU plans no memory


def test_of_an_adapter_only_its_own_weights_have_a_gradient() -> None:
    network = make_network("builtin:tiny", torch.device("cpu"), torch.float32, seed=0)
    whole = memory_probe._planned(network.decoder, settings(), sequences=1)
    assert whole["optimizer states"] == 2 * whole["weights"] == 2 * whole["gradients"]
    RedlineTraining(network.decoder, torch.float32, settings("trainer.lora.rank=4").trainer)
    adapted = memory_probe._planned(network.decoder, settings("trainer.lora.rank=4"), sequences=1)
    adapter = adapted["weights"] - whole["weights"]
    assert adapted["optimizer states"] == 2 * adapted["gradients"] == 2 * adapter
    assert memory_probe.train(settings("trainer.lora.rank=4"), "redline", sequences=1).trained_bytes == adapter
    assert memory_probe.train(settings(), "redline", sequences=1).trained_bytes == whole["weights"]


def test_the_plan_counts_the_layers_that_run_on_the_device() -> None:
    network = make_network("builtin:tiny", torch.device("cpu"), torch.bfloat16, seed=0)
    spec, count = network.decoder.spec, sum(parameter.numel() for parameter in network.decoder.parameters())
    on_gpu = settings().model_copy(update={"device": "cuda", "dtype": "bfloat16"})
    plans = [memory_probe._planned(network.decoder, on_gpu, sequences)["activations"] for sequences in (0, 100)]
    fused, eager = (token_bytes(spec, count, torch.bfloat16, "none", code).training for code in ("fused", "eager"))
    assert plans[1] - plans[0] == 100 * 16 * fused < 100 * 16 * eager


def test_running_out_of_memory_is_an_answer_and_any_other_error_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(message: str):
        def step(*_: object) -> None:
            raise RuntimeError(message)

        return step

    monkeypatch.setattr(memory_probe.RedlineTraining, "step", failing("DefaultCPUAllocator: can't allocate memory: 9 bytes"))
    assert memory_probe.train(settings(), "redline", sequences=1).memory is None
    monkeypatch.setattr(memory_probe.RedlineTraining, "step", failing("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        memory_probe.train(settings(), "redline", sequences=1)


# ── the case ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def known_machine(settings: MemorySettings, side: str, sequences: int) -> Found:
    """Stands in for the process: 1 MB for every sequence, twice that in transformers; from 200 on it runs out."""
    per_sequence = {"redline": 1_000_000, "transformers": 2_000_000}[side]
    activations = sequences * per_sequence
    if activations >= 200_000_000:
        return Found(None)
    kinds = {"weights": 500, "optimizer states": 1000, "gradients": 500, "activations": activations}
    return Found(kinds, {**kinds, "gradients": 2500} if side == "redline" else None, bytes_per_token=768)


def test_the_largest_micro_batch_of_each_side_is_found_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "probe", known_machine)
    measured = memory.measure(settings("tolerance=0"), Console(quiet=True))
    tokens, filled, plan = measured.results
    assert (tokens.value, tokens.peer.value) == (99 * 16, 49 * 16)
    assert tokens.peer.ratio == pytest.approx(99 / 49)
    assert tokens.bound.value == (100_000_000 - 1000) // 768
    assert filled.details["parts"]["activations"] == 99_000_000
    assert filled.details["peer_parts"]["activations"] == 98_000_000
    assert filled.value == plan.bound.value == 99_002_000
    assert plan.value == 99_004_000
    first = tokens.samples[0]
    assert (first["side"], first["tokens"], first["fits"]) == ("redline", 4096, False)
    assert first["memory"] is None


def test_the_bound_of_an_adapter_has_no_gradient_of_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "probe", lambda *asked: replace(known_machine(*asked), trained_bytes=20, planned=None))
    tokens, _ = memory.measure(settings("tolerance=0", "trainer.lora.rank=4"), Console(quiet=True)).results
    assert tokens.bound.value == (100_000_000 - 520) // 768
    assert tokens.peer is None  # transformers would train all weights


def test_a_limit_below_one_sequence_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "probe", known_machine)
    with pytest.raises(TrainingError, match="not even one sequence of 16 tokens fits in 5,000 bytes") as refused:
        memory.measure(settings("limit_bytes=5000"), Console(quiet=True))
    assert "limit_bytes" in refused.value.hint


def test_the_cpu_has_to_be_given_a_limit() -> None:
    with pytest.raises(ConfigError) as refused:
        make_settings("memory", COMMON)
    assert "limit_bytes=" in refused.value.hint


def test_the_size_that_is_searched_for_cannot_be_given() -> None:
    with pytest.raises(ConfigError, match="is what is searched for"):
        make_settings("memory", [*COMMON, "limit_bytes=1000", "trainer.max_tokens_per_micro_batch=64"])
