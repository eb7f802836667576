from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from support.fakes import Attempt, train_batch

from redline.trainer.batches.micro_batches import micro_batches
from redline.trainer.batches.staging import ALIGNMENT, Arrays, Staging, Taken, pack, packed_size, views

DTYPES = st.sampled_from([np.int64, np.int32, np.float32, np.bool_])


@given(st.lists(arrays_of.arrays(DTYPES, arrays_of.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5)), max_size=6))
def test_packed_arrays_come_out_as_they_went_in(each: list[np.ndarray]) -> None:
    arrays = {str(number): array for number, array in enumerate(each)}
    buffer = torch.full((packed_size(arrays) + 3,), 255, dtype=torch.uint8)
    pack(arrays, buffer)
    for name, tensor in views(arrays, buffer).items():
        found = tensor.numpy()
        assert (found.dtype, found.shape) == (arrays[name].dtype, arrays[name].shape)
        assert found.tobytes() == arrays[name].tobytes()


def test_every_view_begins_at_a_multiple_of_the_alignment() -> None:
    arrays = {"one": np.zeros(1, np.int64), "three": np.zeros(3, np.float32), "two": np.zeros(2, np.int64)}
    for tensor in views(arrays, torch.zeros(packed_size(arrays), dtype=torch.uint8)).values():
        assert tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0


def test_an_array_that_is_not_contiguous_is_packed_in_its_own_order() -> None:
    arrays = {"columns": np.arange(6).reshape(2, 3).T}
    buffer = torch.zeros(packed_size(arrays), dtype=torch.uint8)
    pack(arrays, buffer)
    assert views(arrays, buffer)["columns"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_on_the_cpu_every_item_has_a_buffer_of_its_own() -> None:
    arrays = [{"array": np.arange(4), "taken": Taken(np.arange(9, dtype=np.int32), np.array([7, n]))} for n in range(3)]
    found = list(Staging(torch.device("cpu")).sent(enumerate(arrays)))
    assert [item for item, _ in found] == [0, 1, 2]
    assert [tensors["array"].tolist() for _, tensors in found] == [[0, 1, 2, 3]] * 3
    assert [tensors["taken"].tolist() for _, tensors in found] == [[7, 0], [7, 1], [7, 2]]
    assert found[0][1]["taken"].dtype == torch.int32


def test_an_item_is_packed_when_it_is_asked_for() -> None:
    made = []

    def items() -> Iterator[tuple[int, Arrays]]:
        for number in range(3):
            made.append(number)
            yield number, {"x": np.full(2, number)}

    seen = [(number, list(made)) for number, _ in Staging(torch.device("cpu")).sent(items())]
    assert seen == [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])]


def test_nothing_to_send_is_no_item() -> None:
    assert list(Staging(torch.device("cpu")).sent([])) == []


@pytest.mark.gpu
def test_on_a_gpu_every_micro_batch_arrives_whole() -> None:
    attempts = [Attempt([([1, 2, 3], False), (list(range(10 + i, 40 + i)), True)], 1.0) for i in range(20)]
    sent = [
        (micro, {"tokens_T": micro.tokens, "old_logprobs_M": micro.old_logprobs, "index_M": micro.index_M})
        for micro in micro_batches(train_batch([[attempt] for attempt in attempts]), 66)
    ]
    for micro, tensors in Staging(torch.device("cuda")).sent(sent):
        torch.cuda._sleep(10**7)  # the device is behind when the next copy is made
        for name, tensor in tensors.items():
            assert tensor.is_cuda
            assert np.array_equal(tensor.clone().cpu().numpy(), getattr(micro, name))
