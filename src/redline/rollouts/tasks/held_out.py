"""Which questions are kept for evaluation.

The split is by content: the same question is on the same side whatever the seed, the order or the number of times it is
drawn. A split by index would leak, since generators repeat themselves (two one-digit terms make only 200 sums).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def stable_hash(text: str) -> int:
    """64 bits that are the same in every process and on every machine, unlike Python's `hash`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def is_held_out(text: str, fraction: float) -> bool:
    """The split of an endless source: `fraction` of all texts, judged one at a time."""
    return stable_hash(text) < fraction * 2**64


def lowest_hashes(texts: Iterable[str], fraction: float) -> list[str]:
    """The split of a finite source: floor(fraction · n) of the n distinct texts, at least 1 and at most n - 1."""
    distinct = sorted(set(texts), key=lambda text: (stable_hash(text), text))
    count = min(max(int(fraction * len(distinct)), 1), len(distinct) - 1)
    return distinct[:count]
