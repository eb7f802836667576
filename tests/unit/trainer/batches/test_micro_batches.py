from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes import Attempt, train_batch

from redline.errors import TrainingError
from redline.kernels.segments import NO_PARENT
from redline.trainer.batches.balance import LITTLE_WAITING
from redline.trainer.batches.cost import CostModel
from redline.trainer.batches.micro_batches import MicroBatch, MicroBatchPlan, micro_batches, plan_micro_batches
from redline.types import TrainBatch

ALWAYS_SHARE = CostModel(per_segment=0)
tokens = st.integers(0, 9)  # few, so that attempts often begin alike
costs = st.sampled_from([CostModel(), ALWAYS_SHARE, CostModel(per_pair=0.05), CostModel(per_segment=1e9)])


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    """Groups whose attempts mostly share a prompt; of one turn, or with words of the environment in between."""
    groups = []
    for _ in range(draw(st.integers(0, 4))):
        prompt = draw(st.lists(tokens, min_size=1, max_size=12))
        own = draw(st.sampled_from([0, 0, 3]))  # tokens that attempts may each have at the end of their prompt
        each = [prompt + draw(st.lists(tokens, max_size=own)) for _ in range(draw(st.integers(1, 4)))]
        groups.append([draw(attempts(each_prompt)) for each_prompt in each])
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


def found_and_expected(batch: TrainBatch, micros: list[MicroBatch]) -> tuple[Counter, Counter]:
    """Each trained token with its sequence, its place in the batch, all tokens before it, and its old logprob."""
    found: Counter = Counter()
    for micro in micros:
        for m, (index, sequence) in enumerate(zip(micro.index_M.tolist(), micro.sequence_M.tolist(), strict=True)):
            before = tuple(context(micro, micro.predicted_from_M[m]))
            found[sequence, index, before, int(micro.targets_M[m]), float(micro.old_logprobs_M[m])] += 1
    expected: Counter = Counter()
    for sequence in range(batch.num_sequences):
        start, end = batch.cu_seqlens[sequence : sequence + 2].tolist()
        for index in range(start, end):
            if batch.loss_mask[index]:
                before = tuple(batch.tokens[start:index].tolist())
                expected[sequence, index, before, int(batch.tokens[index]), float(batch.old_logprobs[index])] += 1
    return found, expected


def of_all_ranks(plan: MicroBatchPlan) -> list[MicroBatch]:
    return [micro for rank in range(len(plan.sequences_RN)) for micro in plan.of_rank(rank)]


# ── properties ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(batches(), st.integers(1, 60), st.integers(1, 4), costs)
def test_every_chosen_token_is_trained_once_from_all_the_tokens_before_it(
    batch: TrainBatch, budget: int, num_ranks: int, cost: CostModel
) -> None:
    found, expected = found_and_expected(batch, of_all_ranks(plan_micro_batches(batch, budget, num_ranks, cost)))
    assert found == expected


@settings(max_examples=40)
@given(batches(), st.integers(1, 60), st.integers(1, 4), costs)
def test_no_micro_batch_is_over_budget_unless_one_sequence_is(
    batch: TrainBatch, budget: int, num_ranks: int, cost: CostModel
) -> None:
    for micro in of_all_ranks(plan_micro_batches(batch, budget, num_ranks, cost)):
        assert len(micro.tokens_T) == micro.segments.offsets[-1]
        distinct = {tuple(batch.tokens[slice(*batch.cu_seqlens[number : number + 2])]) for number in micro.sequence_M}
        assert len(micro.tokens_T) <= budget or len(distinct) == 1


@settings(max_examples=40)
@given(batches(), st.integers(1, 60), st.integers(1, 4), costs)
def test_every_rank_has_as_many_micro_batches_as_the_others_and_the_plan_counts_their_tokens(
    batch: TrainBatch, budget: int, num_ranks: int, cost: CostModel
) -> None:
    plan = plan_micro_batches(batch, budget, num_ranks, cost)
    for rank in range(num_ranks):
        micros = list(plan.of_rank(rank))
        assert len(micros) == plan.num_micro_batches
        laid_out = [len(micro.tokens_T) if len(micro.index_M) else 0 for micro in micros]
        assert laid_out == plan.tokens_RN[rank].tolist()
    idle = sum(len(micro.index_M) == 0 for micro in of_all_ranks(plan))
    assert idle == plan.num_padding_tokens
    assert idle < num_ranks or num_ranks == 1


@settings(max_examples=40)
@given(batches(), st.integers(1, 60), st.integers(1, 4))
def test_a_plan_is_the_same_every_time(batch: TrainBatch, budget: int, num_ranks: int) -> None:
    first, second = (plan_micro_batches(batch, budget, num_ranks) for _ in range(2))
    for one, other in zip(of_all_ranks(first), of_all_ranks(second), strict=True):
        assert one.index_M.tolist() == other.index_M.tolist()


@settings(max_examples=40)
@given(batches(), st.integers(1, 60), costs)
def test_a_micro_batch_has_parents_that_have_none_themselves(batch: TrainBatch, budget: int, cost: CostModel) -> None:
    for micro in plan_micro_batches(batch, budget, cost=cost).of_rank(0):
        parents = micro.segments.parents
        assert all(parents[parent] == NO_PARENT for parent in parents if parent != NO_PARENT)
        assert (micro.segments.lengths > 0).all()


@settings(max_examples=40)
@given(batches(), st.integers(1, 60))
def test_sequences_are_numbered_from_zero_within_a_micro_batch(batch: TrainBatch, budget: int) -> None:
    for micro in micro_batches(batch, budget):
        numbers = sorted(set(micro.sequence_M.tolist()))
        assert micro.local_sequence_M.tolist() == [numbers.index(sequence) for sequence in micro.sequence_M]


@settings(max_examples=40)
@given(batches())
def test_one_rank_with_room_for_all_has_one_micro_batch(batch: TrainBatch) -> None:
    plan = plan_micro_batches(batch, 10**6, cost=ALWAYS_SHARE)
    assert plan.num_micro_batches == (1 if batch.num_sequences else 0)
    assert plan.imbalance == plan.rank_imbalance == 1
    assert plan.num_padding_tokens == 0


@settings(max_examples=40)
@given(batches(), st.integers(1, 4), costs)
def test_no_rank_waits_longer_than_longest_first_scheduling_of_single_sequences_allows(
    batch: TrainBatch, num_ranks: int, cost: CostModel
) -> None:
    lengths_S = np.diff(batch.cu_seqlens)
    cost_S = cost.run(lengths_S, np.zeros_like(lengths_S))
    slowest = plan_micro_batches(batch, 10**6, num_ranks, cost).cost_RN.max(initial=0)
    waiting = (1 - 1 / num_ranks) * cost_S.max(initial=0)
    assert slowest <= cost_S.sum() / num_ranks / (1 - LITTLE_WAITING) + waiting + 1e-9


# ── what is shared ─────────────────────────────────────────────────────────────────────────────────────────────────────


def attempts_at(prompt: list[int], *answers: list[int]) -> list[Attempt]:
    return [Attempt([(prompt, False), (answer, True)], 1.0) for answer in answers]


def test_with_room_for_all_each_prompt_is_there_once() -> None:
    prompts = [[group] * 9 for group in range(3)]
    batch = train_batch([attempts_at(prompt, [20, 21], [30], [40, 41, 42]) for prompt in prompts])
    (micro,) = micro_batches(batch, 1000)
    assert len(micro.tokens_T) == 3 * (9 + 6)
    assert np.count_nonzero(micro.segments.parents == NO_PARENT) == 3


def test_a_group_that_is_cut_in_two_has_its_prompt_in_both() -> None:
    prompt = [1, 2, 3, 4]
    batch = train_batch([attempts_at(prompt, *([10 + i] * 3 for i in range(4)))])
    first, second = micro_batches(batch, 11)
    assert first.tokens_T.tolist() == [*prompt, 10, 10, 10, 12, 12, 12]
    assert second.tokens_T.tolist() == [*prompt, 11, 11, 11, 13, 13, 13]
    assert first.sequence_M.tolist() == [0, 0, 0, 2, 2, 2]
    assert second.local_sequence_M.tolist() == [0, 0, 0, 1, 1, 1]
    assert first.predicted_from_M.tolist() == [3, 4, 5, 3, 7, 8]


def test_attempts_whose_prompts_differ_share_what_comes_before() -> None:
    group = [Attempt([([1] * 9 + [tool] * 3, False), ([5, 6], True)], 1.0) for tool in (2, 3, 4)]
    (micro,) = micro_batches(train_batch([group]), 1000)
    assert micro.segments.lengths.tolist() == [9, 5, 5, 5]
    assert micro.segments.parents.tolist() == [NO_PARENT, 0, 0, 0]


def test_a_group_shares_no_more_than_its_first_to_speak_has_heard() -> None:
    early, late = [([7] * 10, False), ([5, 5], True)], [([7] * 14, False), ([5], True)]
    (micro,) = micro_batches(train_batch([[Attempt(early, 1.0), Attempt(late, -1.0)]]), 1000)
    assert micro.segments.lengths.tolist() == [10, 2, 5]


@pytest.mark.parametrize(
    ("prompt", "attempts"),
    [pytest.param([1] * 50, 1, id="one attempt"), pytest.param([1, 2], 8, id="a handful of tokens")],
)
def test_a_prompt_that_does_not_pay_is_laid_plainly(prompt: list[int], attempts: int) -> None:
    batch = train_batch([attempts_at(prompt, *([5, 6 + number] for number in range(attempts)))])
    (micro,) = micro_batches(batch, 1000)
    assert micro.segments.parents.tolist() == [NO_PARENT] * attempts
    assert micro.tokens_T.tolist() == batch.tokens.tolist()


def test_attempts_with_the_same_tokens_go_through_the_network_once() -> None:
    batch = train_batch([attempts_at([1] * 9, [5, 6], [7, 8], [5, 6], [5, 6, 6], [5, 6])])
    (micro,) = micro_batches(batch, 1000)
    assert micro.tokens_T.tolist() == [*[1] * 9, 5, 6, 7, 8, 5, 6, 6]
    assert micro.sequence_M.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4]
    assert micro.predicted_from_M.tolist() == [8, 9, 8, 11, 8, 9, 8, 13, 14, 8, 9]
    assert micro.index_M.tolist() == np.flatnonzero(batch.loss_mask).tolist()


def test_the_same_tokens_in_another_group_or_after_other_words_are_not_the_same() -> None:
    early, late = [([7] * 10, False), ([5, 5], True)], [([7] * 10 + [5], False), ([5], True)]
    batch = train_batch([[Attempt(early, 1.0), Attempt(late, -1.0)], [Attempt(early, 1.0)]])
    (micro,) = micro_batches(batch, 1000)
    assert len(micro.tokens_T) == 10 + 2 + 2 + 12


def test_a_plan_counts_attempts_with_the_same_tokens_once() -> None:
    answers = ([5, 6], [7, 8], [5, 6], [5, 6])
    plan = plan_micro_batches(train_batch([attempts_at([1] * 9, *answers)]), 1000)
    assert plan.num_tokens == plan.load.tokens == 9 + 4
    assert plan.load.sampled_tokens == 4 * 11
    assert plan.load.trained_tokens == 8
    assert plan.load == plan_micro_batches(train_batch([attempts_at([1] * 9, *answers)]), 12, num_ranks=2).load


def test_an_attempt_that_is_alone_in_a_micro_batch_is_one_segment() -> None:
    batch = train_batch([attempts_at([1] * 9, [5] * 8, [6] * 8)])
    for micro in micro_batches(batch, 20):
        assert micro.segments.lengths.tolist() == [17]


def test_a_sequence_with_nothing_to_train_on_is_left_out() -> None:
    silent = Attempt([([1] * 30, False)], 1.0)
    batch = train_batch([[silent, *attempts_at([1] * 9, [5], [6])], [silent]])
    (micro,) = micro_batches(batch, 1000)
    assert micro.sequence_M.tolist() == [1, 2]
    assert len(micro.tokens_T) == 9 + 2
    assert list(micro_batches(train_batch([[silent]]), 1000)) == []


def test_a_batch_without_sequences_has_no_micro_batches() -> None:
    assert plan_micro_batches(train_batch([]), 100, num_ranks=3).num_micro_batches == 0


def test_a_sequence_without_a_prompt_is_refused() -> None:
    with pytest.raises(AssertionError, match="first token"):
        list(micro_batches(train_batch([[Attempt([([5, 6], True)], 1.0)]]), 100))


# ── size and balance ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sequence_longer_than_the_budget_goes_alone() -> None:
    long, short = Attempt([([1], False), ([5] * 20, True)], 1.0), Attempt([([2], False), ([6], True)], 1.0)
    micros = list(micro_batches(train_batch([[short], [long], [short]]), 10))
    assert [len(micro.tokens_T) for micro in micros] == [21, 4]


def test_a_sequence_that_cannot_fit_at_all_is_refused_with_the_fix() -> None:
    batch = train_batch([attempts_at([1] * 9, [5] * 20)])
    assert plan_micro_batches(batch, 10, max_sequence=29).num_micro_batches == 1
    with pytest.raises(TrainingError, match="29 tokens") as caught:
        plan_micro_batches(batch, 10, max_sequence=28)
    assert "rollouts.max_new_tokens" in caught.value.hint


def test_a_group_stays_together_where_there_is_work_for_all_ranks() -> None:
    batch = train_batch([attempts_at([group] * 40, *([5 + number] * 10 for number in range(4))) for group in range(4)])
    plan = plan_micro_batches(batch, 1000, num_ranks=2)
    assert plan.num_tokens == 4 * (40 + 4 * 10)
    assert plan.rank_imbalance == 1


def test_a_group_is_cut_where_ranks_would_wait_longer_than_its_prompt_takes() -> None:
    batch = train_batch([attempts_at([1] * 40, *([5 + number] * 100 for number in range(8)))])
    plan = plan_micro_batches(batch, 10_000, num_ranks=4)
    assert plan.tokens_RN.tolist() == [[240]] * 4


def test_a_group_with_a_long_prompt_and_short_answers_is_not_cut() -> None:
    batch = train_batch([attempts_at([group] * 400, *([5 + number] for number in range(8))) for group in range(3)])
    assert plan_micro_batches(batch, 10_000, num_ranks=2).num_tokens == 3 * 408


def test_long_sequences_weigh_more_than_their_tokens() -> None:
    lengths = [900] + [100] * 18
    batch = train_batch([[attempts_at([1], [5] * (length - 1))[0]] for length in lengths])
    plan = plan_micro_batches(batch, 10_000, num_ranks=2, cost=CostModel(per_pair=1e-3))
    assert sorted(plan.tokens_RN.ravel().tolist()) != [1300, 1400]
    assert plan.rank_imbalance < 1.05


def test_the_dearest_micro_batches_come_first() -> None:
    generator = np.random.default_rng(0)
    batch = train_batch([[attempts_at([1], [5] * int(length))[0]] for length in generator.integers(1, 200, 60)])
    cost_RN = plan_micro_batches(batch, 512, num_ranks=2).cost_RN
    assert cost_RN.shape[1] > 3
    assert (np.diff(cost_RN, axis=1) <= 0).all()


def test_ten_thousand_sequences_are_planned_in_a_fraction_of_a_second() -> None:
    generator = np.random.default_rng(0)
    batch = train_batch(
        [
            attempts_at([group] * int(generator.integers(20, 60)), *([5] * int(n) for n in generator.integers(1, 80, 8)))
            for group in range(1250)
        ]
    )
    start = time.thread_time()
    plan = plan_micro_batches(batch, 4096, num_ranks=8)
    assert time.thread_time() - start < 5.0  # 0.02 s on a core of its own; what grows with the square takes minutes
    assert plan.rank_imbalance < 1.01


def test_micro_batches_of_several_ranks_may_be_taken_in_turn_by_fewer() -> None:
    batch = train_batch([[Attempt([([1, 2, n], False), ([n] * (n + 1), True)], 1.0, [-1.0] * (n + 1))] for n in range(11)])
    planned = plan_micro_batches(batch, 12, 4)
    merged = planned.in_turn(2)
    assert (len(merged.sequences_RN), merged.num_micro_batches) == (2, 2 * planned.num_micro_batches)
    assert [list(s) for s in merged.sequences_RN[0][:2]] == [list(planned.sequences_RN[rank][0]) for rank in (0, 1)]
    for plan in (planned, merged):
        assert sorted(n for rank in plan.sequences_RN for each in rank for n in each) == list(range(11))
    assert merged.tokens_RN.sum() == planned.tokens_RN.sum()
    assert merged.cost_RN.shape == merged.tokens_RN.shape == (2, merged.num_micro_batches)
