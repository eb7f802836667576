from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redline.engine.native.running import sampler
from redline.engine.native.running.sampler import CANDIDATES, Sampled, SamplingRows, sample, stream, uniform
from redline.kernels.cpu.draws import draws

LAST_BELOW_ONE = 1 - 2.0**-53
VOCABULARIES = (1, 2, 3, 127, 128, 129, 255, 300, 1000)
"""Around the sizes at which a two-level search changes its mind."""


@pytest.fixture(scope="module", params=["C", "torch"], autouse=True)
def by(request: pytest.FixtureRequest) -> Iterator[None]:
    """Who draws on a CPU; the filters, and what more is asked for, are torch's."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(sampler, "draws", lambda: None)
        elif draws() is None:
            pytest.skip("no compiler here, or torch computes with other threads")
        yield


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


def streams_giving(uniforms: np.ndarray) -> torch.Tensor:
    """Streams whose number 0 these are, to 53 bits: splitmix64 backwards."""
    z = (uniforms * 2**53).astype(np.uint64) << np.uint64(11)
    for multiplier, shift in ((1, 31), (0x94D049BB133111EB, 27), (0xBF58476D1CE4E5B9, 30)):
        z = z * np.uint64(pow(multiplier, -1, 2**64))
        mixed = z
        for _ in range(64 // shift):
            z = mixed ^ (z >> np.uint64(shift))
    return torch.from_numpy((z - np.uint64(0x9E3779B97F4A7C15)).view(np.int64))


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


def test_a_stream_can_be_found_for_any_number() -> None:
    wanted = np.concatenate([[0.0, 2.0**-53, 0.5, LAST_BELOW_ONE], np.random.default_rng(0).random(1000)])
    streams_B = streams_giving(wanted)
    assert uniform(streams_B, torch.zeros_like(streams_B)).tolist() == wanted.tolist()


def test_no_two_completions_share_a_stream() -> None:
    streams = {stream(seed, index) for seed in range(100) for index in range(64)}
    assert len(streams) == 6400


# ── an oracle ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def log_softmax(logits: np.ndarray) -> np.ndarray:
    centred = logits.astype(np.float64) - logits.max()
    return centred - np.log(np.exp(centred).sum())


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(logits))


def only(kept: list[int], logprobs: np.ndarray) -> np.ndarray:
    """The distribution, restricted and renormalised."""
    restricted = np.full(len(logprobs), -np.inf)
    restricted[kept] = log_softmax(logprobs[kept])
    return restricted


def keep_top_k(logprobs: np.ndarray, k: int) -> np.ndarray:
    return only(sorted(range(len(logprobs)), key=lambda i: (-logprobs[i], i))[: k or None], logprobs)


def keep_top_p(logprobs: np.ndarray, p: float) -> np.ndarray:
    kept: list[int] = []
    for token in sorted(range(len(logprobs)), key=lambda i: (-logprobs[i], i)):
        if kept and p < 1 and np.exp(logprobs[kept]).sum() >= p:
            break
        kept.append(token)
    return only(kept, logprobs)


def keep_min_p(logprobs: np.ndarray, min_p: float) -> np.ndarray:
    return only([i for i in range(len(logprobs)) if math.exp(logprobs[i] - logprobs.max()) >= min_p], logprobs)


def distribution(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    bias: np.ndarray | float = 0.0,
    forbidden: tuple[int, ...] = (),
) -> np.ndarray:
    """Log-probabilities of what a row is sampled from, in float64."""
    biased = logits.astype(np.float64) + bias
    biased[list(forbidden)] = -np.inf
    tempered = log_softmax(biased / np.float32(temperature or 1.0))
    return keep_min_p(keep_top_p(keep_top_k(tempered, top_k), np.float32(top_p)), np.float32(min_p))


def fits(tokens: np.ndarray, logprobs: np.ndarray) -> bool:
    """A chi-square test of the counts; five standard deviations, so that a right sampler fails once in a million seeds."""
    expected = len(tokens) * np.exp(logprobs)
    counts, possible = np.bincount(tokens, minlength=len(logprobs)), expected > 0
    if counts[~possible].any():
        return False
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = int(possible.sum()) - 1
    return bool(chi_square <= freedom + 5 * math.sqrt(2 * freedom))


# ── plain sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────

DTYPES = {"top_k_B": torch.int32, "stops_BS": torch.int64, "min_tokens_B": torch.int64}


def as_rows(streams_B: torch.Tensor, temperature: Any = 1.0, counters: Any = 0, **columns: Any) -> SamplingRows:
    """Rows that share what is given as one value."""
    count = len(streams_B)

    def column(name: str, value: Any) -> torch.Tensor:
        tensor = torch.as_tensor(value, dtype=DTYPES.get(name, torch.float32))
        return tensor.expand(count, -1) if name in ("bias_BV", "stops_BS") else tensor.expand(count)

    counters_B = torch.as_tensor(counters, dtype=torch.int64).expand(count)
    optional = {name: column(name, value) for name, value in columns.items()}
    return SamplingRows(column("temperature_B", temperature), streams_B, counters_B, **optional)


def row_of(rows: SamplingRows, row: int) -> SamplingRows:
    columns = {f.name: getattr(rows, f.name) for f in fields(rows)}
    return SamplingRows(**{name: None if column is None else column[row : row + 1] for name, column in columns.items()})


def random_streams(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def evenly(count: int) -> np.ndarray:
    return (np.arange(count) + 0.5) / count


def draw(logits: torch.Tensor, uniforms: np.ndarray, **columns: Any) -> tuple[np.ndarray, np.ndarray]:
    """One row of logits, sampled with each of the numbers."""
    sampled = sample(logits.expand(len(uniforms), -1), as_rows(streams_giving(uniforms), **columns))
    return sampled.tokens_B.numpy(), sampled.logprobs_B.numpy()


@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("spread", [0.5, 5.0])
def test_evenly_spread_numbers_hit_each_token_as_often_as_its_probability(size: int, spread: float) -> None:
    """The numbers (i + ½)/n fall into a share p of the unit interval n·p times, give or take one; so do they here."""
    logits = spread * gaussian(size, seed=size)
    n = 20_000
    tokens, _ = draw(logits, evenly(n))
    counts = np.bincount(tokens, minlength=size)
    assert np.abs(counts - n * softmax(logits.numpy())).max() < 1.5


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_temperature_divides_the_logits(temperature: float) -> None:
    logits = 2 * gaussian(77)
    n = 20_000
    tokens, logprobs = draw(logits, evenly(n), temperature=temperature)
    expected = softmax(logits.numpy() / temperature)
    assert np.abs(np.bincount(tokens, minlength=77) - n * expected).max() < 1.5
    np.testing.assert_allclose(logprobs, np.log(expected)[tokens], atol=1e-5)


@pytest.mark.parametrize("size", VOCABULARIES)
def test_random_numbers_pass_a_chi_square_test(size: int) -> None:
    logits = gaussian(size, seed=size)
    rows = as_rows(torch.tensor(stream(3, size)).expand(20_000), counters=torch.arange(20_000))
    tokens = sample(logits.expand(20_000, -1), rows).tokens_B.numpy()
    assert fits(tokens, log_softmax(logits.numpy()))
    assert size == 1 or not fits(tokens, log_softmax(1.2 * logits.numpy()))


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
        tokens, logprobs = draw(logits, np.array([number]))
        assert not impossible[tokens[0]]
        assert np.isfinite(logprobs[0])
        if number == 0:
            assert tokens[0] == int(torch.nonzero(~impossible)[0])


@pytest.mark.parametrize("size", [1, 128, 129, 256, 1000])
def test_the_last_number_below_one_stays_inside_the_vocabulary(size: int) -> None:
    """Weights of very different sizes sum to slightly different totals in different orders; the search must not fall off."""
    sampled = sample(12 * gaussian(3000, size, seed=size), as_rows(streams_giving(np.full(3000, LAST_BELOW_ONE))))
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
        tokens, logprobs = draw(logits, np.array([0.0, 0.3, 0.7, LAST_BELOW_ONE]))
        assert tokens.tolist() == [certain] * 4
        np.testing.assert_allclose(logprobs, 0.0, atol=1e-6)


@given(st.integers(1, 400), st.integers(0, 2**31), st.sampled_from([0.1, 1.0, 30.0]), st.floats(0.25, 4.0))
def test_logprobs_are_those_of_the_distribution_sampled_from(size: int, seed: int, spread: float, temperature: float) -> None:
    logits = spread * gaussian(4, size, seed=seed)
    sampled = sample(logits, as_rows(random_streams(4, seed), temperature))
    for row in range(4):
        expected = log_softmax(logits[row].double().numpy() / np.float32(temperature))[sampled.tokens_B[row]]
        assert sampled.logprobs_B[row] == pytest.approx(expected, abs=1e-4 * max(1.0, spread))


def test_temperature_zero_takes_the_largest_logit_whatever_the_number() -> None:
    logits = gaussian(500, 300)
    sampled = sample(logits, as_rows(random_streams(500), temperature=0.0))
    assert torch.equal(sampled.tokens_B, logits.argmax(dim=-1))
    expected = torch.log_softmax(logits.double(), dim=-1).amax(dim=-1)
    torch.testing.assert_close(sampled.logprobs_B.double(), expected, rtol=0, atol=1e-5)


def test_temperature_zero_tells_logits_apart_whose_weights_round_to_the_same() -> None:
    logits = torch.zeros(2, 300)
    logits[:, 7], logits[0, 250], logits[1, 9] = 1e-12, 2e-12, 2e-12
    assert sample(logits, as_rows(random_streams(2), temperature=0.0)).tokens_B.tolist() == [250, 9]


def test_of_equal_largest_logits_temperature_zero_takes_the_first() -> None:
    logits = torch.zeros(3, 300)
    logits[0, [5, 6, 299]], logits[1, [130, 140, 280]] = 1.0, 1.0
    assert sample(logits, as_rows(random_streams(3), temperature=0.0)).tokens_B.tolist() == [5, 130, 0]


def test_bfloat16_logits_are_sampled_in_full_precision() -> None:
    """In bfloat16 the sum of a thousand equal weights would stop growing at 256."""
    logits = torch.zeros(1000, dtype=torch.bfloat16)
    tokens, logprobs = draw(logits, evenly(1000))
    assert np.bincount(tokens, minlength=1000).tolist() == [1] * 1000
    assert logprobs.dtype == np.float32
    np.testing.assert_allclose(logprobs, -math.log(1000), atol=1e-5)


# ── filters ────────────────────────────────────────────────────────────────────────────────────────────────────────────

LOGITS = 1.5 * gaussian(60, seed=4).numpy()


def without_its_least_likely(logprobs: np.ndarray) -> np.ndarray:
    return keep_top_k(logprobs, int(np.isfinite(logprobs).sum()) - 1)


def and_one_more(logprobs: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    return keep_top_k(distribution(LOGITS, temperature), int(np.isfinite(logprobs).sum()) + 1)


FILTERS: dict[str, tuple[dict[str, float], list[Callable[[], np.ndarray]]]] = {
    "top-k": (
        {"top_k": 7},
        [lambda: distribution(LOGITS, top_k=6), lambda: distribution(LOGITS, top_k=8), lambda: distribution(LOGITS)],
    ),
    "top-p": (
        {"top_p": 0.8},
        [
            lambda: without_its_least_likely(distribution(LOGITS, top_p=0.8)),
            lambda: and_one_more(distribution(LOGITS, top_p=0.8)),
        ],
    ),
    "min-p": (
        {"min_p": 0.15},
        [
            lambda: only(np.flatnonzero(softmax(LOGITS) >= 0.15).tolist(), log_softmax(LOGITS)),  # of 1, not of the likeliest
            lambda: without_its_least_likely(distribution(LOGITS, min_p=0.15)),
            lambda: and_one_more(distribution(LOGITS, min_p=0.15)),
        ],
    ),
    "top-p at a temperature": (
        {"top_p": 0.8, "temperature": 1.6},
        [lambda: distribution(distribution(LOGITS, top_p=0.8), temperature=1.6)],  # filtered before it is tempered
    ),
    "min-p at a temperature": (
        {"min_p": 0.15, "temperature": 0.6},
        [lambda: distribution(distribution(LOGITS, min_p=0.15), temperature=0.6)],
    ),
    "top-k and top-p": (
        {"top_k": 12, "top_p": 0.7},
        [
            lambda: distribution(LOGITS, top_p=0.7),  # of the whole mass, not of what top-k left
            lambda: distribution(LOGITS, top_k=12),
        ],
    ),
    "all, top-p the strictest": (
        {"top_k": 16, "top_p": 0.7, "min_p": 0.1},
        [
            lambda: distribution(LOGITS, top_k=16, min_p=0.1),
            lambda: distribution(LOGITS, top_p=0.7, min_p=0.1),
            lambda: keep_top_p(distribution(LOGITS, top_k=16, min_p=0.1), 0.7),  # min-p before top-p
        ],
    ),
    "all, min-p the strictest": (
        {"top_k": 16, "top_p": 0.8, "min_p": 0.2},
        [
            lambda: distribution(LOGITS, top_k=16, top_p=0.8),
            lambda: keep_top_p(distribution(LOGITS, top_k=16, min_p=0.2), 0.8),
        ],
    ),
}


@pytest.mark.parametrize("name", FILTERS)
def test_frequencies_follow_the_filtered_distribution_and_no_other(name: str) -> None:
    given, mistakes = FILTERS[name]
    columns = {key if key == "temperature" else f"{key}_B": value for key, value in given.items()}
    rows = as_rows(torch.tensor(stream(11, 0)).expand(20_000), counters=torch.arange(20_000), **columns)
    sampled = sample(torch.from_numpy(LOGITS).expand(20_000, -1), rows)
    expected, tokens = distribution(LOGITS, **given), sampled.tokens_B.numpy()  # type: ignore[arg-type]
    assert fits(tokens, expected)
    np.testing.assert_allclose(sampled.logprobs_B, expected[tokens], atol=1e-5)
    for mistaken in mistakes:
        assert not fits(tokens, mistaken())


def test_top_k_keeps_exactly_k_and_of_equals_the_lower_ids() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0, 1.0])
    tokens, logprobs = draw(logits, evenly(1000), top_k_B=4)
    assert set(tokens.tolist()) == {0, 1, 2, 3}
    np.testing.assert_allclose(logprobs, distribution(logits.numpy(), top_k=4)[tokens], atol=1e-6)


def test_top_k_of_one_is_greedy() -> None:
    logits = gaussian(200, 300).bfloat16()
    sampled = sample(logits, as_rows(random_streams(200), top_k_B=1))
    assert torch.equal(sampled.tokens_B, logits.argmax(dim=-1))
    assert sampled.logprobs_B.tolist() == [0.0] * 200


def test_top_p_keeps_the_token_that_crosses_and_none_once_it_is_reached() -> None:
    """Of four equal tokens, half the mass is two; a little more is three."""
    logits = torch.zeros(4)
    assert set(draw(logits, evenly(100), top_p_B=0.5)[0].tolist()) == {0, 1}
    assert set(draw(logits, evenly(100), top_p_B=0.51)[0].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("columns", [{"top_p_B": 0.0}, {"top_p_B": 1e-9}, {"min_p_B": 1.0}])
def test_the_strictest_filter_leaves_the_likeliest_token(columns: dict[str, float]) -> None:
    logits = gaussian(50, 300)
    sampled = sample(logits, as_rows(random_streams(50), **columns))
    assert torch.equal(sampled.tokens_B, logits.argmax(dim=-1))
    assert sampled.logprobs_B.tolist() == [0.0] * 50


def test_a_limit_above_the_vocabulary_is_none() -> None:
    logits, streams_B = gaussian(20, 30), random_streams(20)
    plain = sample(logits, as_rows(streams_B))
    limited = sample(logits, as_rows(streams_B, top_k_B=31, top_p_B=1.0, min_p_B=0.0))
    assert torch.equal(plain.tokens_B, limited.tokens_B)
    assert torch.equal(plain.logprobs_B, limited.logprobs_B)


def in_any_order(sampled: Sampled, row: int) -> np.ndarray:
    """The row's whole distribution, by token."""
    assert sampled.top_ids_BK is not None
    assert sampled.top_logprobs_BK is not None
    by_token = np.empty(sampled.top_ids_BK.shape[1])
    by_token[sampled.top_ids_BK[row]] = sampled.top_logprobs_BK[row]
    return by_token


def mixed_rows(count: int, size: int, seed: int) -> tuple[torch.Tensor, SamplingRows, list[np.ndarray]]:
    """Rows that each use some of what there is, and the distribution that each is sampled from. Every third row has logits with
    many equals."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(count, size)) * generator.choice([0.3, 2.0, 8.0], (count, 1))
    logits = np.where(np.arange(count)[:, None] % 3 == 0, np.round(logits), logits).astype(np.float32)
    temperature = generator.choice([0.0, 0.5, 1.0, 1.7], count).astype(np.float32)
    top_k = generator.choice([0, 0, 1, 3, 40, size // 2 + 1, size + 5], count)
    top_p = generator.choice([1.0, 1.0, 0.2, 0.9, 0.9999], count).astype(np.float32)
    min_p = generator.choice([0.0, 0.0, 0.03, 0.3], count).astype(np.float32)
    bias = np.where(generator.random((count, size)) < 0.1, generator.normal(size=(count, size)), 0.0).astype(np.float32)
    bias[np.arange(count) % 4 == 1] = np.where(generator.random(size) < 0.5, -np.inf, 0.0)
    stops = generator.integers(-1, size, (count, 3))
    counters, min_tokens = generator.integers(0, 4, count), generator.integers(0, 4, count)
    rows = as_rows(
        random_streams(count, seed), torch.from_numpy(temperature), torch.from_numpy(counters),
        top_k_B=top_k, top_p_B=top_p, min_p_B=min_p, bias_BV=bias, stops_BS=stops, min_tokens_B=min_tokens,
    )  # fmt: skip
    expected = [
        distribution(
            logits[row], temperature[row], top_k[row], top_p[row], min_p[row], bias[row],
            tuple(stop for stop in stops[row] if stop >= 0 and counters[row] < min_tokens[row]),
        )
        for row in range(count)
    ]  # fmt: skip
    return torch.from_numpy(logits), rows, expected


@pytest.mark.parametrize(("count", "size"), [(300, 50), (60, 2 * CANDIDATES + 3), (6, 9 * CANDIDATES)])
def test_rows_that_use_everything_have_the_distribution_of_the_oracle(count: int, size: int) -> None:
    """All of it, token by token, in vocabularies below and above what a CPU sorts at once."""
    logits, rows, expected = mixed_rows(count, size, seed=1)
    sampled = sample(logits, rows, top=size)
    uniforms = uniform(rows.streams_B, rows.counters_B).numpy()
    for row, logprobs in enumerate(expected):
        np.testing.assert_allclose(in_any_order(sampled, row), logprobs, rtol=1e-5, atol=2e-5)
        token = int(sampled.tokens_B[row])
        cumulative = np.exp(logprobs).cumsum()
        drawn = int(np.searchsorted(cumulative, uniforms[row] * cumulative[-1], side="right"))
        assert token == (logprobs.argmax() if rows.temperature_B[row] == 0 else drawn)
        assert sampled.logprobs_B[row].item() == pytest.approx(logprobs[token], abs=2e-5)


def test_more_equals_than_a_cpu_sorts_at_once_are_cut_at_the_lower_ids() -> None:
    size, k = 4 * CANDIDATES, CANDIDATES + 7
    logits = torch.zeros(2, size)
    logits[:, size - 1] = 1.0
    rows = as_rows(random_streams(2), top_k_B=[k, 0], top_p_B=[1.0, 0.25])
    sampled = sample(logits, rows, top=size)
    for row, logprobs in enumerate([distribution(logits[0].numpy(), top_k=k), distribution(logits[0].numpy(), top_p=0.25)]):
        np.testing.assert_allclose(in_any_order(sampled, row), logprobs, atol=1e-5)


def test_top_p_takes_its_share_of_a_top_k_that_a_cpu_does_not_sort_at_once() -> None:
    logits = torch.linspace(0, 1, 9 * CANDIDATES)
    k = 5 * CANDIDATES
    sampled = sample(logits[None], as_rows(random_streams(1), top_k_B=k, top_p_B=0.1), top=len(logits))
    np.testing.assert_allclose(in_any_order(sampled, 0), distribution(logits.numpy(), top_k=k, top_p=0.1), atol=1e-5)


# ── bias, masks, stop tokens ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_bias_is_added_before_the_temperature() -> None:
    bias = np.zeros(60, dtype=np.float32)
    bias[[3, 30]] = [4.0, -2.0]
    rows = as_rows(torch.tensor(stream(5, 0)).expand(20_000), temperature=0.5, counters=torch.arange(20_000), bias_BV=bias)
    tokens = sample(torch.from_numpy(LOGITS).expand(20_000, -1), rows).tokens_B.numpy()
    assert fits(tokens, distribution(LOGITS, temperature=0.5, bias=bias))
    assert not fits(tokens, log_softmax(LOGITS / 0.5 + bias))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_a_mask_allows_is_sampled(temperature: float) -> None:
    allowed = [2, 31, 59]
    bias = np.full(60, -np.inf, dtype=np.float32)
    bias[allowed] = 0.0
    tokens, logprobs = draw(torch.from_numpy(LOGITS), evenly(500), temperature=temperature, bias_BV=bias)
    likeliest = allowed[int(LOGITS[allowed].argmax())]
    assert set(tokens.tolist()) == ({likeliest} if temperature == 0 else set(allowed))
    np.testing.assert_allclose(logprobs, only(allowed, log_softmax(LOGITS))[tokens], atol=1e-5)


def test_stop_tokens_are_forbidden_until_the_row_has_enough() -> None:
    """Token 0 is a stop token beside the padding that is sent to it; an id beyond the vocabulary is none."""
    logits = torch.zeros(6, 8)
    logits[:, [0, 5]] = 50.0
    rows = as_rows(
        random_streams(6), temperature=[0.0, 0.0, 0.0, 1.0, 1.0, 1.0], counters=torch.tensor([0, 2, 3, 0, 2, 3]),
        stops_BS=[0, 5, -1, 100], min_tokens_B=3,
    )  # fmt: skip
    sampled = sample(logits, rows)
    assert [token in (0, 5) for token in sampled.tokens_B.tolist()] == [False, False, True] * 2
    np.testing.assert_allclose(sampled.logprobs_B, [-math.log(6)] * 2 + [-math.log(2)] + [-math.log(6)] * 2 + [-math.log(2)])


def test_padding_forbids_nothing() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 0] = 50.0
    rows = as_rows(random_streams(1), stops_BS=[-1, -1], min_tokens_B=3)
    assert sample(logits, rows).tokens_B.tolist() == [0]


# ── further logprobs ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_raw_logprobs_are_those_of_the_model_itself() -> None:
    logits, rows, _ = mixed_rows(100, 50, seed=2)
    sampled = sample(logits, rows, raw=True)
    assert sampled.raw_logprobs_B is not None
    expected = [log_softmax(logits[row].numpy())[token] for row, token in enumerate(sampled.tokens_B)]
    np.testing.assert_allclose(sampled.raw_logprobs_B, expected, atol=1e-5)


def test_raw_logprobs_of_bfloat16_logits_are_in_full_precision() -> None:
    sampled = sample(torch.zeros(1, 1000, dtype=torch.bfloat16), as_rows(random_streams(1)), raw=True)
    assert sampled.raw_logprobs_B is not None
    assert sampled.raw_logprobs_B.dtype == torch.float32
    assert sampled.raw_logprobs_B.item() == pytest.approx(-math.log(1000))


def test_top_logprobs_are_the_likeliest_of_the_distribution_sampled_from() -> None:
    logits = gaussian(9, 300)
    rows = as_rows(random_streams(9), temperature=[0.0, 0.5, 2.0] * 3, top_k_B=[0, 0, 0, 8, 8, 8, 3, 3, 3])
    sampled = sample(logits, rows, top=5)
    assert sampled.top_ids_BK is not None
    assert sampled.top_logprobs_BK is not None
    for row in range(9):
        assert rows.top_k_B is not None
        expected = distribution(logits[row].numpy(), float(rows.temperature_B[row]), int(rows.top_k_B[row]))
        np.testing.assert_allclose(sampled.top_logprobs_BK[row], np.sort(expected)[::-1][:5], atol=1e-5)
        alive = 3 if row >= 6 else 5
        assert sampled.top_ids_BK[row, :alive].tolist() == np.argsort(-expected)[:alive].tolist()
        assert bool((sampled.top_ids_BK[row] < 300).all())


def test_what_was_not_asked_for_is_not_there() -> None:
    sampled = sample(gaussian(2, 30), as_rows(random_streams(2)))
    assert sampled.raw_logprobs_B is None
    assert sampled.top_ids_BK is None
    assert sampled.top_logprobs_BK is None


# ── rows in company ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [50, 300, 3 * CANDIDATES])
def test_a_row_is_sampled_the_same_in_any_company(size: int) -> None:
    logits, rows, _ = mixed_rows(24, size, seed=3)
    together = sample(logits, rows, raw=True, top=4)
    for row in range(24):
        alone = sample(logits[row : row + 1], row_of(rows, row), raw=True, top=4)
        for name in (f.name for f in fields(Sampled)):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row]), name


@pytest.mark.parametrize("size", [50, 300, 3 * CANDIDATES])
def test_a_plain_row_does_not_notice_the_filters_of_others(size: int) -> None:
    logits, rows, _ = mixed_rows(8, size, seed=4)
    assert rows.top_k_B is not None and rows.top_p_B is not None and rows.min_p_B is not None  # noqa: PT018
    assert rows.bias_BV is not None and rows.min_tokens_B is not None  # noqa: PT018
    for column, nothing in ((rows.top_k_B, 0), (rows.top_p_B, 1), (rows.min_p_B, 0), (rows.bias_BV, 0), (rows.min_tokens_B, 0)):
        column[::2] = nothing
    together = sample(logits, rows, top=size)
    plain = SamplingRows(rows.temperature_B[::2], rows.streams_B[::2], rows.counters_B[::2])
    alone = sample(logits[::2], plain, top=size)
    assert torch.equal(alone.tokens_B, together.tokens_B[::2])
    assert torch.equal(alone.logprobs_B, together.logprobs_B[::2])
    for row in range(4):
        assert np.array_equal(in_any_order(alone, row), in_any_order(together, 2 * row))


FAULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a NaN at the start": lambda logits: logits[:1].fill_(math.nan),
    "a NaN in the middle": lambda logits: logits[len(logits) // 2 :][:1].fill_(math.nan),
    "a NaN at the end": lambda logits: logits[-1:].fill_(math.nan),
    "NaN alone": lambda logits: logits.fill_(math.nan),
    "an infinite logit": lambda logits: logits[3:4].fill_(math.inf),
    "nothing allowed": lambda logits: logits.fill_(-math.inf),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("size", [7, 128, 300, 2 * CANDIDATES])
@pytest.mark.parametrize("filtered", [False, True])
def test_a_faulty_row_gets_nan_and_harms_no_other(fault: str, size: int, filtered: bool) -> None:
    logits = gaussian(9, size, seed=size)
    filters = {"top_k_B": [0, 0, 0, 5, 5, 5, 0, 0, 0], "top_p_B": [1.0] * 6 + [0.9] * 3, "min_p_B": [0.0, 0.05, 0.0] * 3}
    rows = as_rows(random_streams(9), temperature=[0.0, 1.0, 0.5] * 3, **(filters if filtered else {}))
    healthy = sample(logits, rows, top=3)
    faulty = [1, 3, 6, 8]
    for row in faulty:
        FAULTS[fault](logits[row])
    sampled = sample(logits, rows, top=3)
    assert bool(((sampled.tokens_B >= 0) & (sampled.tokens_B < size)).all())
    assert sampled.top_ids_BK is not None
    assert bool(((sampled.top_ids_BK >= 0) & (sampled.top_ids_BK < size)).all())
    assert sampled.logprobs_B.isnan().nonzero().flatten().tolist() == faulty
    others = [row for row in range(9) if row not in faulty]
    for name in ("tokens_B", "logprobs_B", "top_ids_BK", "top_logprobs_BK"):
        assert torch.equal(getattr(sampled, name)[others], getattr(healthy, name)[others])


def test_a_mask_that_allows_nothing_gives_nan() -> None:
    bias = torch.zeros(3, 40)
    bias[1] = -math.inf
    rows = as_rows(random_streams(3), temperature=[1.0, 0.0, 1.0], bias_BV=bias, top_k_B=5, top_p_B=0.9, min_p_B=0.1)
    assert sample(gaussian(3, 40), rows).logprobs_B.isnan().tolist() == [False, True, False]


def test_inputs_are_left_as_they_were() -> None:
    logits, rows, _ = mixed_rows(12, 64, seed=5)
    columns = {f.name: getattr(rows, f.name) for f in fields(rows)}
    before = {name: column.clone() for name, column in columns.items()}
    for dtype in (torch.float32, torch.bfloat16):
        given = logits.to(dtype)
        kept = given.clone()
        sample(given, rows, raw=True, top=3)
        sample(given, SamplingRows(rows.temperature_B, rows.streams_B, rows.counters_B))
        assert torch.equal(given, kept)
    for name, column in columns.items():
        assert torch.equal(column, before[name]), name


def test_nothing_waits_for_a_device() -> None:
    """Tensors of the meta device have no values to look at; a CUDA graph could not be captured around such a look either."""
    logits, rows, _ = mixed_rows(4, 2 * CANDIDATES, seed=6)
    on_meta = SamplingRows(**{f.name: getattr(rows, f.name).to("meta") for f in fields(rows)})
    sampled = sample(logits.to("meta"), on_meta, raw=True, top=3)
    assert sampled.tokens_B.shape == (4,)
    assert sampled.top_logprobs_BK is not None
    assert sampled.top_logprobs_BK.shape == (4, 3)


@pytest.mark.gpu
def test_a_captured_graph_samples_as_a_cpu_does() -> None:
    logits, rows, _ = mixed_rows(32, 3 * CANDIDATES, seed=7)
    on_device = SamplingRows(**{f.name: getattr(rows, f.name).contiguous().cuda() for f in fields(rows)})
    logits_BV = logits.cuda()
    sample(logits_BV, on_device, raw=True, top=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampled = sample(logits_BV, on_device, raw=True, top=4)
    graph.replay()
    expected = sample(logits, rows, raw=True, top=4)
    assert torch.equal(sampled.tokens_B.cpu(), expected.tokens_B)
    torch.testing.assert_close(sampled.logprobs_B.cpu(), expected.logprobs_B, rtol=0, atol=1e-5)
    torch.testing.assert_close(sampled.raw_logprobs_B.cpu(), expected.raw_logprobs_B, rtol=0, atol=1e-5)  # type: ignore[union-attr]
