"""An engine that makes every attempt as long as it was in a recorded run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from redline.ports import Engine
from redline.types import Completion, GenerateRequest, WeightUpdate

STREAM_BITS = 32
"""Low bits of a request's seed that number its group; the run's seed stands above."""


class ForcedLengths:
    """Each of a request's n completions becomes a request of its own that ends after as many tokens as were recorded, and
    nowhere else. Implements `ports.Engine`.

    They share their prompt by the prefix cache, block by block, where one request of n computes it once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.lengths: Mapping[int, np.ndarray] = {}
        """Number of a group → tokens of each of its attempts."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        singles = [list(self._singles(request)) for request in requests]
        answers = iter(self._engine.generate([single for of_group in singles for single in of_group]))
        return [[completion for _ in of_group for completion in next(answers)] for of_group in singles]

    def apply(self, update: WeightUpdate) -> None:
        self._engine.apply(update)

    def _singles(self, request: GenerateRequest) -> Iterator[GenerateRequest]:
        sampling = request.sampling
        lengths = self.lengths[sampling.seed % 2**STREAM_BITS]
        for attempt, length in enumerate(lengths.tolist()):
            seed = _seed_of(sampling.seed, attempt)
            single = replace(sampling, n=1, max_tokens=length, min_tokens=length, stop_token_ids=(), stop=(), seed=seed)
            yield replace(request, sampling=single)


def _seed_of(seed: int, attempt: int) -> int:
    """All 63 bits are taken by the run and the group already, so the attempt is hashed in."""
    digest = hashlib.blake2b(f"{seed}/{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
