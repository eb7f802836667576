"""The C between the products, against torch."""

from __future__ import annotations

import errno
import platform

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.cpu import compiled
from redline.kernels.cpu.steps import SOURCE, Steps, steps_for
from redline.models.decoder import add_rms_norm
from redline.models.layers.activation import silu_mul
from redline.models.layers.rope import rotary_table, rotate

pytestmark = pytest.mark.usefixtures("threads")

EPS = 1e-6
BLOCK = 16
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(6, 2, 32), (4, 4, 64), (9, 3, 64), (16, 1, 96), (7, 1, 128), (20, 5, 128)]
"""Query heads, key/value heads, size of a head."""


def steps_of(dtype: torch.dtype, head_dim: int = 64, grouped: int = 1) -> Steps:
    steps = steps_for(dtype, head_dim, grouped)
    if steps is None:
        pytest.skip("no compiler here, or torch computes with other threads")
    return steps


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 1e-2, "rtol": 1e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 32), (1, 16), (3, 48), (64, 576)])
def test_norm_and_activation_are_torchs(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    steps, (T, E) = steps_of(dtype), shape
    x, delta, weight = torch.randn(T, E).to(dtype), torch.randn(T, E).to(dtype), torch.randn(E).to(dtype)
    total, normed = steps.add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(total, x + delta), "rounded as torch rounds"
    torch.testing.assert_close(normed, add_rms_norm(x, delta, weight, EPS)[1], **tolerance(dtype))
    same, normed = steps.add_rms_norm(x, None, weight, EPS)
    assert same is x
    torch.testing.assert_close(normed, F.rms_norm(x, (E,), weight, EPS), **tolerance(dtype))
    gate_up = (20 * torch.randn(T, 2 * E)).to(dtype)
    torch.testing.assert_close(steps.silu_mul(gate_up), silu_mul(gate_up), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_none_and_what_is_far_away_stays_right(dtype: torch.dtype) -> None:
    steps, wild = steps_of(dtype), torch.tensor([0.0, -0.0, 1e30, -1e30, 88.0, -88.0, 200.0, -200.0] * 2).to(dtype)
    gate_up = torch.cat([wild, torch.ones_like(wild)])[None]
    torch.testing.assert_close(steps.silu_mul(gate_up), silu_mul(gate_up), **tolerance(dtype))
    for bad in (torch.nan, torch.inf):
        broken = gate_up.clone()
        broken[0, 3] = bad
        got, expected = steps.silu_mul(broken), silu_mul(broken)
        assert torch.equal(got.isnan(), expected.isnan())
        x = torch.ones(2, 16).to(dtype)
        x[0, 3] = bad
        normed = steps.add_rms_norm(x, None, torch.ones(16).to(dtype), EPS)[1]
        assert torch.equal(normed.isnan(), F.rms_norm(x, (16,), torch.ones(16).to(dtype), EPS).isnan())


class Cache:
    """Lines of a cache with something in them, and NaN wherever no token was written."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, starts: list[int], counts: list[int]) -> None:
        torch.manual_seed(0)
        H, K, D = shape
        blocks = -(-(max(starts) + max(counts)) // BLOCK)
        self.tables = torch.randperm(len(starts) * blocks).view(len(starts), blocks)
        self.keys, self.values = torch.full((2, len(starts) * blocks, BLOCK, K, D), torch.nan, dtype=dtype)
        self.before = [torch.randn(2, start, K, D).to(dtype) for start in starts]
        for line, (start, before) in enumerate(zip(starts, self.before, strict=True)):
            for blocks_BKD, part in zip((self.keys, self.values), before, strict=True):
                flat = blocks_BKD[self.tables[line]].flatten(0, 1)
                flat[:start] = part
                blocks_BKD[self.tables[line]] = flat.view(-1, BLOCK, K, D)
        self.lines = torch.arange(len(starts)).repeat_interleave(torch.tensor(counts))
        self.positions = torch.cat([start + torch.arange(count) for start, count in zip(starts, counts, strict=True)])
        self.heads = torch.randn(len(self.lines), H + 2 * K, D).to(dtype)
        self.shape = shape
        frequencies = 100.0 ** (-torch.arange(0, D, 2) / D)
        self.rotary = torch.stack(rotary_table(frequencies, 1.0, torch.arange(blocks * BLOCK), dtype)).squeeze(2).contiguous()

    def attend(self, steps: Steps, norms: tuple[Tensor, Tensor] | None) -> Tensor:
        places = (self.positions, self.lines, self.tables)
        return steps.attend(self.heads, self.keys, self.values, *places, self.rotary, norms, EPS)

    def expected(self, norms: tuple[Tensor, Tensor] | None) -> Tensor:
        """[T, H, D], token by token, by torch's attention in float32."""
        H, K, D = self.shape
        q, k, v = self.heads.split([H, K, K], dim=1)
        if norms is not None:
            q, k = F.rms_norm(q, (D,), norms[0], EPS), F.rms_norm(k, (D,), norms[1], EPS)
        table = self.rotary[:, self.positions].unsqueeze(2)
        q, k = rotate(q, *table), rotate(k, *table)
        rows = []
        for t, (line, position) in enumerate(zip(self.lines.tolist(), self.positions.tolist(), strict=True)):
            own = (self.lines == line) & (self.positions <= position)
            seen = [torch.cat([old, new[own]]).float() for old, new in zip(self.before[line], (k, v), strict=True)]
            keys, values = (part.transpose(0, 1).repeat_interleave(H // K, 0) for part in seen)
            rows.append(F.scaled_dot_product_attention(q[t].float()[:, None], keys, values)[:, 0])
        return torch.stack(rows).to(self.heads.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_norms", [False, True])
def test_attention_is_torchs(dtype: torch.dtype, shape: tuple[int, int, int], with_norms: bool) -> None:
    """Contexts within a tile, at its edge and beyond; tokens alone and several of one line."""
    H, K, D = shape
    steps = steps_of(dtype, D, H // K)
    cache = Cache(shape, dtype, starts=[0, 1, 15, 16, 63, 64, 65, 130, 300], counts=[1, 1, 3, 1, 2, 1, 1, 16, 1])
    norms = (torch.rand(D).to(dtype), torch.rand(D).to(dtype)) if with_norms else None
    expected = cache.expected(norms)
    torch.testing.assert_close(cache.attend(steps, norms), expected, **tolerance(dtype))
    slots = cache.tables[cache.lines, cache.positions // BLOCK], cache.positions % BLOCK
    assert torch.equal(cache.values[slots], cache.heads[:, H + K :])
    assert cache.keys[slots].isfinite().all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="one kind of vectors only")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-mno-avx"])
def test_shorter_vectors_come_to_the_same(dtype: torch.dtype, flag: str) -> None:
    widest, shape = steps_of(dtype), (8, 2, 64)
    linked = compiled.library(SOURCE, "-DD=64", f"-DBFLOAT16={DTYPES.index(dtype)}", flag)
    assert linked is not None
    shorter, x, weight = Steps(linked), (20 * torch.randn(5, 96)).to(dtype), torch.randn(96).to(dtype)
    x[1, 3], x[2, 4] = torch.nan, torch.inf
    for by in (lambda steps: steps.add_rms_norm(x, x, weight, EPS)[1], lambda steps: steps.silu_mul(x)):
        torch.testing.assert_close(by(shorter), by(widest), equal_nan=True, **tolerance(dtype))
    attended = [Cache(shape, dtype, [0, 15, 130], [1, 3, 16]).attend(steps, None) for steps in (shorter, widest)]
    torch.testing.assert_close(*attended, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    shape = (9, 3, 64)
    steps, cache = steps_of(dtype, 64, 3), Cache((9, 3, 64), dtype, starts=[5, 70, 200, 33], counts=[1, 4, 1, 2])
    together = cache.attend(steps, None)
    for line in range(4):
        alone = Cache(shape, dtype, starts=[5, 70, 200, 33], counts=[1, 4, 1, 2])
        own = alone.lines == line
        alone.heads, alone.positions, alone.lines = alone.heads[own], alone.positions[own], alone.lines[own]
        assert torch.equal(alone.attend(steps, None), together[own])


def test_where_there_is_no_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    assert compiled.library(SOURCE, "-DD=32", "-DBFLOAT16=0", "-DNOBODY") is None


def test_where_nothing_can_be_written_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_of(torch.float32)
    monkeypatch.setattr(compiled.tempfile, "mkdtemp", _refuse)
    assert compiled.library(SOURCE, "-DD=32", "-DBFLOAT16=0", "-DFULL") is None


def _refuse(*_: object, **__: object) -> str:
    raise OSError(errno.ENOSPC, "no space left on device")


def test_a_source_that_does_not_compile_is_none() -> None:
    steps_of(torch.float32)
    assert compiled.library(SOURCE, "-DD=no", "-DBFLOAT16=0") is None


def test_heads_that_it_has_no_vectors_for_are_not_served() -> None:
    assert steps_for(torch.float32, 80, 1) is None
    assert steps_for(torch.float16, 64, 1) is None
    assert steps_for(torch.float32, 64, 17) is None
