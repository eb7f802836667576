"""The kernel of the checksum against its definition. Without a GPU triton interprets it."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("words", [1, 2047, 2048 * 16 + 5])
def test_the_kernel_sums_as_the_definition_does(words: int) -> None:
    from redline.kernels.checksum import PROGRAM, weighted_sums

    words_N = torch.randint(-(2**62), 2**62, (words,), dtype=torch.int64)
    weighed = [word * (2 * index + 1) for index, word in enumerate(words_N.tolist())]
    expected = [sum(weighed[start : start + PROGRAM]) % 2**64 for start in range(0, words, PROGRAM)]
    assert [total % 2**64 for total in weighted_sums(words_N.to(DEVICE)).tolist()] == expected
