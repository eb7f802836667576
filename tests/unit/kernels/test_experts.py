"""The kernels of a layer of experts against torch, in Triton's interpreter where there is no GPU. The interpreter cannot
multiply bfloat16, so float16 stands in for it there.

Letters as in `redline.kernels.experts`: T tokens, X experts, C choices, P pairs, I inner columns, E hidden size."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from redline.kernels.experts import ExpertWeights, run_experts  # noqa: E402
from redline.kernels.experts.layer import SORTED_TOKENS, lay_out  # noqa: E402
from redline.kernels.experts.products import Tiling, combine, down_products, gate_up_products, tile_size  # noqa: E402
from redline.kernels.experts.routing import PLAN_ROWS, ROWS, choose_experts, single_pairs, tiles_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of the interpreter's infinities

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
SMALL = Tiling(16, 32, 4, 2)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Whatever torch allocates is NaN, or the largest integer, until it is written."""
    torch.manual_seed(0)
    torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode("default")


def random(*shape: int, dtype: torch.dtype = HALF, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape)).to(dtype).to(DEVICE)


def weights_of(X: int, E: int, I: int, dtype: torch.dtype = HALF) -> ExpertWeights:  # noqa: E741
    return ExpertWeights(random(X, 2 * I, E, dtype=dtype, scale=E**-0.5), random(X, E, I, dtype=dtype, scale=I**-0.5))


def expected_choices(logits_TX: Tensor, choices: int, normalized: bool) -> tuple[Tensor, Tensor]:
    probability_TX = logits_TX.float().softmax(dim=-1)
    weights_TC, experts_TC = probability_TX.sort(dim=-1, descending=True, stable=True)
    weights_TC = weights_TC[:, :choices]
    weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True) if normalized else weights_TC
    return experts_TC[:, :choices], weights_TC.to(logits_TX.dtype).float()


def expected_output(x_TE: Tensor, logits_TX: Tensor, weights: ExpertWeights, choices: int, normalized: bool) -> Tensor:
    """One token and one expert after the other, in float32."""
    experts_TC, weights_TC = expected_choices(logits_TX, choices, normalized)
    out_TE = torch.zeros(x_TE.shape, device=x_TE.device)
    for token, (experts, shares) in enumerate(zip(experts_TC.tolist(), weights_TC.tolist(), strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            gate, up = (weights.gate_up_XIE[expert].float() @ x_TE[token].float()).chunk(2)
            out_TE[token] += share * (weights.down_XEI[expert].float() @ (F.silu(gate) * up))
    return out_TE


def check(found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected).norm() / expected.norm()
    assert error < (1e-2 if DEVICE == "cuda" else 3e-3)


# ── routing ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("tokens", "experts", "choices"), [(1, 8, 2), (ROWS + 3, 6, 3), (2 * ROWS, 5, 5), (3, 128, 8), (2, 2, 1)]
)
def test_tokens_choose_the_experts_that_torch_chooses(tokens: int, experts: int, choices: int, dtype: torch.dtype) -> None:
    logits = random(tokens, experts, dtype=dtype)
    for normalized in (True, False):
        found = choose_experts(logits, choices, normalized=normalized)
        expected, weights = expected_choices(logits, choices, normalized)
        assert torch.equal(found.experts_TC.long(), expected)
        torch.testing.assert_close(found.weights_TC, weights, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_of_equal_experts_the_lower_one_is_chosen() -> None:
    found = choose_experts(torch.zeros(3, 6, device=DEVICE), 4, normalized=True)
    assert found.experts_TC.tolist() == [[0, 1, 2, 3]] * 3
    assert torch.equal(found.weights_TC, torch.full((3, 4), 0.25, device=DEVICE))


def test_huge_logits_choose_without_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 1e4 - 10, 0.0]], device=DEVICE)
    found = choose_experts(logits, 2, normalized=True)
    assert found.experts_TC.tolist() == [[0, 2]]
    torch.testing.assert_close(found.weights_TC, torch.tensor([[1.0, math.exp(-10)]], device=DEVICE), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("tokens", "experts", "choices", "size"),
    [(1, 4, 2, 16), (ROWS + 1, 4, 2, 16), (5 * ROWS, 3, 2, 16), (9, 6, 6, 32), (PLAN_ROWS * ROWS + 1, 3, 1, 16)],
)
def test_every_pair_is_in_one_tile_of_its_expert_in_the_order_of_the_tokens(
    tokens: int, experts: int, choices: int, size: int
) -> None:
    chosen = choose_experts(random(tokens, experts), choices, normalized=True)
    tiles = tiles_of(chosen, size)
    P, flat = tokens * choices, chosen.experts_TC.flatten().tolist()
    assert tiles.pairs is not None
    assert tiles.count == P // size + min(experts, P)
    rows = tiles.pairs.view(-1, size).tolist()
    seen: dict[int, list[int]] = {}
    owners = tiles.experts.tolist()
    for owner, row in zip(owners, rows, strict=True):
        members = [pair for pair in row if pair != P]
        assert row == members + [P] * (size - len(members)), "what is missing is missing at the end"
        assert (owner == -1) == (not members)
        assert all(flat[pair] == owner for pair in members)
        seen.setdefault(owner, []).extend(members)
    assert sorted(pair for members in seen.values() for pair in members) == list(range(P))
    assert all(first < second for members in seen.values() for first, second in pairwise(members))
    used = [owner for owner in owners if owner != -1]
    assert used == sorted(used)
    assert owners == used + [-1] * (len(owners) - len(used))
    assert len(used) == sum(-(-flat.count(expert) // size) for expert in range(experts))


def test_all_tokens_may_go_to_one_expert() -> None:
    logits = torch.zeros(40, 8, device=DEVICE)
    logits[:, 5] = 9
    tiles = tiles_of(choose_experts(logits, 1, normalized=True), 16)
    assert tiles.experts.tolist() == [5, 5, 5] + [-1] * (tiles.count - 3)


# ── products ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(2, 64, 32), (21, 64, 32), (3, 40, 24)])
def test_the_products_of_each_pair_are_those_of_its_expert(tokens: int, hidden: int, inner: int) -> None:
    X, C = 4, 2
    x, weights = random(tokens, hidden), weights_of(X, hidden, inner)
    chosen = choose_experts(random(tokens, X), C, normalized=True)
    experts = chosen.experts_TC.flatten().long()
    pairs_PE = x.float().repeat_interleave(C, dim=0)
    gate, up = torch.einsum("pe,pie->pi", pairs_PE, weights.gate_up_XIE[experts].float()).chunk(2, dim=1)
    expected_inner = F.silu(gate) * up
    for tiles in (single_pairs(chosen), tiles_of(chosen, 16)):
        inner_PI = gate_up_products(x, weights.gate_up_XIE, tiles, C, SMALL)
        check(inner_PI, expected_inner)
        out_PE = down_products(inner_PI, weights.down_XEI, tiles, SMALL)
        check(out_PE, torch.einsum("pi,pei->pe", inner_PI.float(), weights.down_XEI[experts].float()))


def test_outputs_are_weighed_and_added_up_in_float32() -> None:
    out = torch.tensor([[2048.0, 1.0], [1.0, 1.0], [1.0, 1.0], [8.0, 2.0]], device=DEVICE).to(HALF)
    weights = torch.tensor([[1.0, 1.0], [0.25, 0.5]], device=DEVICE)
    assert torch.equal(combine(out, weights), torch.tensor([[2049.0, 2.0], [4.25, 1.25]], device=DEVICE).to(HALF))


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("tokens", [1, SORTED_TOKENS - 1, SORTED_TOKENS, 30])
def test_a_layer_computes_what_its_experts_would_one_by_one(tokens: int, normalized: bool) -> None:
    x, logits, weights = random(tokens, 64), random(tokens, 6), weights_of(6, 64, 32)
    found = run_experts(x, logits, weights, 2, normalized=normalized)
    check(found, expected_output(x, logits, weights, 2, normalized))


def test_a_row_of_nan_stays_its_own() -> None:
    x, logits, weights = random(7, 64), random(7, 6), weights_of(6, 64, 32)
    expected = expected_output(x, logits, weights, 2, True)
    x[3], logits[3] = torch.nan, torch.nan
    found = run_experts(x, logits, weights, 2, normalized=True)
    others = [0, 1, 2, 4, 5, 6]
    check(found[others], expected[others])
    assert found[3].isnan().all()


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("experts", [6, 8], ids=["padded", "power of two"])
@pytest.mark.parametrize(
    "broken", [[math.nan] * 8, [math.nan, 1, 2, 3, 4, 5, 6, 7], [math.inf, 0, 0, 0, 0, 0, 0, 0], [-math.inf] * 8]
)
def test_a_router_that_is_broken_gives_nan_where_its_tokens_are_not(
    broken: list[float], experts: int, normalized: bool
) -> None:
    """As torch's softmax does: a number that only looks like one would hide it."""
    x, logits, weights = random(7, 64), random(7, experts), weights_of(experts, 64, 32)
    logits[3] = torch.tensor(broken[:experts])
    chosen = choose_experts(logits, 3, normalized=normalized)
    assert chosen.experts_TC[3].tolist() == [0, 1, 2], "each once: a pair that nobody lays out is memory that nobody writes"
    assert chosen.weights_TC[3].isnan().all()
    found = run_experts(x, logits, weights, 3, normalized=normalized)
    assert found[3].isnan().all()
    assert not found[[0, 1, 2, 4, 5, 6]].isnan().any()


def test_no_tokens_are_no_work() -> None:
    assert run_experts(random(0, 64), random(0, 6), weights_of(6, 64, 32), 2, normalized=True).shape == (0, 64)


def test_the_kernels_refuse_a_tensor_that_wants_a_gradient() -> None:
    x = random(1, 64).requires_grad_()
    with pytest.raises(AssertionError, match="no gradient"):
        run_experts(x, random(1, 6), weights_of(6, 64, 32), 2, normalized=True)


def test_few_tokens_are_not_sorted_and_tiles_grow_with_what_an_expert_gets() -> None:
    assert lay_out(choose_experts(random(SORTED_TOKENS - 1, 6), 2, normalized=True), 6).pairs is None
    assert lay_out(choose_experts(random(SORTED_TOKENS, 6), 2, normalized=True), 6).pairs is not None
    assert [tile_size(rows * 8, 128) for rows in (16, 64, 256, 512, 8192)] == [16, 16, 32, 64, 128]


COMPILED = """
from redline.kernels.experts.routing import _choose
from support.compiled import compile_kernel

for logits, X, C, padded_X, padded_C, normalized in (("*bf16", 128, 8, 128, 8, True), ("*fp32", 60, 3, 64, 4, False)):
    types = {"logits": logits, "experts": "*i32", "weights": "*fp32", "ranks": "*i32", "counts": "*i32", "T": "i32"}
    sizes = {"X": X, "C": C, "PADDED_X": padded_X, "PADDED_C": padded_C, "NORMALIZED": normalized, "R": 8}
    compile_kernel(_choose, types, sizes)
"""


@pytest.mark.slow
def test_the_choice_compiles_for_a_device_that_is_not_there() -> None:
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env={**without, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
