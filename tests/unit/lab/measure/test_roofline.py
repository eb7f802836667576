from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.small_models import CONFIGS, SHAPE, random_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma3TextConfig, MixtralConfig, Qwen2Config

from redline.lab.material.workloads import SHAPES
from redline.lab.measure.machine import Machine
from redline.lab.measure.roofline import (
    NOT_KNOWN,
    Load,
    NetworkCost,
    TrainLoad,
    first_token_bound,
    generation_seconds,
    inter_token_bound,
    kv_bound,
    mean_load,
    memory_bound,
    prefill_seconds,
    step_seconds,
    throughput_bound,
    training_bound,
    training_flops,
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
    for name in ("llama, tied", "llama, untied", "qwen3_moe", "qwen3_moe, some layers"):
        with torch.device("meta"):
            ours = Decoder(spec_from_config(CONFIGS[name]), torch.empty(0))
        assert NetworkCost.of(GenericDecoder(random_model(CONFIGS[name]))) == NetworkCost.of(ours)


# ── windows and experts of families that transformers runs ─────────────────────────────────────────────────────────────

GEMMA = Gemma3TextConfig(**{**SHAPE, "num_hidden_layers": 6}, head_dim=16, sliding_window=64)
"""Five layers of six see 64 tokens."""


def seen(cost: NetworkCost, tokens: int) -> float:
    """Tokens that the last of so many sees, in a layer on average."""
    return tokens + sum(share * (min(tokens, window) - tokens) for window, share in cost.windows)


def test_windows_hide_keys_and_values_from_the_bounds() -> None:
    cost = NetworkCost.of(GenericDecoder(random_model(GEMMA)))
    assert cost.windows == ((64, pytest.approx(5 / 6)),)
    for prompt, n, lengths in ((100, 1, [2, 9, 40]), (30, 4, [90, 90]), (10, 2, [5, 5])):
        load = Load(len(lengths), prompt, n, 1, 100, np.repeat(lengths, n))
        steps = [t for length in lengths for t in range(1, length)]
        own, every = (sum(seen(cost, start + t) for t in steps) / len(steps) for start in (0, prompt))
        read = load.rows * (own + (every - own) / n) * cost.kv_bytes_per_token
        slow = Machine(bandwidth=1e6, flops=1e30, how="")
        assert step_seconds(cost, load, slow) == pytest.approx((cost.weight_bytes(load.rows) + read) / 1e6)
        each = [seen(cost, t) + (seen(cost, prompt + t) - seen(cost, t)) / n for t in lengths[::-1]]
        held = max((i + 1) * n * tokens for i, tokens in enumerate(each))
        assert kv_bound(cost, load).value == pytest.approx(held * cost.kv_bytes_per_token)
    pairs = sum(seen(cost, i) for i in range(1, 101))
    quick = Machine(bandwidth=1e30, flops=1e6, how="")
    prefill = cost.product_flops(100, 1) + cost.attention_flops * pairs
    assert prefill_seconds(cost, Load(1, 100, 1, 1, 1), quick) == pytest.approx(prefill / 1e6, rel=0.01)
    assert "83% of the layers see the last 64 tokens alone" in throughput_bound(cost, load, slow).why


def test_training_within_windows_needs_no_more_than_what_they_show() -> None:
    cost = NetworkCost.of(GenericDecoder(random_model(GEMMA)))
    whole = replace(cost, windows=())
    short, long = (TrainLoad.of(np.array([length, length]), 1, 1) for length in (64, 200))
    assert training_flops(cost, short) == training_flops(whole, short)
    pairs = 2 * sum(seen(cost, i) for i in range(1, 201))
    products = training_flops(replace(cost, attention_flops=0), long)
    exact = products + 3 * cost.attention_flops * pairs
    assert 0.9 * exact < training_flops(cost, long) <= exact < training_flops(whole, long)
    assert mean_load([short, long]).longest == 200


def test_experts_that_transformers_runs_are_read_and_multiplied_as_far_as_tokens_go_to_them() -> None:
    config = MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=1)
    model, length = random_model(config), 24
    model.set_experts_implementation("eager")  # torch does not count grouped products
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(2, 2 + length)[None]).logits.sum().backward()
    cost = NetworkCost.of(GenericDecoder(model))
    load = TrainLoad(sampled_tokens=length, tokens=length, trained_tokens=length, pairs=length**2)
    assert training_flops(cost, load) == pytest.approx(counter.get_total_flops(), rel=0.02)
    everything = sum(p.numel() for p in model.model.parameters()) - model.model.embed_tokens.weight.numel()
    assert cost.body_params + cost.idle_params == everything
    assert cost.weight_bytes(1) < 0.5 * cost.weight_bytes(100)


def test_of_experts_that_cannot_be_told_there_is_no_bound() -> None:
    cost = replace(cost_of("qwen2.5-0.5b"), is_known=False)
    load = Load(prompts=4, prompt_tokens=10, n=1, new_tokens=8, max_num_seqs=4)
    bounds = [bound(cost, load, H200) for bound in (throughput_bound, first_token_bound, inter_token_bound)]
    bounds.append(training_bound(cost, TrainLoad.of(np.array([8, 8]), 1, 1), H200))
    assert all(bound == NOT_KNOWN for bound in bounds)
    assert NOT_KNOWN.rate_of(100) == NOT_KNOWN.value == 0
    assert training_flops(cost, TrainLoad.of(np.array([8, 8]), 1, 1)) == 0
