"""Plain sampling on a CPU (temperature only, greedy rows included) in two passes over the logits, where torch takes a dozen:
`draws.c`. `sampler.sample` is the same in torch."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from redline.kernels.cpu.compiled import library

SOURCE = Path(__file__).with_suffix(".c")
CHUNK = 128
"""Tokens whose weights are summed up first; `draws.c`'s."""

Draw = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@cache
def draws() -> Draw | None:
    """The function from logits, temperatures, streams and counters to tokens and logprobs; None where C is not compiled here.
    Compiles it when it is first asked for."""
    compiled = library(SOURCE)
    if compiled is None:
        return None
    compiled.draw.argtypes = [*[c_void_p] * 7, *[c_long] * 2, c_int]

    def draw(logits_BV: Tensor, temperature_B: Tensor, streams_B: Tensor, counters_B: Tensor) -> tuple[Tensor, Tensor]:
        num_rows, num_tokens = logits_BV.shape
        assert logits_BV.dtype is temperature_B.dtype is torch.float32
        assert streams_B.dtype is counters_B.dtype is torch.int64
        given = [each.contiguous() for each in (logits_BV, temperature_B, streams_B, counters_B)]
        sums = torch.empty(num_rows, -(-num_tokens // CHUNK), dtype=torch.float64)
        tokens_B, logprobs_B = torch.empty_like(given[2]), torch.empty_like(given[1])
        pointers = [each.data_ptr() for each in (*given, sums, tokens_B, logprobs_B)]
        compiled.draw(*pointers, num_rows, num_tokens, torch.get_num_threads())
        return tokens_B, logprobs_B

    return draw
