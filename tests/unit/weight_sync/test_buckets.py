"""Buckets, their checksums, and the two ends that pack and unpack them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from support.linked_engines import LinkedEngine, connected
from support.mixed_words import mixed_sum
from torch import Tensor

from redline.errors import PeerError, TornWeightsError, WeightSyncError, WireClosed, WireError, WireTimeout
from redline.types import WeightSet
from redline.weight_sync import Broadcast, CudaIpc, Sending
from redline.weight_sync.buckets import ALIGNMENT, Form, exchange, form_from_json, form_of, lay_out, slots, views
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.sender import BucketTransport
from redline.weight_sync.transports.broadcast import GroupInlet
from redline.weight_sync.transports.cuda_ipc import StagedInlet
from redline.weight_sync.verify import BLOCK, Probe, _mixed_by_torch, _sums_by_torch, block_sums, checksum
from redline.wire import Connection


def make_tensors(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "embed": torch.randn(37, 5),
        "norm": torch.randn(3).to(torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "scalar": torch.randn(()),
        "down": torch.randn(9, 8).to(torch.float16),
    }


# ── layout ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bucket_bytes", [16, 48, 1 << 20])
def test_every_byte_of_every_tensor_is_in_exactly_one_piece(bucket_bytes: int) -> None:
    tensors = make_tensors()
    layout = lay_out([form_of(name, tensor) for name, tensor in tensors.items()], bucket_bytes)
    covered: dict[str, list[int]] = {name: [] for name in tensors}
    for pieces, size in zip(layout.buckets, layout.sizes, strict=True):
        assert size <= bucket_bytes
        ends = [0]
        for piece in pieces:
            assert piece.offset % ALIGNMENT == piece.start % ALIGNMENT == 0
            assert piece.offset >= ends[-1]
            ends.append(piece.offset + piece.nbytes)
            covered[piece.name] += range(piece.start, piece.start + piece.nbytes)
    assert covered == {name: list(range(tensor.nbytes)) for name, tensor in tensors.items()}
    assert layout.nbytes == sum(tensor.nbytes for tensor in tensors.values())


def test_a_form_survives_json_and_what_is_none_is_refused() -> None:
    form = Form("layers.0.qkv.weight", torch.bfloat16, (6, 4))
    assert form_from_json(form.to_json()) == form
    for bad in (None, ["x"], ["x", "load", [1]], ["x", "float32", [-1]], ["x", "float32", "2"], [1, "float32", [1]]):
        with pytest.raises(WeightSyncError, match="form of a tensor"):
            form_from_json(bad)


@pytest.mark.parametrize("scratch", [16, 40, 4096])
def test_two_sets_are_exchanged_through_any_scratch_and_back(scratch: int) -> None:
    live, second = make_tensors(0), make_tensors(1)
    layout = lay_out([form_of(name, tensor) for name, tensor in live.items()], 64)
    buckets = [torch.zeros(size, dtype=torch.uint8) for size in layout.sizes]
    before = {name: tensor.clone() for name, tensor in live.items()}
    ours = [run for pieces in layout.buckets for run in views(pieces, live)]
    theirs = [run for pieces, bucket in zip(layout.buckets, buckets, strict=True) for run in slots(pieces, bucket)]
    for to, value in zip(theirs, [run for pieces in layout.buckets for run in views(pieces, second)], strict=True):
        to.copy_(value)
    exchange(ours, theirs, torch.empty(scratch, dtype=torch.uint8))
    assert all(torch.equal(live[name], tensor) for name, tensor in second.items())
    exchange(ours, theirs, torch.empty(scratch, dtype=torch.uint8))
    assert all(torch.equal(live[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("fails_at", range(6))
def test_an_exchange_that_fails_at_any_copy_leaves_both_sets_as_they_were(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = [torch.zeros(32, dtype=torch.uint8)], [torch.ones(32, dtype=torch.uint8)]
    plant(monkeypatch, [fails_at])
    with pytest.raises(RuntimeError, match="planted"):
        exchange(ours, theirs, torch.empty(16, dtype=torch.uint8))  # two lots of three copies
    assert not ours[0].any()
    assert theirs[0].all()


def test_an_exchange_that_cannot_be_taken_back_says_that_weights_are_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    for fails_at in ([1, 2], [4, 6], [5, 6]):
        plant(monkeypatch, fails_at)
        with pytest.raises(TornWeightsError, match=r"cannot be brought back: RuntimeError: planted"):
            exchange(
                [torch.zeros(32, dtype=torch.uint8)],
                [torch.ones(32, dtype=torch.uint8)],
                torch.empty(16).view(torch.uint8)[:16],
            )


def plant(monkeypatch: pytest.MonkeyPatch, fails_at: Sequence[int]) -> None:
    """These of the copies that follow write part of what they should, and fail."""
    copies, copy = iter(range(100)), PLAIN_COPY

    def failing(into: list[Tensor], values: list[Tensor]) -> None:
        if next(copies) in fails_at:
            into[0].view(-1)[:1].copy_(values[0].view(-1)[:1])
            raise RuntimeError("planted")
        copy(into, values)

    monkeypatch.setattr(torch, "_foreach_copy_", failing)


PLAIN_COPY = torch._foreach_copy_


# ── checksums ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("words", [1, 5, 1024, 2**17, 2**17 + 3])
def test_a_checksum_is_the_sum_of_the_mixed_words(words: int) -> None:
    flat = torch.randint(0, 256, (8 * words,), dtype=torch.uint8)
    assert int(checksum(flat)) == mixed_sum(flat.view(torch.int64).tolist())
    assert torch.equal(block_sums(flat), _sums_by_torch(flat.view(torch.int64)))
    assert len(block_sums(flat)) == -(-words // BLOCK)


@pytest.mark.parametrize(("before", "after"), [(0.0, 2.0), (1.0, 2.0), (1.0, -1.0), (1e-5, 3e-5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_change_of_every_element_alike_shows_in_every_block(before: float, after: float, dtype: torch.dtype) -> None:
    blocks = 5
    flat = torch.full((blocks * BLOCK * 8 // dtype.itemsize,), before, dtype=dtype)
    old = block_sums(flat.view(torch.uint8))
    assert bool((block_sums(flat.fill_(after).view(torch.uint8)) != old).all())


def two_ulps(flat: Tensor) -> None:
    """Two weights, in words whose indices make 2¹⁵ - 1 together."""
    flat.view(torch.int16)[[3, 4 * (BLOCK - 1) + 3]] += 1


def two_signs(flat: Tensor) -> None:
    flat[[43, 3111]] *= -1


def every_fourth(flat: Tensor) -> None:
    flat.view(torch.int16)[3::4] += 1


def two_of_float32(flat: Tensor) -> None:
    flat.view(torch.float32)[[1, 511]] *= 2


def two_signs_of_float32(flat: Tensor) -> None:
    flat.view(torch.float32)[[1, 1001]] *= -1


@pytest.mark.parametrize("change", [two_ulps, two_signs, every_fourth, two_of_float32, two_signs_of_float32])
def test_changes_that_are_each_others_opposites_show(change: Callable[[Tensor], None]) -> None:
    flat = torch.randn(2 * BLOCK, generator=torch.Generator().manual_seed(0)).view(torch.bfloat16).nan_to_num(1.0)
    old = block_sums(flat.view(torch.uint8))
    change(flat)
    assert int(block_sums(flat.view(torch.uint8))[0]) != int(old[0])


def test_no_two_weights_that_move_by_one_cancel_wherever_they_lie_in_a_block() -> None:
    """Every weight of a block of bfloat16 moves up by one, or down, alone: what each adds to the sum has a size of its own."""
    words_W = torch.randint(-(2**63), 2**63 - 1, (BLOCK,), generator=torch.Generator().manual_seed(0))
    places_W = (torch.arange(BLOCK) + 1) * (0x9E3779B97F4A7C15 - 2**64)
    moves = [sign << 16 * lane for lane in range(4) for sign in (1, -1)]
    alone = torch.stack([_mixed_by_torch(words_W + places_W + move) - _mixed_by_torch(words_W + places_W) for move in moves])
    assert len(alone.abs().unique()) == len(moves) * BLOCK


def test_any_changed_byte_and_any_two_exchanged_words_show() -> None:
    flat = torch.randint(0, 256, (8 * 64,), dtype=torch.uint8)
    right = int(checksum(flat))
    draw = random.Random(0)
    for _ in range(200):
        wrong, at = flat.clone(), draw.randrange(len(flat))
        wrong[at] ^= 1 << draw.randrange(8)
        assert int(checksum(wrong)) != right
        words, (i, j) = flat.clone().view(torch.int64), draw.sample(range(64), 2)
        words[i], words[j] = int(words[j]), int(words[i])
        assert int(checksum(words.view(torch.uint8))) != right


# ── two ends ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Run:
    """A trainer and engines, connected."""

    def __init__(self, kind: Any, engines: int = 1, on_lost: Callable[[Connection, WireError], None] | None = None) -> None:
        self.trainer = make_tensors()
        self.engines = [LinkedEngine(self.trainer, f"engine-{index}") for index in range(engines)]
        sending = Sending(timeout_s=60, bucket_bytes=64, on_lost=on_lost)
        self.transport: BucketTransport = kind([engine.channel for engine in self.engines], self.trainer, sending)

    def write(self, version: int) -> WeightSet:
        for tensor in self.trainer.values():
            tensor.add_(1)
        return WeightSet(version, self.trainer)

    def move(self, version: int) -> WeightSet:
        weights = self.write(version)
        self.transport.move(TransferPlan(version, tuple(self.trainer)), weights)
        return weights

    def take(self, version: int, probe: Probe | None = None) -> None:
        weights = self.move(version)
        self.transport.verify(weights)
        self.transport.adopt(probe)

    def assert_all_at(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        for engine in self.engines:
            assert engine.has(tensors)
            assert engine.receiver.version == version
            assert engine.engine.versions[-1:] == [version]
            assert not engine.engine.is_held


@pytest.fixture(params=[CudaIpc, Broadcast])
def make_run(request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(**kwargs: Any) -> Run:
        runs.append(Run(request.param, **kwargs))
        return runs[-1]

    yield make
    for run in runs:
        run.transport.close()
        for engine in run.engines:
            engine.close()


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_several_engines_get_every_version_and_stand_still_for_the_exchange_alone(make_run: Callable[..., Run]) -> None:
    run = make_run(engines=3)
    for version in range(1, 5):
        began = time.perf_counter()
        run.take(version)
        assert 0 < run.transport.pause_s < time.perf_counter() - began
        run.assert_all_at(version, run.trainer)
    assert [engine.engine.num_holds for engine in run.engines] == [4] * 3
    assert set(run.transport.parts) == {"gather", "serialise", "transfer", "load", "verify", "resume"}


def test_after_an_update_every_engine_can_go_back_and_forth(make_run: Callable[..., Run]) -> None:
    run = make_run(engines=2)
    run.take(1)
    old = copies(run.trainer)
    run.take(2)
    run.transport.revert(2)
    run.assert_all_at(1, old)
    run.transport.revert(2)
    run.assert_all_at(1, old)
    run.take(3)
    run.assert_all_at(3, run.trainer)


def test_part_of_the_tensors_may_move(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.take(1)
    old = copies(run.trainer)
    weights = run.write(2)
    run.transport.move(TransferPlan(2, ("norm", "down")), weights)
    run.transport.verify(weights)
    run.transport.adopt()
    run.assert_all_at(2, {**old, "norm": run.trainer["norm"], "down": run.trainer["down"]})
    run.transport.revert(2)
    run.assert_all_at(1, old)


def test_an_engine_that_does_not_take_the_version_leaves_all_of_them_at_the_old_one(make_run: Callable[..., Run]) -> None:
    run = make_run(engines=2)
    run.take(1)
    old = copies(run.trainer)
    run.engines[1].engine.refuses = 2
    with pytest.raises(PeerError, match="engine-1: RuntimeError: the engine does not take it"):
        run.take(2)
    run.transport.revert(2)
    run.assert_all_at(1, old)
    run.engines[1].engine.refuses = None
    run.take(3)
    run.assert_all_at(3, run.trainer)


def test_a_bucket_whose_bytes_were_lost_is_named_and_never_adopted(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    run.take(1)
    old = copies(run.trainer)
    loads = iter(range(100))
    for inlet in (StagedInlet, GroupInlet):

        def load(self: Any, slot: int, into: Tensor, ranges: Any, whole: Callable[..., None] = inlet.load) -> None:
            whole(self, slot, into, ranges)
            if next(loads) == 1:
                into[3] ^= 4

        monkeypatch.setattr(inlet, "load", load)
    weights = run.move(2)
    with pytest.raises(WeightSyncError, match=r"engine-0 has other bytes than were sent in 1 of \d+ buckets \(embed\)"):
        run.transport.verify(weights)
    run.transport.revert(2)
    run.assert_all_at(1, old)


def test_an_engine_that_does_not_answer_is_named_within_the_time_limit() -> None:
    trainer = make_tensors()
    answering = LinkedEngine(trainer, "engine-0")
    deaf, other_end = connected("engine-1")
    with pytest.raises(WireTimeout, match=r"engine-1 did not answer 'open' of the weights within 1 s"):
        CudaIpc([answering.channel, deaf], trainer, Sending(timeout_s=1.0))
    other_end.close()
    answering.close()


def test_an_engine_that_ends_is_named_and_the_others_keep_the_old_version(make_run: Callable[..., Run]) -> None:
    run = make_run(engines=2)
    run.take(1)
    old = copies(run.trainer)
    run.engines[1].worker.close()
    with pytest.raises(WireClosed, match="engine-1 has ended the connection"):
        run.move(2)
    run.transport.revert(2)
    assert run.engines[0].has(old)
    assert run.engines[0].receiver.version == 1


def test_a_pool_goes_on_without_an_engine_that_ended_and_one_that_joins_is_brought_up(make_run: Callable[..., Run]) -> None:
    lost: list[str] = []
    run = make_run(engines=2, on_lost=lambda channel, error: lost.append(f"{channel.name}: {error.message}"))
    run.take(1)
    run.engines[0].worker.close()
    run.take(2)
    assert lost == ["engine-0: engine-0 has ended the connection"]
    run.engines = [run.engines[1], LinkedEngine(run.trainer, "engine-2")]
    run.transport.catch_up(run.engines[1].channel, WeightSet(2, run.trainer))
    run.assert_all_at(2, run.trainer)
    run.take(3)
    run.assert_all_at(3, run.trainer)


def test_tensors_that_the_engine_does_not_have_in_this_form_are_refused_before_anything_moves() -> None:
    trainer = make_tensors()
    linked = LinkedEngine({**trainer, "norm": torch.zeros(4, dtype=torch.bfloat16)})
    with pytest.raises(PeerError, match=r"the trainer writes norm: .* \[3\], the engine reads norm: .* \[4\]"):
        CudaIpc([linked.channel], trainer, Sending(timeout_s=60))
    linked.close()


def test_a_probe_that_fails_brings_the_old_version_back() -> None:
    trainer, answers = make_tensors(), {"logprob": -1.0}
    linked = LinkedEngine(trainer, logprobs=lambda tokens: [answers["logprob"]] * (len(tokens) - 1))
    transport = CudaIpc([linked.channel], trainer, Sending(timeout_s=60))
    plan, probe = TransferPlan(1, tuple(trainer)), Probe([1, 2, 3], [-1.01, -0.99], 0.05)
    transport.move(plan, WeightSet(1, trainer))
    transport.adopt(probe)
    assert linked.engine.versions == [1]
    old = copies(trainer)
    trainer["norm"].add_(1)
    answers["logprob"] = float("nan")
    transport.move(TransferPlan(2, tuple(trainer)), WeightSet(2, trainer))
    with pytest.raises(PeerError, match="logprobs of a fixed prompt"):
        transport.adopt(probe)
    assert linked.has(old)
    assert linked.engine.versions == [1, 2, 1]
    linked.close()
