"""Products by the fastest algorithm: the same numbers as torch's, whatever is chosen."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels import cublas_lt
from redline.models.layers import products
from redline.models.layers.products import ROOM_BYTES, backward, choose, decode, forward, gradient_, kind_of, race

N, K = 384, 256


@pytest.fixture(autouse=True)
def nothing_chosen_yet() -> Iterator[None]:
    before = dict(products._chosen)
    products._chosen.clear()
    yield
    products._chosen.clear()
    products._chosen.update(before)


def test_on_the_cpu_they_are_torch_s() -> None:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(20, K), torch.randn(N, K), torch.randn(20, N)
    assert torch.equal(forward(x, weight), x @ weight.T)
    assert torch.equal(backward(grad, weight), grad @ weight)
    out = torch.empty(20, K)
    assert backward(grad, weight, out=out) is out
    assert not products._chosen


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 1000, 1024, 8191, 8192, 8193, 100_000])
def test_a_kind_is_an_eighth_of_an_octave(num_tokens: int) -> None:
    kind = kind_of(num_tokens)
    assert num_tokens <= kind <= num_tokens * (1 + 1 / products.PER_OCTAVE)
    assert kind_of(kind) == kind


def test_kinds_are_few() -> None:
    assert len({kind_of(number) for number in range(4097, 8193)}) == products.PER_OCTAVE


@pytest.mark.parametrize("with_bias", [False, True])
def test_on_the_cpu_a_decode_step_s_are_torch_s(with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias, room = torch.randn(40, K), torch.randn(N, K), torch.randn(N) if with_bias else None, torch.empty(0)
    choose(40, [weight], bias, room)
    assert torch.equal(decode(x, weight, bias, room), F.linear(x, weight, bias))
    assert not products._chosen


class Algorithms:
    """A product by torch, and by algorithms that cost what they are said to cost; the third has other bits."""

    NAMES = ("same, slow", "same, fast", "other bits, fastest")
    KIND = ("decode", K, N, 40, torch.float32, -1)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scale: float = 1.0) -> None:
        torch.manual_seed(0)
        self.x, self.weights, self.out = torch.randn(40, K), [scale * torch.randn(N, K) for _ in range(3)], torch.empty(40, N)
        self.attempts: list[tuple[str, int]] = []
        monkeypatch.setattr(products, "race", self.race)

    def by_torch(self, weight: Tensor) -> Tensor:
        return torch.mm(self.x, weight.T, out=self.out)

    def attempt(self, name: str, weight: Tensor) -> bool:
        self.attempts.append((name, next(number for number, one in enumerate(self.weights) if one is weight)))
        if name not in self.NAMES:
            return False
        torch.mul(self.x @ weight.T, 1.0 + 1e-6 * name.startswith("other"), out=self.out)
        return True

    def race(self, runs: list[Callable[[], object]], rounds: int, queued: bool) -> list[float]:
        before = len(self.attempts)
        for run in runs:
            run()
        assert queued
        costs = {"same, slow": 1.2, "same, fast": self.fast, "other bits, fastest": 0.1}
        return [1.0, *(costs[name] for name, _ in self.attempts[before:])]

    fast = 0.9

    def decide(self) -> None:
        names, runs = ("not for this shape", *self.NAMES), (self.by_torch, self.attempt)
        products._decide(self.KIND, names, self.weights, self.out, *runs, least_gain=0.02, queued=True)


def test_the_fastest_of_those_with_the_same_bits_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithms = Algorithms(monkeypatch)
    algorithms.decide()
    assert products._chosen == {Algorithms.KIND: "same, fast"}
    assert algorithms.attempts[-2:] == [("same, slow", 1), ("same, fast", 2)], "weights take turns in the race"


def test_what_gains_too_little_leaves_it_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithms = Algorithms(monkeypatch)
    algorithms.fast = 0.99
    algorithms.decide()
    assert products._chosen == {Algorithms.KIND: None}


def test_a_result_of_zeros_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every algorithm has the bits of torch's there, and not with the next weights."""
    algorithms = Algorithms(monkeypatch, scale=0.0)
    algorithms.decide()
    assert not products._chosen
    assert not algorithms.attempts


# ── on a GPU ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.gpu
def test_cublas_lt_is_the_one_that_torch_brings() -> None:
    assert cublas_lt.is_there()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(896, 4864), (9728, 896), (1152, 896), (5000, 120)])
@pytest.mark.parametrize("num_tokens", [1024, 2500])
def test_whatever_is_chosen_has_the_bits_of_torch(dtype: torch.dtype, outputs: int, inputs: int, num_tokens: int) -> None:
    torch.manual_seed(1)
    weight = random(outputs, inputs, dtype=dtype)
    for tokens in (num_tokens, num_tokens - 3):  # the second is of the kind of the first, and has its algorithm
        x, grad = random(tokens, inputs, dtype=dtype), random(tokens, outputs, dtype=dtype)
        assert torch.equal(forward(x, weight), x @ weight.T)
        assert torch.equal(backward(grad, weight), grad @ weight)
        total = torch.full((outputs, inputs), torch.nan, device="cuda")
        gradient_(total, grad, x, is_first=True)
        expected = torch.mm(grad.T, x, out_dtype=torch.float32)
        assert torch.equal(total, expected)
        gradient_(total, grad, x, is_first=False)
        torch.testing.assert_close(total, 2 * expected, rtol=1e-5, atol=1e-2)
    assert len(products._chosen) == 3


@pytest.mark.gpu
def test_every_algorithm_computes_the_product() -> None:
    torch.manual_seed(2)
    x, weight = random(2048, 896), random(4864, 896)
    expected = (x.float() @ weight.float().T).to(torch.bfloat16)
    product = cublas_lt.Product(
        cublas_lt.Matrix(2048, 896, torch.bfloat16),
        cublas_lt.Matrix(4864, 896, torch.bfloat16, transposed=True),
        x.dtype,
        0,
    )
    algorithms = product.algorithms()
    assert len(algorithms) > 1
    for algorithm in algorithms:
        out = torch.full((2048, 4864), torch.nan, device="cuda", dtype=torch.bfloat16)
        assert product.run(algorithm, x, weight, out)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=0.25)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("x", "weight"),
    [((1023, 64), (64, 64)), ((2048, 60), (64, 60)), ((2048, 64), (63, 64))],
    ids=["few tokens", "rows of the factors", "rows of the result"],
)
def test_what_has_no_choice_is_torch_s(x: tuple[int, int], weight: tuple[int, int]) -> None:
    left, right = random(*x), random(*weight)
    assert torch.equal(forward(left, right), left @ right.T)
    grad = random(x[0], weight[0])
    assert torch.equal(backward(grad, right), grad @ right)


@pytest.mark.gpu
def test_a_first_product_in_a_capture_waits_for_nothing() -> None:
    x, weight = random(2048, K), random(N, K)
    out = forward(x, weight)
    products._chosen.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(x, weight)
    graph.replay()
    assert torch.equal(captured, out)
    assert not products._chosen


@pytest.mark.gpu
def test_the_faster_of_two_wins() -> None:
    small, large = random(1024, 1024), random(4096, 4096)
    slow, fast = race([lambda: large @ large, lambda: small @ small])
    assert fast < slow


@pytest.mark.gpu
def test_choosing_takes_little_time() -> None:
    x, weight = random(8192, 896), random(9728, 896)
    forward(x, weight)
    products._chosen.clear()
    torch.cuda.synchronize()
    started = time.perf_counter()
    forward(x, weight)
    torch.cuda.synchronize()
    assert time.perf_counter() - started < 1.0


@pytest.mark.gpu
def test_products_run_on_the_stream_of_their_caller() -> None:
    x, weight = random(2048, K), random(N, K)
    expected = forward(x, weight)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [forward(x, weight) for _ in range(3)]
    stream.synchronize()
    assert all(torch.equal(one, other) for one, other in itertools.pairwise([expected, *found]))


def room() -> Tensor:
    return torch.empty(ROOM_BYTES, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(896, 4864), (9728, 896), (1152, 896), (151_936, 896)])
@pytest.mark.parametrize("rows", [40, 64, 512])
def test_whatever_is_chosen_for_a_decode_step_has_the_bits_of_torch(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, with_bias: bool
) -> None:
    torch.manual_seed(3)
    weights = [random(outputs, inputs, dtype=dtype) / 30 for _ in range(3)]
    biases = [random(outputs, dtype=dtype) if with_bias else None for _ in weights]
    own = room()
    choose(rows, weights, biases[0], own)
    assert len(products._chosen) == 1
    for weight, bias in zip(weights, biases, strict=True):
        x = 3 * random(rows, inputs, dtype=dtype)
        assert torch.equal(decode(x, weight, bias, own), F.linear(x, weight, bias))


@pytest.mark.gpu
def test_every_algorithm_adds_the_bias() -> None:
    torch.manual_seed(2)
    x, weight, bias, own = random(64, 896), random(1152, 896), 30 * random(1152), room()
    expected = F.linear(x.float(), weight.float(), bias.float()).to(torch.bfloat16)
    shapes = cublas_lt.Matrix(64, 896, torch.bfloat16), cublas_lt.Matrix(1152, 896, torch.bfloat16, transposed=True)
    product = cublas_lt.Product(*shapes, x.dtype, 0, bias.data_ptr())
    algorithms = product.algorithms(own.nbytes)
    assert len(algorithms) > 1
    for algorithm in algorithms:
        out = torch.full((64, 1152), torch.nan, device="cuda", dtype=torch.bfloat16)
        assert product.run(algorithm, x, weight, out, workspace=own)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=0.5)


@pytest.mark.gpu
def test_what_was_chosen_is_captured_and_draws_nothing_from_torch_s_generator() -> None:
    x, weight, own = random(64, K), random(N, K), room()
    before = torch.cuda.get_rng_state()
    choose(64, [weight], None, own)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    [kind] = products._chosen
    product = products._decode_product(x, weight, None, x.new_empty(64, N))
    expected = F.linear(x, weight)
    same = [
        each
        for each in product.algorithms(own.nbytes)
        if product.run(each, x, weight, out := torch.zeros_like(expected), workspace=own) and torch.equal(out, expected)
    ]
    products._chosen[kind] = same[-1]  # whatever won
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(x, weight, None, own)
    x.copy_(random(64, K))
    graph.replay()
    assert torch.equal(captured, F.linear(x, weight))


@pytest.mark.gpu
def test_choosing_for_a_decode_step_takes_little_time() -> None:
    weights, own = [random(9728, 896) for _ in range(24)], room()
    choose(64, weights, None, own)
    products._chosen.clear()
    torch.cuda.synchronize()
    started = time.perf_counter()
    choose(64, weights, None, own)
    assert time.perf_counter() - started < 0.1
    assert len(products._chosen) == 1
