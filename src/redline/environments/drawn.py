"""Random numbers that follow from a text: the same on every machine, in every process and with every version of Python."""

from __future__ import annotations

import hashlib
import random


def drawn(*names: object) -> random.Random:
    """A source of random numbers of its own for these names, such as a seed and an index."""
    return random.Random(hashlib.sha256("/".join(map(str, names)).encode()).digest())
