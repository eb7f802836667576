"""From the mapped files to the staging buffer, and to no other place on the way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fakes import trajectory
from support.policy_training import Bench, make_bench
from support.small_models import VOCAB_SIZE

from redline.buffer.store.stored_groups import Run, pack_stored
from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.trainer.batches import staging
from redline.trainer.batches.micro_batches import plan_micro_batches
from redline.trainer.batches.staging import Staging, Taken, pack, packed_size, views
from redline.types import Pieces, TrainBatch, TrajectoryGroup, take

PROMPT = 40
ATTEMPTS = 4
SEGMENT_BYTES = 20_000
"""Holds a few groups."""
SILENT = 5
"""A group without advantages."""


class CopiedError(AssertionError):
    """Somebody has made an array of what lies in the files."""


class Guarded(np.ndarray):
    """A view of a file. Views of it are guarded too, and whoever makes a copy is caught."""

    def __array_finalize__(self, source: np.ndarray | None) -> None:
        is_view = source is not None and np.may_share_memory(self, source)
        if not is_view and self.size > 1 and self.dtype != np.bool_:  # a comparison is no copy
            raise CopiedError(f"{self.nbytes} bytes of {self.dtype}")

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        if function in (np.concatenate, np.stack, np.copy):  # which finalize nothing
            raise CopiedError(function.__name__)
        return super().__array_function__(function, types, arguments, options)

    def tobytes(self, order: Any = "C") -> bytes:
        raise CopiedError("as bytes")

    def tolist(self) -> Any:
        raise CopiedError("as a list")


def group(number: int) -> TrajectoryGroup:
    """Attempts of very different lengths at a prompt that is worth sharing."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(0, VOCAB_SIZE, PROMPT)
    attempts = [
        trajectory(prompt, answer, logprobs=np.concatenate([np.zeros(PROMPT), -rng.random(len(answer))]).astype(np.float32))
        for answer in (rng.integers(0, VOCAB_SIZE, rng.integers(5, 80)) for _ in range(ATTEMPTS))
    ]
    advantages = np.zeros(ATTEMPTS) if number == SILENT else rng.normal(size=ATTEMPTS)
    return TrajectoryGroup(f"task/{number}", attempts, advantages.astype(np.float32), number)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TrajectoryStore]:
    store = TrajectoryStore(tmp_path / "trajectories", segment_bytes=SEGMENT_BYTES)
    store.begin(range(12), 0)
    for number in range(12):
        store.add(group(number))
    yield store
    store.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("model"))


def guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and logprobs of every file that is read from now on."""
    plain = Run.values

    def values(self: Run, name: str) -> np.ndarray:
        found = plain(self, name)
        return found.view(Guarded) if name in ("token_ids", "logprobs") else found

    monkeypatch.setattr(Run, "values", values)


CHOICES = {
    "neighbours": [1, 2],
    "groups in several files": [0, 4, SILENT, 9, 11],
    "all": list(range(12)),
}


def mapped_ranges(folder: Path) -> list[tuple[int, int]]:
    lines = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    return [(int(low, 16), int(high, 16)) for low, high in lines]


def pieces(values: np.ndarray | Pieces) -> tuple[np.ndarray, ...]:
    return values.arrays if isinstance(values, Pieces) else (values,)


# ── the batch ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("numbers", CHOICES.values(), ids=CHOICES)
def test_every_piece_of_a_batch_lies_in_a_mapped_file(store: TrajectoryStore, numbers: list[int]) -> None:
    batch = pack_stored(store.read(numbers), 0, keep_no_signal=False)
    ranges = mapped_ranges(store.folder)
    for array in (*pieces(batch.tokens), *pieces(batch.old_logprobs)):
        address = array.__array_interface__["data"][0]
        assert any(low <= address and address + array.nbytes <= high for low, high in ranges)
    assert (len(pieces(batch.tokens)) > 1) == (numbers != CHOICES["neighbours"])


@pytest.mark.parametrize("numbers", CHOICES.values(), ids=CHOICES)
def test_nothing_is_copied_between_the_files_and_the_staging_buffer(
    store: TrajectoryStore, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard(monkeypatch)
    batch = pack_stored(store.read(numbers), 0, keep_no_signal=False)
    for micro in plan_micro_batches(batch, 400).of_rank(0):
        arrays = {"tokens": micro.tokens, "targets": micro.targets, "old_logprobs_M": micro.old_logprobs}
        buffer = torch.empty(packed_size(arrays), dtype=torch.uint8)
        pack(arrays, buffer)
        found = views(arrays, buffer)
        expected = {n: group(n) for n in numbers}
        flat = np.concatenate([t.token_ids for g in expected.values() for t in g.trajectories])
        assert found["targets"].tolist() == flat[micro.index_M].tolist()


@pytest.mark.parametrize("numbers", CHOICES.values(), ids=CHOICES)
def test_a_step_of_the_trainer_copies_nothing_either_and_is_the_same_bit_for_bit(
    store: TrajectoryStore, numbers: list[int], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"max_tokens_per_micro_batch": 400, "kl_coef": 0.1, "kl_in": "loss", "recompute_old_logprobs": True}
    plain = pack_stored(store.read(numbers), 0, keep_no_signal=False)
    plain = replace(plain, tokens=np.array(plain.tokens), old_logprobs=np.array(plain.old_logprobs))
    alone = bench.trainer(**keys)
    expected = alone.step(plain)
    guard(monkeypatch)
    trainer = bench.trainer(**keys)
    found = trainer.step(pack_stored(store.read(numbers), 0, keep_no_signal=False))
    assert found == expected
    for name, master in trainer.masters.items():
        assert torch.equal(master, alone.masters[name]), name


def test_the_critic_copies_nothing(store: TrajectoryStore, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    guard(monkeypatch)
    batch = pack_stored(store.read([0, 4, 9]), 0, keep_no_signal=True)
    bench.trainer(advantages="gae", algorithm="ppo").step(batch)


# ── the guard ──────────────────────────────────────────────────────────────────────────────────────────────────────────


COPIES: dict[str, Callable[[np.ndarray], Any]] = {
    "copied": lambda array: array.copy(),
    "by index": lambda array: array[np.array([0, 2])],
    "by mask": lambda array: array[np.array([True, False, True, True])],
    "by take": lambda array: np.take(array, [0, 1]),
    "another dtype": lambda array: array.astype(np.int64),
    "joined": lambda array: np.concatenate([array, array]),
    "as bytes": lambda array: array.tobytes(),
    "as a list": lambda array: array.tolist(),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_the_guard_catches_a_copy(copy: Callable[[np.ndarray], Any]) -> None:
    with pytest.raises(CopiedError):
        copy(np.arange(4, dtype=np.int32).view(Guarded))


def test_the_guard_lets_views_pass_and_what_is_written_elsewhere() -> None:
    array, out = np.arange(4, dtype=np.int32).view(Guarded), np.zeros(2, dtype=np.int32)
    take(array[1:], np.array([0, 2]), out)
    assert out.tolist() == [1, 3]


def test_a_copy_before_the_staging_buffer_would_be_noticed(
    store: TrajectoryStore, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_hand(values: np.ndarray | Pieces, index: np.ndarray, out: np.ndarray) -> None:
        out[:] = values[index]

    guard(monkeypatch)
    batch = pack_stored(store.read([1, 2]), 0, keep_no_signal=False)
    monkeypatch.setattr(staging, "take", by_hand)
    with pytest.raises(CopiedError):
        bench.trainer().step(batch)


# ── pieces ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def parts() -> Pieces:
    return Pieces([np.arange(3, dtype=np.int32), np.arange(3, 4, dtype=np.int32), np.arange(4, 9, dtype=np.int32)])


def test_pieces_read_like_one_array(parts: Pieces) -> None:
    whole = np.arange(9, dtype=np.int32)
    assert (len(parts), parts.dtype) == (9, np.int32)
    np.testing.assert_array_equal(parts, whole)
    for start in range(10):
        for end in range(start, 11):
            np.testing.assert_array_equal(parts[start:end], whole[start:end])
    np.testing.assert_array_equal(parts[::2], whole[::2])
    np.testing.assert_array_equal(parts[whole % 2 == 0], whole[::2])
    index = np.array([[8, 0], [3, 4]])
    np.testing.assert_array_equal(parts[index], index)


def test_a_slice_within_a_piece_is_a_view_of_it(parts: Pieces) -> None:
    assert np.shares_memory(parts[5:8], parts.arrays[2])
    assert np.shares_memory(parts[0:3], parts.arrays[0])


def test_places_may_come_in_any_order(parts: Pieces) -> None:
    out = np.zeros(6, dtype=np.int32)
    take(parts, np.array([8, 0, 3, 2, 2, 5]), out)
    assert out.tolist() == [8, 0, 3, 2, 2, 5]


def test_no_place_at_all_is_no_value(parts: Pieces) -> None:
    out = np.zeros(0, dtype=np.int32)
    take(parts, np.zeros(0, dtype=np.int64), out)


def test_another_dtype_would_need_a_copy_and_is_refused(parts: Pieces) -> None:
    with pytest.raises(AssertionError, match="int32 cannot be written as int64"):
        take(parts, np.array([0]), np.zeros(1, dtype=np.int64))


@pytest.mark.gpu
def test_on_a_gpu_what_is_taken_arrives_whole(store: TrajectoryStore) -> None:
    batch: TrainBatch = pack_stored(store.read(CHOICES["groups in several files"]), 0, keep_no_signal=False)
    tokens = np.array(batch.tokens)
    sent = [(n, {"tokens": Taken(batch.tokens, np.arange(n, len(tokens), 3))}) for n in range(3)]
    for number, tensors in Staging(torch.device("cuda")).sent(sent):
        assert tensors["tokens"].cpu().numpy().tolist() == tokens[number::3].tolist()
