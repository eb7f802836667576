from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.small_models import CONFIGS, random_model
from transformers import Qwen2Config

from redline.lab.material.workloads import SHAPES
from redline.lab.measure.machine import Machine
from redline.lab.measure.roofline import (
    Load,
    NetworkCost,
    first_token_bound,
    generation_seconds,
    inter_token_bound,
    kv_bound,
    memory_bound,
    prefill_seconds,
    step_seconds,
    throughput_bound,
)
from redline.models.decoder import Decoder
from redline.models.generic import GenericDecoder
from redline.models.spec import spec_from_config

H200 = Machine(bandwidth=4.24e12, flops=783e12, how="an H200")


def cost_of(shape: str) -> NetworkCost:
    """Of a network that takes no memory."""
    with torch.device("meta"):
        decoder = Decoder(spec_from_config(Qwen2Config(**SHAPES[shape])), torch.empty(0)).to(torch.bfloat16)
    return NetworkCost.of(decoder)


def load_at(context: int, batch: int) -> Load:
    """Whose mean context is as given."""
    return Load(prompts=batch, prompt_tokens=context - 1, n=1, new_tokens=2, max_num_seqs=batch)


@pytest.mark.parametrize(
    ("shape", "batch", "context", "tokens_per_s"),
    [
        ("qwen2.5-0.5b", 64, 512, 195e3),
        ("qwen2.5-0.5b", 512, 512, 516e3),
        ("qwen2.5-0.5b", 512, 1024, 292e3),
        ("qwen2.5-0.5b", 1024, 512, 584e3),
        ("qwen2.5-7b", 512, 512, 55e3),
    ],
)
def test_a_decode_step_on_an_h200_takes_what_was_computed_by_hand(
    shape: str, batch: int, context: int, tokens_per_s: float
) -> None:
    assert batch / step_seconds(cost_of(shape), load_at(context, batch), H200) == pytest.approx(tokens_per_s, rel=0.01)


def test_the_parameters_are_those_of_the_real_models() -> None:
    small, large = cost_of("qwen2.5-0.5b"), cost_of("qwen2.5-7b")
    assert small.body_params + small.head_params == 494_032_768
    assert large.body_params + 2 * large.head_params == 7_615_616_512
    assert small.kv_bytes_per_token == 12_288


def test_a_small_batch_waits_for_memory_and_a_large_prompt_for_products() -> None:
    cost = cost_of("qwen2.5-0.5b")
    assert step_seconds(cost, load_at(1, 1), H200) == pytest.approx(cost.weight_bytes(1) / H200.bandwidth, rel=1e-3)
    prompts = Load(prompts=512, prompt_tokens=512, n=1, new_tokens=2, max_num_seqs=512)
    flops = 512 * (512 * 2 * cost.body_params + 2 * cost.head_params + 512**2 / 2 * cost.attention_flops)
    assert prefill_seconds(cost, prompts, H200) == pytest.approx(flops / H200.flops)


def test_completions_of_one_prompt_read_it_once() -> None:
    cost = cost_of("qwen2.5-0.5b")
    apart = Load(prompts=64, prompt_tokens=512, n=1, new_tokens=512, max_num_seqs=64)
    together = Load(prompts=8, prompt_tokens=512, n=8, new_tokens=512, max_num_seqs=64)
    saved = step_seconds(cost, apart, H200) - step_seconds(cost, together, H200)
    assert saved == pytest.approx(56 * 512 * cost.kv_bytes_per_token / H200.bandwidth)


def test_the_whole_is_the_prompts_and_one_step_for_each_token_but_the_first() -> None:
    cost, load = cost_of("qwen2.5-0.5b"), Load(prompts=512, prompt_tokens=128, n=1, new_tokens=512, max_num_seqs=512)
    seconds = prefill_seconds(cost, load, H200) + 511 * step_seconds(cost, load, H200)
    bound = throughput_bound(cost, load, H200)
    assert bound.value == pytest.approx(512 * 512 / seconds)
    for part in ("262,144 tokens", "511 steps", "batch 512", "mean context 384", "0.988 GB", "12,288 bytes", "an H200"):
        assert part in bound.why


def test_who_does_not_fit_the_batch_waits_for_another_one() -> None:
    cost = cost_of("qwen2.5-0.5b")
    whole = Load(prompts=512, prompt_tokens=128, n=1, new_tokens=512, max_num_seqs=512)
    halves = replace(whole, max_num_seqs=256)
    assert throughput_bound(cost, halves, H200).value < throughput_bound(cost, whole, H200).value
    assert inter_token_bound(cost, halves, H200).value < inter_token_bound(cost, whole, H200).value
    assert first_token_bound(cost, halves, H200).value == first_token_bound(cost, whole, H200).value


def test_a_long_tail_takes_a_step_for_each_token_of_its_longest_and_reads_each_row_as_long_as_it_goes_on() -> None:
    cost = cost_of("qwen2.5-0.5b")
    load = Load(prompts=3, prompt_tokens=100, n=1, new_tokens=4, max_num_seqs=8, lengths_S=np.array([1, 3, 8]))
    read = 7 * cost.weight_bytes(2) + (2 * 100 + 1 + 2 + 7 * 100 + sum(range(1, 8))) * cost.kv_bytes_per_token
    assert 7 * step_seconds(cost, load, H200) == pytest.approx(read / H200.bandwidth)
    assert throughput_bound(cost, load, H200).value == pytest.approx(
        12 / (prefill_seconds(cost, load, H200) + read / H200.bandwidth)
    )
    assert kv_bound(cost, load).value == max(3 * 101, 2 * 103, 108) * 12_288


def test_a_long_tail_in_few_rows_takes_at_least_what_keeps_all_of_them_busy() -> None:
    load = Load(prompts=4, prompt_tokens=100, n=1, new_tokens=5, max_num_seqs=2, lengths_S=np.array([5, 5, 5, 6]))
    assert (load.steps, load.rows) == (8.5, 2)


def test_no_number_of_right_guesses_beats_the_products_of_every_token() -> None:
    """8 rows of 0.5B wait for its weights in every step. Guesses that are all right need the weights once."""
    cost = cost_of("qwen2.5-0.5b")
    load = Load(prompts=8, prompt_tokens=32, n=1, new_tokens=64, max_num_seqs=8)
    guessing = replace(load, guesses=True)
    assert generation_seconds(cost, load, H200) > 63 * cost.weight_bytes(8) / H200.bandwidth
    tokens, context = 8 * 63, load.context
    flops = 8 * (cost.product_flops(32, 1) + cost.attention_flops * 32 * 32 / 2)
    flops += tokens * (cost.product_flops(1, 1) + cost.attention_flops * context)
    least = max(flops / H200.flops, cost.weight_bytes(512) / H200.bandwidth)
    assert generation_seconds(cost, guessing, H200) == pytest.approx(least)
    assert throughput_bound(cost, guessing, H200).value == pytest.approx(512 / least)
    assert inter_token_bound(cost, guessing, H200).value == 0


def test_equal_lengths_cost_the_same_however_they_are_said() -> None:
    cost = cost_of("qwen2.5-0.5b")
    load = Load(prompts=512, prompt_tokens=128, n=2, new_tokens=512, max_num_seqs=300)
    said = replace(load, lengths_S=np.full(1024, 512))
    assert throughput_bound(cost, said, H200) == throughput_bound(cost, load, H200)
    assert kv_bound(cost, said) == kv_bound(cost, load)


def test_memory_holds_the_weights_and_every_key_and_value() -> None:
    cost, load = cost_of("qwen2.5-0.5b"), Load(prompts=2, prompt_tokens=100, n=4, new_tokens=10, max_num_seqs=8)
    kv = (2 * 100 + 8 * 10) * 12_288
    assert kv_bound(cost, load).value == kv
    assert memory_bound(cost, load, all_weights=1000).value == 1000 + kv


def test_a_network_of_transformers_costs_what_the_same_network_of_ours_does() -> None:
    for name in ("llama, tied", "llama, untied"):
        with torch.device("meta"):
            ours = Decoder(spec_from_config(CONFIGS[name]), torch.empty(0))
        assert NetworkCost.of(GenericDecoder(random_model(CONFIGS[name]))) == NetworkCost.of(ours)
