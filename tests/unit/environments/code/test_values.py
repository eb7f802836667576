from __future__ import annotations

from typing import Any

import pytest

from redline.environments.code.inside.values import LONGEST, NotPlainError, pack, unpack


@pytest.mark.parametrize(
    "value", [None, True, 10**50, -1.5, "é\n", b"\x00\xff", [1, (2, {3})], {"a": {1: (None,)}}, [], (), {}, float("inf")]
)
def test_plain_data_crosses_unchanged_in_one_line(value: Any) -> None:
    line = pack(value)
    assert line.count(b"\n") == 1
    assert unpack(line) == value
    assert type(unpack(line)) is type(value)


class AlwaysEqual:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Sly(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([42])

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_a_class_with_methods_of_its_own_crosses_as_what_it_is_made_of_or_not_at_all() -> None:
    with pytest.raises(NotPlainError):
        pack(AlwaysEqual())
    with pytest.raises(NotPlainError):
        pack(len)
    assert unpack(pack(Sly([1]))) == [1]


def test_what_is_too_deep_too_long_or_its_own_part_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    for value in (circle, "x" * LONGEST, 10**5000, "\ud800" and {"\ud800": object()}):
        with pytest.raises(NotPlainError):
            pack(value)


@pytest.mark.parametrize(
    "line",
    [b"", b"x", b"{}", b'{"a": 1, "b": 2}', b'{"eval": 1}', b'{"bytes": 3}', b'{"set": [[]]}', b"[" * 100_000, b"\xff",
     b'{"dict": [1]}', b'{"set": [1, 1]}'],
)  # fmt: skip
def test_no_line_does_more_than_fail(line: bytes) -> None:
    with pytest.raises(NotPlainError):
        unpack(line)


def test_a_set_that_names_a_member_twice_is_refused_also_where_it_is_not_hashed() -> None:
    with pytest.raises(NotPlainError, match="twice"):
        unpack(b'{"set": [1, 2, 1]}', hashed=False)
