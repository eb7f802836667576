"""Random numbers that follow from a text: the same on every machine, in every process and with every version of Python."""

from __future__ import annotations

import hashlib
import random

from redline.types import Task


def drawn(*names: object) -> random.Random:
    """A source of random numbers of its own for these names, such as a seed and an index."""
    return random.Random(hashlib.sha256("/".join(map(str, names)).encode()).digest())


def seeded_task(game: str, seed: int, part: str, index: int) -> Task:
    """A task that is nothing but the seed of a game, in `data`. The parts `train` and `held_out` have no seed in common."""
    own = 2 * drawn(seed, part, index).getrandbits(29) + (part == "train")
    return Task(f"{game}/{part}/{index}", [{"role": "user", "content": game}], data={"seed": own})
