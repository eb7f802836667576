"""An engine that makes every attempt as long as somebody says: as it was in a recorded run, or as drawn."""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from redline.errors import EngineError
from redline.lab.material.train_batches import SPREAD
from redline.ports import SteppedEngine
from redline.types import Delta, EngineStats, GenerateRequest, WeightUpdate

STREAM_BITS = 32
"""Low bits of a request's seed that hold the index of its group; the run's seed stands above."""


class LogNormalLengths(Mapping[int, np.ndarray]):
    """Index of a group → lengths of its attempts, log-normal with a mean of an eighth of `longest`, where they are cut. The
    same seed gives the same group the same lengths."""

    def __init__(self, longest: int, group_size: int, seed: int) -> None:
        self._longest = longest
        self._group_size = group_size
        self._seed = seed

    def __getitem__(self, index: int) -> np.ndarray:
        median = self._longest / 8 / math.exp(SPREAD**2 / 2)
        drawn = median * np.random.default_rng([self._seed, index]).lognormal(sigma=SPREAD, size=self._group_size)
        return np.clip(drawn, 1, self._longest).astype(np.int64)

    def __iter__(self) -> Iterator[int]:
        return itertools.count()

    def __len__(self) -> int:
        return sys.maxsize


class ForcedLengths:
    """Each of a request's n completions becomes a request of its own that ends after as many tokens as `lengths` says, and
    nowhere else. Implements `ports.SteppedEngine`.

    They share their prompt by the prefix cache, block by block, where one request of n computes it once."""

    def __init__(self, engine: SteppedEngine, lengths: Mapping[int, np.ndarray] | None = None) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._singles: dict[int, tuple[int, int]] = {}
        """The engine's number of a single request → that of the request it is a part of, and its attempt."""
        self.lengths: Mapping[int, np.ndarray] = {} if lengths is None else lengths
        """Index of a group → tokens of each of its attempts."""

    def submit(self, request: GenerateRequest, *, streaming: int = 0) -> int:
        request_id = next(self._ids)
        for attempt, single in enumerate(self._parts(request)):
            self._singles[self._engine.submit(single, streaming=streaming)] = request_id, attempt
        return request_id

    def abort(self, request_id: int) -> None:
        for single in [single for single, (whole, _) in self._singles.items() if whole == request_id]:
            self._engine.abort(single)

    def end(self, request_id: int, index: int) -> None:
        """Does nothing: a completion is as long as it was said to be."""

    def sampled_tokens(self, request_id: int) -> dict[int, int]:
        singles = {attempt: single for single, (whole, attempt) in self._singles.items() if whole == request_id}
        return {a: count for a, single in singles.items() for count in self._engine.sampled_tokens(single).values()}

    def step(self) -> list[tuple[int, Delta | EngineError]]:
        return [self._of_whole(single, piece) for single, piece in self._engine.step()]

    def _of_whole(self, single: int, piece: Delta | EngineError) -> tuple[int, Delta | EngineError]:
        request_id, attempt = self._singles[single]
        if isinstance(piece, EngineError):
            return request_id, piece
        if piece.completion is not None:
            del self._singles[single]
        return request_id, replace(piece, index=attempt)

    def apply(self, update: WeightUpdate) -> None:
        self._engine.apply(update)

    def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    def _parts(self, request: GenerateRequest) -> Iterator[GenerateRequest]:
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
