from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redline.engine.sampler import sample, stream, uniform

LAST_BELOW_ONE = 1 - 2.0**-53
VOCABULARIES = (1, 2, 3, 127, 128, 129, 255, 300, 1000)
"""Around the sizes at which a two-level search changes its mind."""


class SplitMix64:
    """As in the reference code by Sebastiano Vigna (https://prng.di.unimi.it/splitmix64.c), in Python's own integers."""

    def __init__(self, state: int) -> None:
        self.state = state % 2**64

    def next(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) % 2**64
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)


def numbers(stream_id: int, count: int) -> torch.Tensor:
    return uniform(torch.full((count,), stream_id, dtype=torch.int64), torch.arange(count))


# ── the random numbers ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_reference_generator_here_gives_its_published_numbers() -> None:
    generator = SplitMix64(1234567)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [generator.next() for _ in published] == published


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_stream_is_the_upper_53_bits_of_splitmix64(seed: int) -> None:
    generator = SplitMix64(seed)
    assert numbers(seed, 20).tolist() == [(generator.next() >> 11) / 2**53 for _ in range(20)]


@given(st.integers(0, 2**63 - 1), st.integers(0, 50))
def test_the_stream_of_a_completion_is_a_number_of_its_requests_stream(seed: int, index: int) -> None:
    generator = SplitMix64(seed)
    expected = [generator.next() for _ in range(index + 1)][-1]
    assert stream(seed, index) % 2**64 == expected


def test_numbers_are_uniform_within_a_stream_and_across_streams() -> None:
    """Kolmogorov–Smirnov at one in a million: sqrt(n) · D < 2.7."""
    along = numbers(stream(7, 0), 20_000)
    across = uniform(torch.tensor([stream(7, index) for index in range(5_000)]), torch.zeros(5_000, dtype=torch.int64))
    seeds = uniform(torch.tensor([stream(seed, 0) for seed in range(5_000)]), torch.zeros(5_000, dtype=torch.int64))
    for drawn in (along, across, seeds):
        in_order = np.sort(drawn.numpy())
        steps = np.arange(len(in_order) + 1) / len(in_order)
        distance = max(np.abs(in_order - steps[1:]).max(), np.abs(in_order - steps[:-1]).max())
        assert math.sqrt(len(in_order)) * distance < 2.7
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / math.sqrt(len(drawn))


def test_no_two_completions_share_a_stream() -> None:
    streams = {stream(seed, index) for seed in range(100) for index in range(64)}
    assert len(streams) == 6400


# ── sampling ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def log_softmax(logits: np.ndarray) -> np.ndarray:
    centred = logits.astype(np.float64) - logits.max()
    return centred - np.log(np.exp(centred).sum())


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(logits))


def evenly(count: int) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def draw(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """One row of logits, sampled with each of the numbers."""
    rows = logits.expand(len(uniforms), -1)
    sampled = sample(rows, torch.full((len(uniforms),), temperature), uniforms)
    return sampled.tokens_B.numpy(), sampled.logprobs_B.numpy()


@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("spread", [0.5, 5.0])
def test_evenly_spread_numbers_hit_each_token_as_often_as_its_probability(size: int, spread: float) -> None:
    """The numbers (i + ½)/n fall into a share p of the unit interval n·p times, give or take one; so do they here."""
    logits = spread * torch.randn(size, generator=torch.Generator().manual_seed(size))
    n = 20_000
    tokens, _ = draw(logits, evenly(n))
    counts = np.bincount(tokens, minlength=size)
    assert np.abs(counts - n * softmax(logits.numpy())).max() < 1.5


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_temperature_divides_the_logits(temperature: float) -> None:
    logits = 2 * torch.randn(77, generator=torch.Generator().manual_seed(0))
    n = 20_000
    tokens, logprobs = draw(logits, evenly(n), temperature)
    expected = softmax(logits.numpy() / temperature)
    assert np.abs(np.bincount(tokens, minlength=77) - n * expected).max() < 1.5
    np.testing.assert_allclose(logprobs, np.log(expected)[tokens], atol=1e-5)


@pytest.mark.parametrize("size", VOCABULARIES)
def test_random_numbers_pass_a_chi_square_test(size: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(size))
    tokens, _ = draw(logits, numbers(stream(3, size), 20_000))
    expected = 20_000 * softmax(logits.numpy())
    chi_square = ((np.bincount(tokens, minlength=size) - expected) ** 2 / expected).sum()
    freedom = size - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("number", [0.0, 2.0**-53, 0.5, LAST_BELOW_ONE])
def test_a_number_at_the_edge_gives_a_token_that_can_be(size: int, number: float) -> None:
    """Tokens of no probability at both ends and in between are never chosen, whatever the rounding."""
    generator = torch.Generator().manual_seed(size)
    for _ in range(20):
        logits = 3 * torch.randn(size, generator=generator)
        impossible = torch.rand(size, generator=generator) < 0.7
        impossible[torch.randint(size, (1,), generator=generator)] = False
        logits[impossible] = -math.inf
        tokens, logprobs = draw(logits, torch.tensor([number], dtype=torch.float64))
        assert not impossible[tokens[0]]
        assert np.isfinite(logprobs[0])
        if number == 0:
            assert tokens[0] == int(torch.nonzero(~impossible)[0])


@pytest.mark.parametrize("size", [1, 128, 129, 256, 1000])
def test_the_last_number_below_one_stays_inside_the_vocabulary(size: int) -> None:
    """Weights of very different sizes sum to slightly different totals in different orders; the search must not fall off."""
    logits = 12 * torch.randn(3000, size, generator=torch.Generator().manual_seed(size))
    numbers_B = torch.full((3000,), LAST_BELOW_ONE, dtype=torch.float64)
    sampled = sample(logits, torch.ones(3000), numbers_B)
    assert bool((sampled.tokens_B < size).all())
    assert bool(sampled.logprobs_B.isfinite().all())


@pytest.mark.parametrize("size", VOCABULARIES)
def test_impossible_tokens_are_never_sampled(size: int) -> None:
    """Whole blocks of a padded vocabulary may be impossible."""
    logits = torch.full((size,), -math.inf)
    possible = [size // 2, size - 1]
    logits[possible] = 0.0
    tokens, logprobs = draw(logits, evenly(1000))
    assert set(tokens.tolist()) == set(possible)
    np.testing.assert_allclose(logprobs, -math.log(len(set(possible))), atol=1e-6)


@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("height", [200.0, 1e4, 3e38])
def test_a_certain_token_is_always_sampled(size: int, height: float) -> None:
    for certain in {0, size // 3, size - 1}:
        logits = torch.zeros(size)
        logits[certain] = height
        tokens, logprobs = draw(logits, torch.tensor([0.0, 0.3, 0.7, LAST_BELOW_ONE], dtype=torch.float64))
        assert tokens.tolist() == [certain] * 4
        np.testing.assert_allclose(logprobs, 0.0, atol=1e-6)


@given(st.integers(1, 400), st.integers(0, 2**31), st.sampled_from([0.1, 1.0, 30.0]), st.floats(0.25, 4.0))
def test_logprobs_are_those_of_the_distribution_sampled_from(size: int, seed: int, spread: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(4, size, generator=generator)
    sampled = sample(logits, torch.full((4,), temperature), torch.rand(4, generator=generator, dtype=torch.float64))
    for row in range(4):
        expected = log_softmax(logits[row].double().numpy() / np.float32(temperature))[sampled.tokens_B[row]]
        assert sampled.logprobs_B[row] == pytest.approx(expected, abs=1e-4 * max(1.0, spread))


def test_temperature_zero_takes_the_largest_logit_whatever_the_number() -> None:
    logits = torch.randn(500, 300, generator=torch.Generator().manual_seed(0))
    sampled = sample(logits, torch.zeros(500), torch.rand(500, dtype=torch.float64))
    assert torch.equal(sampled.tokens_B, logits.argmax(dim=-1))
    expected = torch.log_softmax(logits.double(), dim=-1).amax(dim=-1)
    torch.testing.assert_close(sampled.logprobs_B.double(), expected, rtol=0, atol=1e-5)


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    temperatures = torch.tensor([0.0, 1.0, 0.0, 0.5, 2.0, 0.0])
    numbers_B = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    together = sample(logits, temperatures, numbers_B)
    for row in range(6):
        alone = sample(logits[row : row + 1], temperatures[row : row + 1], numbers_B[row : row + 1])
        assert alone.tokens_B[0] == together.tokens_B[row]
        assert alone.logprobs_B[0] == together.logprobs_B[row]


def test_bfloat16_logits_are_sampled_in_full_precision() -> None:
    """In bfloat16 the sum of a thousand equal weights would stop growing at 256."""
    logits = torch.zeros(1000, dtype=torch.bfloat16)
    tokens, logprobs = draw(logits, evenly(1000))
    assert np.bincount(tokens, minlength=1000).tolist() == [1] * 1000
    assert logprobs.dtype == np.float32
    np.testing.assert_allclose(logprobs, -math.log(1000), atol=1e-5)


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sample(logits, torch.tensor([0.0, 1.0, 0.5]), torch.rand(3, dtype=torch.float64))
    assert torch.equal(logits, before)
