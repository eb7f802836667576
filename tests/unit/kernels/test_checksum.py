"""The kernel of the checksum against its definition. Without a GPU triton interprets it."""

from __future__ import annotations

import os

import pytest
import torch
from support.mixed_words import mixed_sum

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("words", [1, 2047, 2048 * 16 + 5])
def test_the_kernel_sums_as_the_definition_does(words: int) -> None:
    from redline.kernels.checksum import PROGRAM, mixed_sums

    words_N = torch.randint(-(2**63), 2**63 - 1, (words,), dtype=torch.int64)
    plain = words_N.tolist()
    expected = [mixed_sum(plain[start : start + PROGRAM], start) for start in range(0, words, PROGRAM)]
    assert mixed_sums(words_N.to(DEVICE)).tolist() == expected
