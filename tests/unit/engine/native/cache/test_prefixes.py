"""Rows of a decode batch that begin alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redline.engine.native.cache import prefixes as module
from redline.engine.native.cache.prefixes import MAX_SIZE, MIN_ROWS, Prefixes, side_by_side


@pytest.fixture(autouse=True)
def _small_batches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_ROWS", 1)
    monkeypatch.setattr(module, "LEAST_SAVING", 0.25)


def found(*tables: list[int]) -> tuple[list[list[int]], Prefixes | None]:
    """The tables in their new order, and the groups."""
    blocks_BN = np.full((len(tables), max(map(len, tables))), 99, np.int32)  # 99: what former tenants left behind
    for row, table in zip(blocks_BN, tables, strict=True):
        row[: len(table)] = table
    order, prefixes = side_by_side(blocks_BN, np.array([len(table) for table in tables]))
    assert sorted(order) == list(range(len(tables)))
    return [tables[index] for index in order], prefixes


def groups(prefixes: Prefixes | None) -> list[tuple[int, int, int]]:
    assert prefixes is not None
    return list(zip(prefixes.starts_C.tolist(), prefixes.sizes_C.tolist(), prefixes.blocks_C.tolist(), strict=True))


def test_rows_of_one_prompt_are_a_group() -> None:
    ordered, prefixes = found([7, 8, 1], [7, 8, 2], [7, 8, 3])
    assert ordered == [[7, 8, 1], [7, 8, 2], [7, 8, 3]]
    assert groups(prefixes) == [(0, 3, 2)]


def test_rows_that_arrived_apart_are_brought_together() -> None:
    ordered, prefixes = found([7, 8, 9, 1], [4, 5, 6, 2], [7, 8, 9, 3], [4, 5, 6, 0])
    assert groups(prefixes) == [(0, 2, 3), (2, 2, 3)]
    assert [table[0] for table in ordered] == [4, 4, 7, 7]


def test_a_beginning_that_all_share_does_not_hide_the_longer_ones() -> None:
    _, prefixes = found([1, 10, 11, 12, 2], [1, 10, 11, 12, 3], [1, 20, 21, 22, 4], [1, 20, 21, 22, 5])
    assert groups(prefixes) == [(0, 2, 4), (2, 2, 4)]


def test_nobody_is_grouped_by_what_a_former_tenant_left_behind() -> None:
    assert found([1], [2, 3])[1] is None
    assert groups(found([5, 6], [5, 6, 7, 8])[1]) == [(0, 2, 2)]


def test_little_in_common_is_not_worth_a_second_kernel() -> None:
    assert found([1, *range(10, 19)], [1, *range(20, 29)])[1] is None
    assert found([1, 2, 3])[1] is None


def test_large_groups_are_divided() -> None:
    _, prefixes = found(*([1, 2, 3, row + 100] for row in range(2 * MAX_SIZE + 3)))
    assert groups(prefixes) == [(0, MAX_SIZE, 3), (MAX_SIZE, MAX_SIZE, 3), (2 * MAX_SIZE, 3, 3)]


def test_a_small_batch_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_ROWS", MIN_ROWS)
    assert found(*[[1, 2, 3]] * (MIN_ROWS - 1))[1] is None
    assert found(*[[1, 2, 3]] * MIN_ROWS)[1] is not None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40))
def test_every_member_begins_as_its_group_says(tables: list[list[int]]) -> None:
    ordered, prefixes = found(*tables)
    if prefixes is None:
        return
    entries = [entry for start, size, _ in groups(prefixes) for entry in range(start, start + size)]
    assert len(entries) == len(set(entries))
    for start, size, blocks in groups(prefixes):
        members = ordered[start : start + size]
        assert 2 <= size <= MAX_SIZE
        assert blocks > 0
        assert all(member[:blocks] == members[0][:blocks] and len(member) >= blocks for member in members)
    assert prefixes.saved_blocks >= 0.25 * sum(map(len, tables))
