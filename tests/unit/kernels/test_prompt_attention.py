"""Attention of prompts over pages, against attention written out, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from redline.kernels.decode import prompt_attention as kernels
from redline.kernels.decode.prompt_attention import NOBODY, Tile, blocks_with, prompt_attention, query_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of the interpreter's infinities


class Pages:
    """Runs of queries, and a cache with the context and the keys of each in blocks of no order."""

    def __init__(
        self, lengths: list[int], starts: list[int], heads: tuple[int, int, int], page: int, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        self.H, K, D = heads
        self.offsets, self.starts = np.concatenate([[0], np.cumsum(lengths)]), np.array(starts)
        self.ends = (self.starts + np.array(lengths)).tolist()
        blocks = [-(-end // page) for end in self.ends]
        order = (torch.randperm(sum(blocks)) + 1).int().split(blocks)
        # What no token was written to holds NaN: it must not be read, not even with a weight of zero.
        self.keys, self.values = torch.full((2, 1 + sum(blocks), K, page, D), float("nan")).to(DEVICE, dtype)
        self.tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        self.context = []
        for line, (end, own) in enumerate(zip(self.ends, order, strict=True)):
            self.tables[line, : len(own)] = own
            k_NKD, v_NKD = torch.randn(2, end, K, D).to(DEVICE, dtype)
            where = own.long().repeat_interleave(page)[:end], torch.arange(end) % page
            for cache, fresh in ((self.keys, k_NKD), (self.values, v_NKD)):
                cache[where[0], :, where[1]] = fresh
            self.context.append((k_NKD, v_NKD))
        self.heads = torch.randn(sum(lengths), self.H + 2 * K, D).to(DEVICE, dtype)

    def attended(self, tile: Tile | None = None, lines: list[int] | None = None) -> Tensor:
        lines_S = np.arange(len(self.ends)) if lines is None else np.array(lines)
        queries = (tile or kernels.TILES[self.heads.shape[2]]).queries
        blocks = query_blocks(self.offsets, self.starts, lines_S, queries)
        blocks = np.concatenate([blocks, np.zeros((2, 4), np.int64)])  # as a captured pass has that needs fewer
        tables = self.tables.to(DEVICE)
        return prompt_attention(self.heads, self.keys, self.values, torch.from_numpy(blocks).to(DEVICE), tables, tile)

    def expected(self) -> Tensor:
        """Written out, in float32."""
        parts = []
        for run, (k_NKD, v_NKD) in enumerate(self.context):
            q_LHD = self.heads[self.offsets[run] : self.offsets[run + 1], : self.H].float()
            groups = self.H // k_NKD.shape[1]
            k_NHD, v_NHD = (x.float().repeat_interleave(groups, dim=1) for x in (k_NKD, v_NKD))
            score_HLN = torch.einsum("lhd,nhd->hln", q_LHD, k_NHD) * q_LHD.shape[2] ** -0.5
            position_L = torch.arange(len(q_LHD), device=DEVICE) + int(self.starts[run])
            score_HLN.masked_fill_(torch.arange(len(k_NKD), device=DEVICE) > position_L[:, None], float("-inf"))
            parts.append(torch.einsum("hln,nhd->lhd", score_HLN.softmax(-1), v_NHD))
        return torch.cat(parts)


def check(found: Tensor, expected: Tensor) -> None:
    limit = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("page", [8, 16, 32])
def test_a_query_sees_what_is_before_it_wherever_that_is_kept(page: int) -> None:
    """Pages smaller and larger than a tile of keys; runs of one token, of whole tiles, and with and without context."""
    pages = Pages([5, 1, 32, 20], [0, 17, 32, 3], (4, 2, 16), page)
    check(pages.attended(Tile(16, 16, 4, 1)), pages.expected())


@pytest.mark.parametrize("size", [32, 64, pytest.param(128, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)])
def test_it_is_so_for_the_tiles_of_every_head_size(size: int) -> None:
    pages = Pages([70, 3], [9, 0], (2, 1, size), 64)
    check(pages.attended(), pages.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_device_agrees(size: int, dtype: torch.dtype) -> None:
    pages = Pages([700, 64, 1, 333], [0, 640, 1500, 77], (14, 2, size), 64, dtype)
    check(pages.attended(), pages.expected())


def test_tokens_of_nobody_get_zeros() -> None:
    pages = Pages([5, 20], [0, 3], (2, 1, 16), 16)
    found = pages.attended(Tile(16, 16, 4, 1), lines=[0, NOBODY])
    check(found[:5], pages.expected()[:5])
    assert not found[5:].any()


def test_blocks_with_the_most_keys_come_first() -> None:
    blocks = query_blocks(np.array([0, 5, 25]), np.array([100, 0]), np.array([7, 3]), 16)
    assert blocks.tolist() == [[0, 5, 100, 7], [21, 25, -5, 3], [5, 25, -5, 3]]


def test_few_tokens_are_in_the_last_blocks_of_their_runs() -> None:
    blocks = query_blocks(np.array([0, 5, 25, 41]), np.array([100, 0, 7]), np.array([7, 3, 4]), 16)
    assert blocks_with(blocks, np.array([4, 24]), 16).tolist() == [[0, 5, 100, 7], [21, 25, -5, 3]]
    assert blocks_with(blocks, np.array([40]), 16).tolist() == [[25, 41, -18, 4]], "a full one"
    assert not len(blocks_with(blocks, np.array([39]), 16)), "nothing is asked of tokens inside a run"


COMPILED = """
from redline.kernels.decode import prompt_attention as kernels
from support.compiled import compile_kernel

types = dict.fromkeys(("heads", "keys", "values", "out"), "*bf16")
types |= {"blocks": "*i64", "block_table": "*i32", "table_stride": "i32"}
for size, tile in kernels.TILES.items():
    for page in (16, 64):
        constants = {"H": 14, "K": 2, "D": size, "PAGE": page, "M": tile.queries, "N": tile.keys}
        shared = compile_kernel(kernels._prompts, types, constants, num_warps=tile.warps, num_stages=tile.stages)
        assert shared < 99 * 1024, (size, page, shared)  # what the smallest GPU has that this may run on
"""


@pytest.mark.slow
def test_it_compiles_for_a_device_that_is_not_there() -> None:
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env={**without, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
