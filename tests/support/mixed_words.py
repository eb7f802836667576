"""The checksum of weights by its definition, in whole numbers."""

from __future__ import annotations

from collections.abc import Iterable

ALL = 2**64


def mixed_word(word: int, index: int) -> int:
    """What a word adds to the checksum at this place."""
    x = (word + (index + 1) * 0x9E3779B97F4A7C15) % ALL
    for _ in range(2):
        x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 % ALL
    return x ^ x >> 32


def mixed_sum(words: Iterable[int], first: int = 0) -> int:
    """The sum of words, of which the first has this index, as a signed number of 64 bits."""
    total = sum(mixed_word(word, first + at) for at, word in enumerate(words)) % ALL
    return total - ALL if total >= ALL // 2 else total
