"""The second set of an engine's weights: what came is the engine's as a whole, or not at all."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from redline.errors import EngineError, TornWeightsError
from redline.weight_sync.buckets import form_of, lay_out, slots, views
from redline.weight_sync.second_set import SecondSet

COPY = torch._foreach_copy_


class Noted:
    """The versions that an engine was told of."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.names: tuple[str, ...] = ()
        self.refuses: int | None = None

    def __call__(self, version: int, names: tuple[str, ...], nbytes: int) -> None:
        if version == self.refuses:
            raise RuntimeError("the engine does not take it")
        self.versions.append(version)
        self.names = names


def make_tensors(value: float) -> dict[str, Tensor]:
    return {
        "embed": torch.full((6, 5), value),
        "norm": torch.full((3,), value, dtype=torch.bfloat16),
        "head": torch.full((7,), value),
    }


def is_all(tensors: Mapping[str, Tensor], value: float) -> bool:
    return all(bool((tensor == value).all()) for tensor in tensors.values())


def fill(second: SecondSet, version: int, tensors: Mapping[str, Tensor], way: str) -> None:
    """Have a version come, as whole tensors or in buckets."""
    if way == "put":
        second.begin(version)
        for name, tensor in tensors.items():
            second.put({name: tensor})
        return
    second.begin(version, lay_out([form_of(name, tensor) for name, tensor in tensors.items()], 48))
    for index, bucket in enumerate(second.buckets):
        for into, value in zip(slots(bucket.pieces, bucket.memory), views(bucket.pieces, tensors), strict=True):
            into.copy_(value)
        second.loaded(index, [(0, bucket.memory.numel())])


@pytest.fixture(params=["put", "buckets"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_versions_come_are_adopted_and_go_back_where_they_lie(way: str) -> None:
    live, noted = make_tensors(0), Noted()
    addresses = [tensor.data_ptr() for tensor in live.values()]
    second = SecondSet(live)
    for version in (1, 2, 3):
        fill(second, version, make_tensors(version), way)
        assert is_all(live, version - 1)
        second.adopt(noted)
        assert is_all(live, version)
    second.revert(2, noted)
    assert is_all(live, 2)
    assert (second.version, noted.versions, noted.names) == (2, [1, 2, 3, 2], ("embed", "norm", "head"))
    assert [tensor.data_ptr() for tensor in live.values()] == addresses
    with pytest.raises(EngineError, match="version 1 is gone; the engine is at 2"):
        second.revert(1, noted)


def test_a_version_goes_back_to_other_weights_of_its_own_number(way: str) -> None:
    live, noted = make_tensors(0), Noted()
    second = SecondSet(live)
    fill(second, 0, make_tensors(1), way)
    second.adopt(noted)
    second.revert(0, noted)
    assert is_all(live, 0)
    fill(second, 0, make_tensors(2), way)
    second.adopt(noted)
    fill(second, 1, make_tensors(3), way)
    second.give_up()
    assert is_all(live, 2)
    with pytest.raises(EngineError, match="version 0 is gone"):
        second.revert(0, noted)


@pytest.mark.parametrize("fails_at", range(3))
def test_an_error_in_the_middle_of_an_exchange_leaves_the_old_weights_under_the_old_number(
    way: str, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, noted = make_tensors(0), Noted()
    second = SecondSet(live)
    fill(second, 1, make_tensors(1), way)
    copies = iter(range(100))

    def failing(into: list[Tensor], values: list[Tensor]) -> None:
        if next(copies) == fails_at:
            COPY(into[:1], values[:1])
            raise torch.OutOfMemoryError("planted")
        COPY(into, values)

    monkeypatch.setattr(torch, "_foreach_copy_", failing)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        second.adopt(noted)
    assert is_all(live, 0)
    assert (second.version, noted.versions) == (0, [])
    second.adopt(noted)  # it is still there
    assert is_all(live, 1)
    assert second.version == 1


def test_an_engine_that_does_not_take_the_version_or_fails_its_check_has_the_old_one(way: str) -> None:
    live, noted = make_tensors(0), Noted()
    second = SecondSet(live)
    fill(second, 1, make_tensors(1), way)
    noted.refuses = 1
    with pytest.raises(RuntimeError, match="does not take it"):
        second.adopt(noted)
    assert is_all(live, 0)
    noted.refuses = None
    seen = []

    def check() -> None:
        seen.append(is_all(live, 1))
        raise ValueError("another logprob")

    with pytest.raises(ValueError, match="another logprob"):
        second.adopt(noted, check)
    assert seen == [True]
    assert is_all(live, 0)
    assert (second.version, noted.versions) == (0, [0, 1, 0])


def test_what_cannot_be_taken_back_is_said_to_be_torn(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    second = SecondSet(make_tensors(0))
    fill(second, 1, make_tensors(1), way)

    def check() -> None:
        def lost(into: list[Tensor], values: list[Tensor]) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(torch, "_foreach_copy_", lost)
        raise ValueError("another logprob")

    with pytest.raises(TornWeightsError, match="an update that failed cannot be taken back: ValueError: another logprob"):
        second.adopt(Noted(), check)


def test_only_what_came_is_exchanged_and_a_tensor_that_comes_twice_counts_once() -> None:
    live, noted = make_tensors(0), Noted()
    second = SecondSet(live)
    second.begin(1)
    for value in (5.0, 1.0):
        second.put({"norm": make_tensors(value)["norm"]})
    second.check_whole(1, ["norm"])
    with pytest.raises(EngineError, match="version 1 is not whole: head"):
        second.check_whole(1, ["norm", "head"])
    second.adopt(noted)
    assert is_all({"norm": live["norm"]}, 1)
    assert is_all({"embed": live["embed"], "head": live["head"]}, 0)
    assert noted.names == ("norm",)
    second.revert(0, noted)
    assert is_all(live, 0)


def test_tensors_that_the_engine_does_not_have_are_refused_and_none_of_them_is_taken() -> None:
    second = SecondSet(make_tensors(0))
    second.begin(1)
    for bad in ({"other": torch.ones(3)}, {"norm": torch.ones(3)}, {"norm": torch.ones(4, dtype=torch.bfloat16)}):
        with pytest.raises(EngineError):
            second.put({**make_tensors(1), **bad})
    second.check_whole(1, [])
