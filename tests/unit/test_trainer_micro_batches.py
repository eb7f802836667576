from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from fakes import Attempt, train_batch
from hypothesis import given
from hypothesis import strategies as st

from redline.models.packed_attention import NO_PARENT
from redline.trainer.micro_batches import MicroBatch, micro_batches
from redline.types import TrainBatch

tokens = st.integers(0, 9)  # few, so that attempts often begin alike


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    """Groups with one prompt each; attempts of one turn, or with words of the environment in between."""
    groups = []
    for _ in range(draw(st.integers(0, 4))):
        prompt = draw(st.lists(tokens, min_size=1, max_size=12))
        groups.append([draw(attempts(prompt)) for _ in range(draw(st.integers(1, 4)))])
    return train_batch(groups)


@st.composite
def attempts(draw: st.DrawFn, prompt: list[int]) -> Attempt:
    turns: list[tuple[list[int], bool]] = [(prompt, False)]
    for turn in range(draw(st.integers(1, 3))):
        if turn:
            turns.append((draw(st.lists(tokens, max_size=3)), False))
        turns.append((draw(st.lists(tokens, min_size=1, max_size=8)), True))
    chosen = sum(len(words) for words, by_policy in turns if by_policy)
    old = draw(st.lists(st.floats(-5, 0, width=32), min_size=chosen, max_size=chosen))
    return Attempt(turns, draw(st.floats(-2, 2, width=32)), old)


def context(micro: MicroBatch, index: int) -> list[int]:
    """Every token that packed token `index` attends to, itself included, in order."""
    offsets, parents = micro.segments.offsets, micro.segments.parents
    segment = int(np.searchsorted(offsets, index, side="right")) - 1
    parent = parents[segment]
    before = micro.tokens_T[offsets[parent] : offsets[parent + 1]].tolist() if parent != NO_PARENT else []
    return before + micro.tokens_T[offsets[segment] : index + 1].tolist()


@given(batches(), st.integers(1, 60))
def test_every_chosen_token_is_trained_once_from_all_the_tokens_before_it(batch: TrainBatch, budget: int) -> None:
    found: Counter[tuple[int, tuple[int, ...], int, float]] = Counter()
    for micro in micro_batches(batch, budget):
        for index, target, old, sequence in zip(
            micro.predicted_from_M, micro.targets_M, micro.old_logprobs_M, micro.sequence_M, strict=True
        ):
            found[int(sequence), tuple(context(micro, index)), int(target), float(old)] += 1
    expected: Counter[tuple[int, tuple[int, ...], int, float]] = Counter()
    for sequence in range(batch.num_sequences):
        start, end = batch.cu_seqlens[sequence : sequence + 2]
        for index in range(start, end):
            if batch.loss_mask[index]:
                before = tuple(batch.tokens[start:index].tolist())
                expected[sequence, before, int(batch.tokens[index]), float(batch.old_logprobs[index])] += 1
    assert found == expected


@given(batches(), st.integers(1, 60))
def test_no_micro_batch_is_over_budget_unless_one_sequence_is(batch: TrainBatch, budget: int) -> None:
    for micro in micro_batches(batch, budget):
        assert len(micro.tokens_T) == micro.segments.offsets[-1]
        assert len(micro.tokens_T) <= budget or len(set(micro.sequence_M.tolist())) == 1


@given(batches())
def test_under_a_large_budget_each_prompt_is_there_once_and_nothing_is_padded(batch: TrainBatch) -> None:
    micros = list(micro_batches(batch, 10**6))
    assert len(micros) == (1 if batch.num_sequences else 0)
    for micro in micros:
        assert np.count_nonzero(micro.segments.parents == NO_PARENT) == len(batch.group_offsets) - 1
        assert len(micro.tokens_T) < len(batch.tokens) or batch.num_sequences == len(batch.group_offsets) - 1


@given(batches(), st.integers(1, 60))
def test_a_micro_batch_has_parents_that_have_none_themselves(batch: TrainBatch, budget: int) -> None:
    for micro in micro_batches(batch, budget):
        parents = micro.segments.parents
        assert all(parents[parent] == NO_PARENT for parent in parents if parent != NO_PARENT)


def test_a_group_that_is_cut_in_two_has_its_prompt_in_both() -> None:
    prompt = [1, 2, 3, 4]
    batch = train_batch([[Attempt([(prompt, False), ([10 + i] * 3, True)], 1.0) for i in range(4)]])
    first, second = micro_batches(batch, 11)
    assert first.tokens_T.tolist() == [*prompt, 10, 10, 10, 11, 11, 11]
    assert second.tokens_T.tolist() == [*prompt, 12, 12, 12, 13, 13, 13]
    assert first.sequence_M.tolist() == [0, 0, 0, 1, 1, 1]
    assert second.sequence_M.tolist() == [2, 2, 2, 3, 3, 3]
    assert first.predicted_from_M.tolist() == [3, 4, 5, 3, 7, 8]


def test_a_sequence_longer_than_the_budget_goes_alone() -> None:
    long, short = Attempt([([1], False), ([5] * 20, True)], 1.0), Attempt([([2], False), ([6], True)], 1.0)
    micros = list(micro_batches(train_batch([[short], [long], [short]]), 10))
    assert [len(micro.tokens_T) for micro in micros] == [2, 21, 2]


def test_a_batch_without_sequences_has_no_micro_batches() -> None:
    assert list(micro_batches(train_batch([]), 100)) == []


def test_attempts_with_different_prompts_in_one_group_are_refused() -> None:
    group = [Attempt([([1, 2], False), ([5], True)], 1.0), Attempt([([1, 3], False), ([5], True)], 1.0)]
    with pytest.raises(AssertionError, match="differ in their prompt"):
        list(micro_batches(train_batch([group]), 100))


def test_a_sequence_without_a_prompt_is_refused() -> None:
    with pytest.raises(AssertionError, match="first token"):
        list(micro_batches(train_batch([[Attempt([([5, 6], True)], 1.0)]]), 100))
