"""Which sequence holds which block of the KV cache, and which blocks can be found again by what they hold.

A block holds the keys and values of `block_size` consecutive tokens. Sequences share blocks by reference count. A full block
is filed under a hash of its tokens, of everything before them, and of the policy version and adapter that computed it, so that
a later sequence with the same beginning takes it over instead of computing it. Blocks without a holder keep their content until
the memory is needed: first those that nobody can find again, then those of versions before, then those that were never held,
and at last those of this version, least recently used first. On a CPU a block takes memory from its first use on: a run that
preferred untouched blocks to those of versions before would grow by a step's blocks with every version, to all of the cache.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

SCRATCH_BLOCK = 0
"""Never handed out: rows without a sequence point here."""


class BlockPool:
    """Reference counts, the free list and the prefix index. Knows nothing of tensors."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 1, "one block is scratch"
        self.block_size = block_size
        self.num_blocks = num_blocks - 1
        """Blocks that sequences can hold."""
        self.num_touched = 0
        """Blocks that were ever held: untouched ones are handed out in order, so it is the highest number among them."""
        self._references = [0] * num_blocks
        self._idle: list[int] = []
        """Touched, without a holder, and not to be found: the last is the next to be handed out."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Without a holder, but to be found, least recently used first."""
        self._aged: OrderedDict[int, None] = OrderedDict()
        """The same, of versions before."""
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_touched + len(self._idle) + len(self._aged) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_touched - len(self._idle) - len(self._aged) - len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by content, held or not."""
        return len(self._key_of)

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def allocate(self) -> int:
        """A block of one's own; what it held is forgotten. The caller has looked at `num_free`."""
        block = self._next()
        self._forget(block)
        self._references[block] = 1
        return block

    def _next(self) -> int:
        if self._idle:
            return self._idle.pop()
        if self._aged:
            return self._aged.popitem(last=False)[0]
        if self.num_touched == self.num_blocks:
            return self._cached.popitem(last=False)[0]
        self.num_touched += 1
        return self.num_touched

    def share(self, block: int) -> int:
        """One holder more."""
        if self._references[block] == 0:
            del (self._aged if block in self._aged else self._cached)[block]
        self._references[block] += 1
        return block

    def release(self, *blocks: int) -> None:
        """One holder less of each. A block that can be found again is the last to be reused, any other the first."""
        references, key_of, cached, idle = self._references, self._key_of, self._cached, self._idle
        for block in blocks:
            left = references[block] = references[block] - 1
            assert left >= 0, "released more often than held"
            if left == 0 and block in key_of:
                cached[block] = None
            elif left == 0:
                idle.append(block)

    def file(self, block: int, key: bytes) -> None:
        """From now on the block is found under `key`, unless another one already is."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning; not held yet."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of these have no holder: sharing them takes them from the free ones."""
        return sum(self._references[block] == 0 for block in blocks)

    def forget(self, blocks: Iterable[int]) -> None:
        """These can no longer be found by content."""
        for block in blocks:
            self._forget(block)
            for found in (self._aged, self._cached):
                if block in found:
                    del found[block]
                    self._idle.append(block)

    def forget_all(self) -> None:
        """No block can be found by content any more."""
        self.age()
        self._idle += self._aged
        self._aged, self._key_of, self._block_of = OrderedDict(), {}, {}

    def age(self) -> None:
        """Another version comes: blocks without a holder can still be found, and are handed out before untouched ones."""
        if self._aged:
            self._aged.update(self._cached)
        else:
            self._aged = self._cached
        self._cached = OrderedDict()

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]


def block_keys(tokens: np.ndarray, block_size: int, salt: bytes, known: Sequence[bytes] = ()) -> Iterator[bytes]:
    """The key of every full block of `tokens` after the `known` ones, each a hash over the one before it. `salt` names version
    and adapter, or is the key of the block in front of `tokens`."""
    key = known[-1] if known else salt
    data = np.ascontiguousarray(tokens, dtype=np.int32).tobytes()
    width = 4 * block_size
    for start in range(len(known) * width, len(data) - width + 1, width):
        key = hashlib.blake2b(key + data[start : start + width], digest_size=16).digest()
        yield key
