"""Products by the fastest algorithm: the same numbers as torch's, whatever is chosen."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from redline.kernels import cublas_lt
from redline.models.layers import products
from redline.models.layers.products import backward, forward, gradient_, kind_of, race

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


class Algorithms:
    """In place of cuBLASLt's product: one algorithm with torch's bits, and a faster one without."""

    def algorithms(self) -> list[str]:
        return ["the same bits", "others"]

    def run(self, algorithm: str, left: Tensor, right: Tensor, out: Tensor) -> bool:
        torch.mul(left @ right.T, 1 + 1e-6 * (algorithm == "others"), out=out)
        return True


@pytest.mark.parametrize(("scale", "expected"), [(1.0, ["the same bits"]), (0.0, [])])
def test_a_result_of_zeros_decides_nothing(monkeypatch: pytest.MonkeyPatch, scale: float, expected: list[str]) -> None:
    """Every algorithm has the bits of torch's there, and not with what comes next."""
    torch.manual_seed(0)
    x, weight, out = scale * torch.randn(20, K), torch.randn(N, K), torch.empty(20, N)
    kind = ("forward", K, N, 20, torch.float32, -1)
    monkeypatch.setattr(products, "race", lambda runs: [1 / (1 + number) for number in range(len(runs))])  # the last is fastest
    by_torch = partial(torch.mm, x, weight.T, out=out)
    products._choose(kind, Algorithms(), x, weight, out, by_torch)  # type: ignore[arg-type]
    assert list(products._chosen.values()) == expected


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
