from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from redline.engine.native.cache.blocks import SCRATCH_BLOCK, BlockPool, block_keys

KEYS = [bytes([number]) for number in range(6)]


def filled(pool: BlockPool, *keys: bytes) -> list[int]:
    """A held block for each key, filed under it."""
    blocks = [pool.allocate() for _ in keys]
    for block, key in zip(blocks, keys, strict=True):
        pool.file(block, key)
    return blocks


# ── who holds what ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_block_but_the_scratch_block_is_handed_out_once() -> None:
    pool = BlockPool(8, 16)
    blocks = [pool.allocate() for _ in range(pool.num_free)]
    assert sorted(blocks) == [1, 2, 3, 4, 5, 6, 7]
    assert SCRATCH_BLOCK not in blocks
    assert (pool.num_blocks, pool.num_used, pool.num_free) == (7, 7, 0)


def test_a_block_is_free_once_its_last_holder_releases_it() -> None:
    pool = BlockPool(4, 16)
    block = pool.allocate()
    assert pool.share(block) == block
    pool.share(block)
    for holders in (3, 2, 1):
        assert pool.is_shared(block) == (holders > 1)
        assert pool.num_used == 1
        pool.release(block)
    assert pool.num_used == 0


def test_releasing_what_nobody_holds_is_a_broken_invariant() -> None:
    pool = BlockPool(4, 16)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(block)


# ── what is found again ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_longest_known_beginning_is_found() -> None:
    pool = BlockPool(8, 16)
    first, second, fourth = filled(pool, KEYS[0], KEYS[1], KEYS[3])
    assert pool.find(KEYS[:2]) == [first, second]
    assert pool.find(KEYS[:4]) == [first, second], "the third is not known, so that the fourth cannot continue it"
    assert pool.find(KEYS[1:2]) == [second]
    assert pool.find(KEYS[3:4]) == [fourth]
    assert pool.find([]) == pool.find(KEYS[5:]) == []


def test_a_block_nobody_holds_is_found_until_it_is_handed_out_again() -> None:
    pool = BlockPool(3, 16)
    [block] = filled(pool, KEYS[0])
    pool.release(block)
    assert pool.find(KEYS[:1]) == [block]
    assert pool.num_idle([block]) == 1
    assert {pool.allocate(), pool.allocate()} == {1, 2}
    assert pool.find(KEYS[:1]) == []
    assert pool.num_cached == 0


def test_sharing_a_found_block_takes_it_from_the_free_ones() -> None:
    pool = BlockPool(3, 16)
    [block] = filled(pool, KEYS[0])
    pool.release(block)
    pool.share(block)
    assert (pool.num_free, pool.num_used, pool.num_idle([block])) == (1, 1, 0)
    assert pool.allocate() != block
    assert pool.find(KEYS[:1]) == [block]


def test_the_first_block_filed_under_a_key_stays_the_one_that_is_found() -> None:
    """Two sequences may compute the same block at the same time."""
    pool = BlockPool(4, 16)
    [first] = filled(pool, KEYS[0])
    [second] = filled(pool, KEYS[0])
    assert pool.find(KEYS[:1]) == [first]
    pool.file(first, KEYS[1])
    assert pool.find(KEYS[1:2]) == [], "a block holds what it holds, and is filed once"
    pool.release(second)
    assert pool.find(KEYS[:1]) == [first]


def test_blocks_that_can_be_found_are_reused_last_and_the_oldest_of_them_first() -> None:
    pool = BlockPool(7, 16)
    a, b, c = filled(pool, *KEYS[:3])
    plain = pool.allocate()
    for block in (b, plain, a, c):
        pool.release(block)
    never_used = [5, 6]
    assert [pool.allocate() for _ in range(6)] == [plain, *never_used, b, a, c]


def test_use_makes_a_block_young_again() -> None:
    pool = BlockPool(4, 16)
    a, b, c = filled(pool, *KEYS[:3])
    for block in (a, b, c):
        pool.release(block)
    pool.release(pool.share(a))
    assert [pool.allocate() for _ in range(3)] == [b, c, a]


def test_after_forgetting_nothing_is_found_and_nothing_is_lost() -> None:
    pool = BlockPool(5, 16)
    held, idle = filled(pool, *KEYS[:2])
    pool.release(idle)
    pool.forget_all()
    assert pool.find(KEYS[:1]) == pool.find(KEYS[1:2]) == []
    assert (pool.num_cached, pool.num_used, pool.num_free) == (0, 1, 3)
    pool.release(held)
    assert pool.num_free == 4


def test_what_can_no_longer_be_found_is_used_again_before_what_was_never_touched() -> None:
    """Else a run on a CPU would take the memory of another step's blocks with every version, up to all of the cache."""
    pool = BlockPool(100, 16)
    for _ in range(10):
        for block in filled(pool, *KEYS[:4]):
            pool.release(block)
        pool.forget_all()
    assert pool.num_touched == 4


def test_blocks_of_versions_before_are_found_by_them_and_used_again_before_what_was_never_touched() -> None:
    pool = BlockPool(100, 16)
    for version in range(10):
        for block in filled(pool, *(b"%d/%d" % (version, number) for number in range(4))):
            pool.release(block)
        pool.age()
    assert pool.num_touched == 4
    assert len(pool.find([b"9/0", b"9/1", b"9/2", b"9/3"])) == 4
    assert pool.find([b"8/0"]) == []


def test_single_blocks_are_forgotten() -> None:
    pool = BlockPool(5, 16)
    first, second = filled(pool, *KEYS[:2])
    pool.forget([first, first])
    assert pool.find(KEYS[:1]) == []
    assert pool.find(KEYS[1:2]) == [second]
    pool.file(first, KEYS[2])
    assert pool.find(KEYS[2:3]) == [first]


class AnyUse(RuleBasedStateMachine):
    """Random use, beside a model of it made of plain lists: holders of each block, and free blocks in order of reuse."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, 4)
        self.held: list[int] = []
        self.idle: list[int] = []
        self.aged: list[int] = []
        self.untouched = [1, 2, 3, 4, 5]
        self.cached: list[int] = []
        self.filed: dict[bytes, int] = {}

    @property
    def free(self) -> list[int]:
        """In order of reuse."""
        return [*self.idle, *self.aged, *self.untouched, *self.cached]

    @precondition(lambda self: self.free)
    @rule()
    def allocate(self) -> None:
        block, expected = self.pool.allocate(), self.free[0]
        assert block not in self.held
        assert block == expected
        self.take(block)
        self.filed = {key: other for key, other in self.filed.items() if other != block}
        self.held.append(block)

    @rule(count=st.integers(0, 5), pick=st.integers(0, 99))
    def find_and_share(self, count: int, pick: int) -> None:
        keys = KEYS[pick % len(KEYS) :][:count]
        expected = []
        for key in keys:
            if key not in self.filed:
                break
            expected.append(self.filed[key])
        found = self.pool.find(keys)
        assert found == expected
        assert self.pool.num_idle(found) == sum(block not in self.held for block in found)
        for block in found:
            assert self.pool.share(block) == block
            self.held.append(block)
            self.take(block)

    def take(self, block: int) -> None:
        """It is free no longer."""
        for kind in (self.idle, self.aged, self.untouched, self.cached):
            kind[:] = [other for other in kind if other != block]

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        block = self.held.pop(pick % len(self.held))
        self.pool.release(block)
        if block not in self.held:
            if block in self.filed.values():
                self.cached.append(block)
            else:
                self.idle.insert(0, block)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99), key=st.sampled_from(KEYS))
    def file(self, pick: int, key: bytes) -> None:
        block = self.held[pick % len(self.held)]
        self.pool.file(block, key)
        if key not in self.filed and block not in self.filed.values():
            self.filed[key] = block

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.idle = [*reversed([*self.aged, *self.cached]), *self.idle]
        self.aged, self.cached, self.filed = [], [], {}

    @rule()
    def age(self) -> None:
        self.pool.age()
        self.aged, self.cached = [*self.aged, *self.cached], []

    @rule(block=st.integers(1, 5))
    def forget(self, block: int) -> None:
        self.pool.forget([block])
        if block in (*self.aged, *self.cached):
            self.take(block)
            self.idle.insert(0, block)
        self.filed = {key: other for key, other in self.filed.items() if other != block}

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_used == len(set(self.held))
        assert self.pool.num_cached == len(self.filed)
        assert set(self.free) | set(self.held) == {1, 2, 3, 4, 5}
        for block in set(self.held):
            assert self.pool.is_shared(block) == (self.held.count(block) > 1)

    def teardown(self) -> None:
        """Nothing leaks: once all is released, every block can be had again, in the order foretold."""
        while self.held:
            self.release(0)
        assert self.pool.num_free == self.pool.num_blocks
        assert [self.pool.allocate() for _ in range(5)] == self.free


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=150, stateful_step_count=30)


# ── keys ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def keys_of(tokens: list[int], salt: bytes = b"0/", size: int = 4) -> list[bytes]:
    return list(block_keys(np.array(tokens, np.int32), size, salt))


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 5))
def test_blocks_have_the_same_key_exactly_where_everything_up_to_their_end_is_the_same(
    one: list[int], other: list[int], size: int
) -> None:
    keys, others = keys_of(one, size=size), keys_of(other, size=size)
    assert (len(keys), len(others)) == (len(one) // size, len(other) // size)
    for number, (key, other_key) in enumerate(zip(keys, others, strict=False), start=1):
        assert (key == other_key) == (one[: number * size] == other[: number * size])
    assert len(set(keys)) == len(keys)


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 5), st.integers(0, 20))
def test_keys_go_on_from_those_that_are_known(tokens: list[int], size: int, count: int) -> None:
    keys = keys_of(tokens, size=size)
    known = keys[:count]
    assert [*known, *block_keys(np.array(tokens, np.int32), size, b"0/", known)] == keys


def test_the_salt_reaches_every_block() -> None:
    tokens = list(range(12))
    assert not set(keys_of(tokens, b"0/")) & set(keys_of(tokens, b"1/"))
    assert not set(keys_of(tokens, b"0/")) & set(keys_of(tokens, b"0/adapter"))


def test_keys_depend_on_the_tokens_and_not_on_how_they_are_stored() -> None:
    tokens = np.arange(24)
    expected = list(block_keys(tokens.astype(np.int32), 4, b"0/"))
    assert list(block_keys(tokens.astype(np.int64), 4, b"0/")) == expected
    assert list(block_keys(np.repeat(tokens, 2).astype(np.int32)[::2], 4, b"0/")) == expected
