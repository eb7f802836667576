"""`redline bench trainer`: the formulas by hand, the same work on every side, and a whole run on the tiny model."""

from __future__ import annotations

import io
import json
import math
import time

import numpy as np
import pytest
import torch
from rich.console import Console
from support.small_models import CONFIGS, VOCAB_SIZE, random_model, write_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config

from redline.config.sections.trainer import TrainerConfig
from redline.errors import ConfigError
from redline.lab.bench.cases import trainer
from redline.lab.bench.settings import TrainerSettings, make_settings
from redline.lab.bench.table import render
from redline.lab.evidence.document import Document, Measured
from redline.lab.material.train_batches import long_tailed_lengths, random_batch
from redline.lab.material.workloads import SHAPES
from redline.lab.measure.machine import Machine
from redline.lab.measure.phases import PHASES, phase_seconds
from redline.lab.measure.roofline import NetworkCost, TrainLoad, training_bound, training_flops, training_memory_bound
from redline.lab.peers.training_sides import RedlineTraining, TransformersTraining, run_steps
from redline.models.decoder import Decoder
from redline.models.files.hf import load_decoder
from redline.models.generic import GenericDecoder
from redline.models.spec import spec_from_config
from redline.telemetry import span
from redline.types import TrainBatch

CPU = torch.device("cpu")
H200 = Machine(bandwidth=4.24e12, flops=783e12, how="an H200")
COMMON = ["model=builtin:tiny", "device=cpu", "dtype=float32", "num_threads=1"]


# ── what has to be computed ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sequence_alone_has_half_of_its_square_in_pairs() -> None:
    load = TrainLoad.of(np.array([3, 5]), prompt_tokens=1, group_size=1)
    assert (load.sampled_tokens, load.tokens, load.trained_tokens) == (8, 8, 6)
    assert load.pairs == (1 + 2 + 3) + (1 + 2 + 3 + 4 + 5)


def test_the_prompt_of_a_group_counts_once() -> None:
    load = TrainLoad.of(np.array([5, 6, 7, 4]), prompt_tokens=3, group_size=2)
    assert (load.sampled_tokens, load.tokens, load.trained_tokens) == (22, 22 - 2 * 3, 22 - 4 * 3)
    prompt = 1 + 2 + 3
    assert load.pairs == (prompt + (4 + 5) + (4 + 5 + 6)) + (prompt + (4 + 5 + 6 + 7) + 4)


def test_a_step_costs_three_forward_passes_of_products_and_of_attention() -> None:
    cost = NetworkCost(body_params=100, head_params=10, bytes_per_param=2, kv_bytes_per_token=0, attention_flops=4)
    load = TrainLoad(sampled_tokens=9, tokens=7, trained_tokens=5, pairs=11)
    assert training_flops(cost, load) == 6 * 100 * 7 + 6 * 10 * 5 + 12 * 11


def test_T1_on_an_h200_is_bounded_by_what_was_computed_by_hand() -> None:
    with torch.device("meta"):
        decoder = Decoder(spec_from_config(Qwen2Config(**SHAPES["qwen2.5-0.5b"])), torch.empty(0)).to(torch.bfloat16)
    load = TrainLoad.of(np.full(32, 512), prompt_tokens=1, group_size=1)
    flops = 6 * 357_898_112 * 16_384 + 6 * 136_134_656 * 16_352 + 12 * 24 * 14 * 64 * 32 * 512 * 513 // 2
    assert training_flops(NetworkCost.of(decoder), load) == flops
    bound = training_bound(NetworkCost.of(decoder), load, H200)
    assert training_bound(NetworkCost.of(decoder), load, H200, epochs=3).value == pytest.approx(3 * bound.value)
    assert 16_384 / bound.value == pytest.approx(258_500, rel=1e-3)
    for part in ("49.6 TFLOP", "16,384 tokens", "16,352 trained tokens", "4,202,496 pairs", "an H200"):
        assert part in bound.why


def test_the_formula_counts_what_torch_counts() -> None:
    """With eager attention, which computes the pairs that a query does not see as well, and all logits."""
    length, model = 24, random_model(CONFIGS["llama, untied"])
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(0, VOCAB_SIZE, (1, length))).logits.sum().backward()
    cost = NetworkCost.of(GenericDecoder(model))
    load = TrainLoad(sampled_tokens=length, tokens=length, trained_tokens=length, pairs=length**2)
    assert training_flops(cost, load) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_no_trainer_holds_less_than_the_weights_and_their_gradient() -> None:
    assert training_memory_bound(1000, 1000).value == 2000
    assert training_memory_bound(1000, 10).value == 1010


# ── batches ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_long_tail_has_the_same_tokens_and_a_few_long_sequences() -> None:
    lengths = long_tailed_lengths(32, 32 * 512, shortest=2, longest=4096, seed=0)
    assert lengths.sum() == 32 * 512
    assert lengths.max() > 4 * np.median(lengths)
    assert lengths.max() <= 4096
    assert lengths.min() >= 2
    assert (lengths == long_tailed_lengths(32, 32 * 512, 2, 4096, seed=0)).all()
    assert (lengths != long_tailed_lengths(32, 32 * 512, 2, 4096, seed=1)).any()


@pytest.mark.parametrize("total", [6, 7, 20, 29, 30])
def test_any_sum_between_the_shortest_and_the_longest_is_met(total: int) -> None:
    lengths = long_tailed_lengths(3, total, shortest=2, longest=10, seed=0)
    assert lengths.sum() == total
    assert lengths.min() >= 2
    assert lengths.max() <= 10


def make_batch(*lengths: int, prompt_tokens: int = 1, group_size: int = 1, seed: int = 0) -> TrainBatch:
    return random_batch(
        np.array(lengths), prompt_tokens=prompt_tokens, group_size=group_size, vocab_size=VOCAB_SIZE, key=(seed,)
    )


def test_a_group_shares_its_prompt_and_is_trained_on_the_rest() -> None:
    batch = make_batch(5, 6, 4, 7, prompt_tokens=3, group_size=2)
    rows = [batch.tokens[start:end] for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)]
    assert [len(row) for row in rows] == [5, 6, 4, 7]
    assert (rows[0][:3] == rows[1][:3]).all()
    assert (rows[0][:3] != rows[2][:3]).any()
    assert batch.group_offsets.tolist() == [0, 2, 4]
    assert batch.loss_mask[:5].tolist() == [False] * 3 + [True] * 2
    assert set(batch.old_logprobs[batch.loss_mask]) == {np.float32(-math.log(VOCAB_SIZE))}


def test_a_batch_repeats_with_its_key_and_only_then() -> None:
    assert (make_batch(9, 9).tokens == make_batch(9, 9).tokens).all()
    assert (make_batch(9, 9).tokens != make_batch(9, 9, seed=1).tokens).any()


# ── sides ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_both_sides_take_the_same_step(tmp_path, rows: int) -> None:
    """Loss and gradient norm, over two steps, so that the update is the same too."""
    model = write_model(tmp_path, CONFIGS["llama, tied"])
    config = TrainerConfig(learning_rate=1e-2, max_tokens_per_micro_batch=20)
    ours, theirs = (
        RedlineTraining(load_decoder(tmp_path), torch.float32, config),
        TransformersTraining(model, config, rows),
    )
    for seed in range(2):
        batch = make_batch(5, 8, 12, 7, prompt_tokens=4, group_size=2, seed=seed)
        step, expected = ours.step(batch), theirs.step(batch)
        assert step.loss == pytest.approx(expected.loss, rel=1e-4)
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert expected.micro_batches == math.ceil(4 / rows)
    assert ours.weight_bytes == theirs.weight_bytes


def test_a_run_counts_tokens_as_sampled_and_has_every_phase(tmp_path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    side = RedlineTraining(load_decoder(tmp_path), torch.float32, TrainerConfig())
    run = run_steps(side, [make_batch(6, 6, prompt_tokens=3, group_size=2, seed=seed) for seed in range(2)], CPU)
    assert run.num_tokens == 24
    assert len(run.steps) == 2
    assert run.step_s == run.seconds / 2
    assert all(run.phase_s[phase] > 0 for phase in PHASES.values())
    assert sum(run.phase_s.values()) <= run.seconds


def test_a_moment_belongs_to_the_innermost_span_and_to_no_phase_outside_of_all() -> None:
    inside: list[float] = []

    def work() -> str:
        with span("trainer.forward"):
            began = time.perf_counter()
            with span("trainer.reference"):
                time.sleep(0.02)
            inside.append(time.perf_counter() - began)
            time.sleep(0.001)
        return "done"

    began = time.perf_counter()
    result, seconds = phase_seconds(work, CPU)
    whole_s = time.perf_counter() - began
    assert result == "done"
    assert seconds.keys() == {*PHASES.values(), "other", "reference"}
    assert 0.02 <= seconds["reference"] <= inside[0]
    assert 0.001 <= seconds["forward"] <= whole_s - seconds["reference"]
    assert seconds["optimizer"] == 0


# ── settings ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_T1_is_32_sequences_of_512_tokens_and_its_tail_has_as_many() -> None:
    equal, tail = (make_settings("trainer", [f"workload={name}", "device=cpu"]) for name in ("T1", "t1-tail"))
    assert (equal.model, equal.sequences, equal.tokens, equal.lengths) == ("random:qwen2.5-0.5b", 32, 512, "equal")
    assert (tail.workload, tail.lengths, tail.longest) == ("T1-TAIL", "long-tailed", 4096)
    assert equal.total_tokens == tail.total_tokens == 16_384
    assert equal.peers == ("transformers",)


def test_whoever_pads_gets_as_many_rows_as_our_micro_batch_has_room_for_the_longest() -> None:
    def rows(*overrides: str) -> int:
        return trainer.Workload(make_settings("trainer", [*COMMON, *overrides]), vocab_size=50).peer_rows

    assert rows("tokens=512") == 32
    assert rows("tokens=512", "trainer.max_tokens_per_micro_batch=2048") == 4
    assert rows("tokens=512", "trainer.max_tokens_per_micro_batch=100") == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sequences=5 group_size=2", "sequences = 5 is no multiple of group_size = 2"),
        ("tokens=4 prompt_tokens=4", "nothing to train on"),
        ("longest=100", "less than the average"),
        ("trainer.learning_rat=1", "trainer.learning_rat: unknown key"),
        ("trainer.learning_rate=-1", "trainer.learning_rate = -1"),
        ("engine.block_size=16", "not of the form key=value"),
        ("peers=vllm", "peers = 'vllm'"),
        ("workload=W1", "trainer has no such workload"),
    ],
)
def test_what_cannot_be_trained_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_settings("trainer", [*COMMON, *override.split()])
    assert message in refused.value.message


# ── a whole run ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def measured() -> tuple[Measured, str]:
    console = Console(file=io.StringIO(), width=200)
    small = ["sequences=4", "tokens=24", "lengths=long-tailed", "prompt_tokens=4", "group_size=2", "pairs=6", "steps=2"]
    settings = make_settings("trainer", [*COMMON, *small, "peers=transformers,redline"])
    assert isinstance(settings, TrainerSettings)
    return trainer.measure(settings, console), console.file.getvalue()


def test_it_reports_throughput_for_each_peer_and_mfu_phases_and_memory(measured: tuple[Measured, str]) -> None:
    results = measured[0].results
    assert [(result.name, result.unit, result.peer.name) for result in results] == [
        ("throughput", "tok/s", "transformers"),
        ("throughput", "tok/s", "redline again"),
        ("MFU", "%", "transformers"),
        ("step", "s", "transformers"),
        ("peak memory", "bytes", "transformers"),
    ]
    assert measured[0].peers.keys() == {"transformers"}
    assert json.dumps(Document.of("trainer", "cpu", measured[0]).as_json(), allow_nan=False)


def test_mfu_is_the_least_time_over_the_time_taken(measured: tuple[Measured, str]) -> None:
    throughput, _, mfu, step, _ = measured[0].results
    assert mfu.value == pytest.approx(100 * throughput.fraction_of_bound)
    assert throughput.bound.value == pytest.approx(4 * 24 / step.bound.value)
    for sample, phases in zip(mfu.samples, throughput.samples, strict=True):
        assert sample["redline"] == pytest.approx(100 * step.bound.value / (phases["redline"]["seconds"] / 2))


def test_every_round_of_both_sides_is_kept_with_what_it_computed(measured: tuple[Measured, str]) -> None:
    throughput = measured[0].results[0]
    assert len(throughput.samples) == 6
    for sample in throughput.samples:
        assert sample.keys() == {"redline", "transformers"}
        assert len(sample["redline"]["loss"]) == 2
        assert sample["redline"]["loss"] == pytest.approx(sample["transformers"]["loss"], abs=1e-3)
        assert sample["redline"]["grad_norm"] == pytest.approx(sample["transformers"]["grad_norm"], rel=1e-2)


def test_time_and_memory_come_in_parts_of_both_sides(measured: tuple[Measured, str]) -> None:
    *_, step, memory = measured[0].results
    for parts in (step.details["parts"], step.details["peer_parts"]):
        assert parts.keys() >= {"data", "forward", "backward", "optimizer"}
    assert list(memory.details["parts"]) == ["weights", "optimizer states", "gradients", "activations"]
    assert sum(memory.details["parts"].values()) == memory.value
    assert memory.details["parts"]["weights"] == memory.details["peer_parts"]["weights"] == memory.bound.value / 2


def test_the_table_shows_the_parts(measured: tuple[Measured, str]) -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(render(Document.of("trainer", "cpu", measured[0])))
    shown = console.file.getvalue()
    for part in ("throughput", "MFU", "  forward", "  optimizer states", "  activations"):
        assert part in shown


def test_it_runs_without_a_peer() -> None:
    settings = make_settings("trainer", [*COMMON, "sequences=2", "tokens=8", "pairs=1", "peers=none"])
    results = trainer.measure(settings, Console(file=io.StringIO())).results
    assert [result.peer for result in results] == [None] * 4
