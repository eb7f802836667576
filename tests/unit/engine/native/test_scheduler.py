"""The scheduler against `symbolic_device`: no tensor anywhere, and blocks that know what they hold."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.symbolic_device import World, alone

from redline.engine.native.scheduler import Plan
from redline.engine.native.sequence import NO_ROW, Sequence, Stage


def chunks(plan: Plan) -> list[tuple[int, int, int]]:
    """(request, start, end)."""
    return [(chunk.sequence.request_id, chunk.start, chunk.end) for chunk in plan.chunks]


def numbers(sequences: list[Sequence]) -> list[tuple[int, int]]:
    """(request, completion)."""
    return [(sequence.request_id, sequence.index) for sequence in sequences]


def counting(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


# ── admission ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_are_admitted_in_the_order_they_came() -> None:
    world = World(num_rows=3)
    for start in (0, 10, 20, 30):
        world.submit(counting(3, start), max_tokens=3)
    assert numbers(world.step().admitted) == [(1, 0), (2, 0), (3, 0)]
    assert world.scheduler.num_waiting == 1
    world.run()
    assert [s.request_id for s in world.finished] == [1, 2, 3, 4]


def test_requests_that_wait_begin_by_their_order_and_then_as_they_came() -> None:
    world = World(num_rows=1)
    for start, order in ((0, (0, 0.0)), (10, (1, -3.0)), (20, (1, -9.0)), (30, (0, -1.0)), (40, (1, -9.0))):
        world.submit(counting(3, start), max_tokens=2, order=order)
    world.run()
    assert [s.request_id for s in world.finished] == [4, 1, 3, 5, 2]


def test_no_request_overtakes_what_has_begun() -> None:
    world = World(num_blocks=6, block_size=2, num_rows=4)
    first, second = (world.submit(counting(3, start), max_tokens=8, order=(5, 0.0)) for start in (0, 20))
    while world.scheduler.counts.preemptions == 0:
        world.step()
    assert second[0].stage is Stage.WAITING
    world.submit([50], max_tokens=1, order=(0, 0.0))
    assert world.scheduler.waiting[0] is second[0]
    world.run()
    assert [s.request_id for s in world.finished][:1] == [first[0].request_id]
    world.assert_empty()


def test_a_small_request_does_not_overtake_a_large_one_that_waits() -> None:
    world = World(num_blocks=4, block_size=4)
    world.submit(counting(9), max_tokens=4)
    world.submit(counting(12, 20), max_tokens=1)
    world.submit([50], max_tokens=1)
    assert numbers(world.step().admitted) == [(1, 0)]
    assert world.step().admitted == []
    world.run()
    assert [s.request_id for s in world.finished] == [1, 2, 3]


def test_a_request_begins_with_the_rows_there_are_and_its_other_completions_find_the_prompt_computed() -> None:
    world = World(num_rows=4, block_size=4)
    world.submit([1, 2], max_tokens=2, n=2)
    world.submit(counting(9, 10), max_tokens=3, n=4)
    world.submit([50], max_tokens=1)
    assert numbers(world.step().admitted) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (4, 3)
    assert numbers(world.step().admitted) == [], "the rows come free at the end of this step"
    plan = world.step()
    assert numbers(plan.admitted) == [(2, 2), (2, 3)]
    assert chunks(plan) == [(2, 8, 9)], "all but the last token of the prompt is there"
    world.run()
    world.assert_empty()


def test_completions_that_wait_for_a_row_do_not_begin_before_the_prompt_is_computed() -> None:
    world = World(num_rows=2, budget=4, block_size=4)
    world.submit([1], max_tokens=1)
    world.submit(counting(12, 10), max_tokens=2, n=2)
    assert numbers(world.step().admitted) == [(1, 0), (2, 0)]
    while world.scheduler.prefilling:
        assert numbers(world.step().admitted) == [], "a row is free, but the prompt would be computed twice"
    assert numbers(world.step().admitted) == [(2, 1)]
    world.run()
    world.assert_empty()


def test_without_prefix_caching_a_request_waits_until_there_is_a_row_for_each_of_its_completions() -> None:
    world = World(num_rows=4, prefix_caching=False)
    world.submit([1, 2], max_tokens=2, n=2)
    world.submit([3, 4], max_tokens=2, n=3)
    assert numbers(world.step().admitted) == [(1, 0), (1, 1)]
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (2, 3)
    assert numbers(world.step().admitted) == [], "the rows come free at the end of this step"
    assert numbers(world.step().admitted) == [(2, 0), (2, 1), (2, 2)]


def test_a_request_waits_until_its_whole_prompt_has_blocks_and_its_forks_have_copies() -> None:
    world = World(num_blocks=5, block_size=4, num_rows=8)
    world.submit(counting(5), max_tokens=2)  # two blocks
    world.submit(counting(6, 20), max_tokens=2, n=3)  # two, and two copies of the second
    assert numbers(world.step().admitted) == [(1, 0)]
    assert world.pool.num_free == 3
    world.step()
    assert len(world.step().admitted) == 3
    world.run()
    world.assert_empty()


# ── the budget ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_prompts_are_cut_into_chunks_that_fit_the_budget() -> None:
    world = World(budget=4)
    world.submit(counting(10), max_tokens=1)
    world.submit(counting(3, 20), max_tokens=1)
    assert [chunks(world.step()) for _ in range(4)] == [[(1, 0, 4)], [(1, 4, 8)], [(1, 8, 10), (2, 0, 2)], [(2, 2, 3)]]


@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_only_the_last_chunk_of_a_prompt_is_followed_by_a_sample(length: int) -> None:
    world = World(budget=4)
    [sequence] = world.submit(counting(length), max_tokens=2)
    while sequence.stage is not Stage.DECODE:
        plan = world.step()
        [chunk] = plan.chunks
        assert (chunk.samplers == [sequence]) == chunk.is_last == (chunk.end == length)
    assert world.step().chunks == []


def test_decoding_sequences_come_first_and_prompts_get_what_they_leave() -> None:
    world = World(budget=6)
    for start in (0, 10, 20, 30):
        world.submit([start], max_tokens=9)
    world.step()
    world.submit(counting(7, 40), max_tokens=9)
    plan = world.step()
    assert (len(plan.decode), chunks(plan)) == (4, [(5, 0, 2)])
    world.submit(counting(7, 60), max_tokens=9)
    assert [chunks(world.step()) for _ in range(3)] == [[(5, 2, 4)], [(5, 4, 6)], [(5, 6, 7), (6, 0, 1)]]
    assert chunks(world.step()) == [(6, 1, 2)], "five decode now"


def test_a_prompt_advances_by_a_token_even_where_decoding_takes_the_whole_budget() -> None:
    world = World(budget=2)
    for start in (0, 10):
        world.submit([start], max_tokens=20)
    world.step()
    world.submit(counting(3, 40), max_tokens=1)
    assert [chunks(world.step()) for _ in range(4)] == [[(3, 0, 1)], [(3, 1, 2)], [(3, 2, 3)], []]


# ── ends ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_whoever_has_finished_gives_back_its_row_and_blocks() -> None:
    world = World(num_blocks=3, num_rows=1)
    first, second = world.submit(counting(5), max_tokens=3)[0], world.submit(counting(5, 50), max_tokens=3)[0]
    world.step()
    row = first.row
    assert world.pool.num_used == 2
    world.step()
    world.step()
    assert (first.stage, first.row, first.blocks) == (Stage.FINISHED, NO_ROW, [])
    assert world.pool.num_used == 0
    world.step()
    assert second.row == row
    world.run()
    assert [s.sampled.token_ids.tolist() for s in (first, second)] == [alone(first), alone(second)]
    world.assert_empty()


def test_a_sequence_takes_a_block_only_when_it_writes_into_it() -> None:
    world = World(block_size=4)
    [sequence] = world.submit(counting(3), max_tokens=7)
    held = []
    while sequence.stage is not Stage.FINISHED:
        world.step()
        held.append(len(sequence.blocks))
    # Positions 0 to 2 are the prompt's. The last of the seven tokens is never put through the network.
    assert held == [1, 1, 2, 2, 2, 2, 0]


# ── preemption ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def full_world(**settings: bool) -> tuple[World, list[Sequence]]:
    """Three sequences that hold all six blocks, each at the end of its second."""
    world = World(num_blocks=6, block_size=4, **settings)
    sequences = [world.submit(counting(6, start), max_tokens=12)[0] for start in (0, 20, 40)]
    for _ in range(3):
        world.step()
    assert world.pool.num_free == 0
    return world, sequences


def test_the_sequence_that_came_last_gives_way() -> None:
    world, [first, second, third] = full_world()
    row = third.row
    assert not world.scheduler.can_grow(1)
    plan = world.step()
    assert plan.preempted_rows == [row]
    assert [s.stage for s in (first, second, third)] == [Stage.DECODE, Stage.DECODE, Stage.WAITING]
    assert plan.decode == [first, second]
    assert world.scheduler.counts.preemptions == 1


def test_who_gives_way_keeps_its_tokens_and_nothing_else() -> None:
    world, [_, _, third] = full_world()
    world.step()
    assert (third.row, third.blocks, third.num_computed) == (NO_ROW, [], 0)
    assert third.sampled.token_ids.tolist() == alone(third)[:3]
    assert third.tokens.tolist() == counting(6, 40) + alone(third)[:3]
    assert third.num_sampled_before == 3


def test_who_gave_way_is_the_next_to_be_admitted_but_not_in_the_same_step() -> None:
    world, [first, second, third] = full_world()
    world.submit([9], max_tokens=1)
    assert world.step().admitted == []
    assert [s.request_id for s in world.scheduler.waiting] == [3, 4]
    world.abort(first)
    world.abort(second)
    assert numbers(world.step().admitted) == [(3, 0), (4, 0)]
    assert third.stage is Stage.DECODE
    world.run()
    assert third.sampled.token_ids.tolist() == alone(third)


def test_several_that_give_way_wait_in_the_order_they_came() -> None:
    """All three cross into a third block, and only the first finds room for it."""
    world = World(num_blocks=7, block_size=4)
    for start in (0, 20, 40):
        world.submit(counting(7, start), max_tokens=20)
    world.step()
    world.step()
    while not any(world.step().preempted_rows for _ in range(1)):
        pass
    order = [s.request_id for s in world.scheduler.waiting]
    assert order == sorted(order)
    assert len(order) >= 1
    world.run()
    assert all(s.sampled.token_ids.tolist() == alone(s) for s in world.finished)
    assert len(world.finished) == 3


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_everything_is_sampled_as_if_there_were_no_preemption(prefix_caching: bool) -> None:
    world, sequences = full_world(prefix_caching=prefix_caching)
    world.run()
    assert world.scheduler.counts.preemptions >= 2
    assert [s.sampled.token_ids.tolist() for s in sequences] == [alone(s) for s in sequences]
    world.assert_empty()


def test_who_gave_way_finds_its_own_blocks_where_nobody_took_them() -> None:
    world = World(num_blocks=6, block_size=4)
    first, second, third = (world.submit(counting(length, 20 * length), max_tokens=12)[0] for length in (6, 5, 4))
    for _ in range(4):
        world.step()
    assert third.stage is Stage.WAITING
    world.abort(first)
    world.abort(second)
    assert chunks(world.step()) == [(3, 4, 7)], "its second block was taken, its first is still there"


def test_a_sequence_alone_in_a_cache_of_its_own_size_is_never_preempted() -> None:
    world = World(num_blocks=3, block_size=4)
    [sequence] = world.submit(counting(5), max_tokens=7)
    world.run()
    assert world.scheduler.counts.preemptions == 0
    assert sequence.sampled.token_ids.tolist() == alone(sequence)


# ── forks ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_completions_of_a_prompt_share_its_full_blocks_and_have_their_own_last_one() -> None:
    world = World(block_size=4)
    sequences = world.submit(counting(10), max_tokens=5, n=3)
    plan = world.step()
    assert chunks(plan) == [(1, 0, 10)], "the prompt is computed once"
    assert plan.chunks[0].samplers == sequences
    leader, *followers = sequences
    for follower in followers:
        assert follower.blocks[:2] == leader.blocks[:2]
        assert (leader.blocks[2], follower.blocks[2]) in plan.copies
    assert len({s.blocks[2] for s in sequences}) == 3
    assert world.pool.num_used == 2 + 3
    world.run()
    assert [s.sampled.token_ids.tolist() for s in sequences] == [alone(s) for s in sequences]


def test_completions_of_a_prompt_that_ends_with_a_block_copy_nothing() -> None:
    world = World(block_size=4)
    sequences = world.submit(counting(8), max_tokens=5, n=3)
    plan = world.step()
    assert plan.copies == []
    assert world.pool.num_used == 2
    world.step()
    assert world.pool.num_used == 2 + 3
    world.run()
    assert [s.sampled.token_ids.tolist() for s in sequences] == [alone(s) for s in sequences]


def test_followers_hold_their_rows_while_the_prompt_is_computed() -> None:
    world = World(budget=4, num_rows=3)
    leader, *followers = world.submit(counting(9), max_tokens=2, n=3)
    world.submit([50], max_tokens=1)
    plan = world.step()
    assert [s.stage for s in (leader, *followers)] == [Stage.PREFILL, Stage.FOLLOWING, Stage.FOLLOWING]
    assert len({s.row for s in (leader, *followers)}) == 3
    assert plan.admitted == [leader, *followers]
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (3, 1)


# ── prefixes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_later_request_takes_over_the_blocks_of_the_same_beginning() -> None:
    world = World(block_size=4)
    world.submit([*counting(8), 30, 31], max_tokens=1)
    world.run()
    [later] = world.submit([*counting(8), 40, 41, 42], max_tokens=1)
    assert chunks(world.step()) == [(2, 8, 11)]
    assert later.cached_tokens == 8
    assert (world.scheduler.counts.prefix_query_tokens, world.scheduler.counts.prefix_hit_tokens) == (10 + 11, 8)


def test_a_request_takes_over_blocks_that_are_computed_in_the_same_step() -> None:
    world = World(block_size=4)
    for end in ([30], [40, 41], [50]):
        world.submit([*counting(8), *end], max_tokens=3)
    assert chunks(world.step()) == [(1, 0, 9), (2, 8, 10), (3, 8, 9)]
    assert world.pool.num_used == 2 + 3
    world.run()
    assert all(s.sampled.token_ids.tolist() == alone(s) for s in world.finished)
    world.assert_empty()


def test_a_chunk_offers_only_what_it_has_computed() -> None:
    world = World(block_size=4, budget=6)
    world.submit(counting(12), max_tokens=1)
    assert chunks(world.step()) == [(1, 0, 6)]
    world.submit(counting(12), max_tokens=1)
    assert chunks(world.step()) == [(1, 6, 12)], "the budget is spent"
    assert chunks(world.step()) == [(2, 8, 12)]


@pytest.mark.parametrize(("length", "cached"), [(8, 4), (9, 8), (4, 0), (3, 0), (12, 8)])
def test_the_last_token_of_a_prompt_is_always_computed(length: int, cached: int) -> None:
    world = World(block_size=4)
    for _ in range(2):
        world.submit(counting(length), max_tokens=1)
        plan = world.step()
    assert chunks(plan) == [(2, cached, length)]


def test_a_next_turn_begins_with_the_blocks_of_prompt_and_completion() -> None:
    """The completion's last token was never put through the network, so that it is not among them."""
    world = World(block_size=4)
    [first] = world.submit(counting(6), max_tokens=6)
    world.run()
    said = [*counting(6), *first.sampled.token_ids.tolist()]
    [turn] = world.submit([*said, 77, 78], max_tokens=1)
    world.step()
    assert len(said) == 12
    assert turn.cached_tokens == 8
    [longer] = world.submit([*said, 77, 78], max_tokens=1)
    world.step()
    assert longer.cached_tokens == 12


def test_another_version_finds_nothing() -> None:
    world = World(block_size=4)
    world.submit(counting(9), max_tokens=1)
    world.run()
    world.apply(1)
    [later] = world.submit(counting(9), max_tokens=1)
    assert chunks(world.step()) == [(2, 0, 9)]
    assert later.cached_tokens == 0
    world.apply(0)
    world.submit(counting(9), max_tokens=1)
    assert chunks(world.step()) == [(3, 8, 9)], "the blocks of version 0 are still those of version 0"


def test_what_was_computed_across_an_update_is_offered_to_nobody() -> None:
    world = World(block_size=4, budget=10)
    [decoding] = world.submit(counting(6), max_tokens=9)
    [prefilling, forked] = world.submit(counting(9, 20), max_tokens=9, n=2)
    world.step()
    assert (decoding.stage, prefilling.stage, prefilling.num_computed) == (Stage.DECODE, Stage.PREFILL, 4)
    world.apply(1)
    world.run()
    for version, cached in ((1, [0, 0]), (0, [4, 4])):
        world.apply(version)
        prompts = [[*counting(6), *alone(decoding)], [*counting(9, 20), *alone(forked)]]
        later = [world.submit(prompt, max_tokens=1)[0] for prompt in prompts]
        world.run()
        assert [sequence.cached_tokens for sequence in later] == cached, "what was computed before the update is still good"


def test_a_request_that_waited_for_its_turn_is_looked_up_under_the_version_it_is_computed_with() -> None:
    world = World(block_size=4, num_rows=1)
    world.submit(counting(9), max_tokens=3)
    world.step()
    world.submit(counting(9), max_tokens=1)
    world.step()
    world.apply(1)
    plans = world.run()
    assert [chunks(plan) for plan in plans if plan.chunks] == [[(2, 0, 9)]]
    world.submit(counting(9), max_tokens=1)
    assert chunks(world.step()) == [(3, 8, 9)]


def test_who_gave_way_before_an_update_is_computed_under_the_new_version_and_offered_under_it() -> None:
    world, [first, second, third] = full_world()
    world.step()
    assert third.stage is Stage.WAITING
    world.apply(1)
    world.abort(first)
    world.abort(second)
    assert chunks(world.step()) == [(3, 0, 9)]
    world.run()
    world.submit(counting(6, 40), max_tokens=1)
    assert chunks(world.step()) == [(4, 4, 6)]


def test_adapters_do_not_share_blocks() -> None:
    world = World(block_size=4)
    for adapter in (None, "a", "b", "a", None):
        world.submit(counting(9), max_tokens=1, adapter=adapter)
    assert [start for _, start, _ in chunks(world.step())] == [0, 0, 0, 8, 8]


def test_without_prefix_caching_nothing_is_found() -> None:
    world = World(block_size=4, prefix_caching=False)
    world.submit(counting(9), max_tokens=1)
    world.submit(counting(9), max_tokens=1)
    assert chunks(world.step()) == [(1, 0, 9), (2, 0, 9)]
    world.submit(counting(9), max_tokens=1)
    assert chunks(world.step()) == [(3, 0, 9)]
    assert world.pool.num_cached == 0


def test_a_request_that_wants_its_prompt_scored_has_all_of_it_computed() -> None:
    world = World(block_size=4)
    world.submit(counting(9), max_tokens=1)
    world.submit(counting(9), max_tokens=1, prompt_logprobs=True)
    assert chunks(world.step()) == [(1, 0, 9), (2, 0, 9)]


def test_the_oldest_prefix_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    world = World(num_blocks=4, block_size=4)
    world.submit(counting(9), max_tokens=1)
    world.run()
    world.submit(counting(5, 50), max_tokens=1)
    world.run()
    world.submit(counting(5, 80), max_tokens=1)  # takes the one free block that nobody can find, and one more
    world.run()
    world.submit(counting(9), max_tokens=1)
    assert chunks(world.step()) == [(4, 4, 9)]


# ── several steps at once ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_steps", [2, 3, 8])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_several_steps_at_once_sample_the_same(num_steps: int, runs_ahead: bool) -> None:
    world = World(block_size=4, runs_ahead=runs_ahead)
    sequences = [*world.submit(counting(6), max_tokens=7, n=3), *world.submit(counting(3), max_tokens=20, stop_token_ids=(3,))]
    world.run(num_steps)
    assert [s.sampled.token_ids.tolist() for s in sequences] == [alone(s) for s in sequences]
    world.assert_empty()


def test_several_steps_book_blocks_for_all_of_them_but_never_beyond_the_limit() -> None:
    world = World(block_size=4)
    short, long = world.submit(counting(4), max_tokens=3)[0], world.submit(counting(4, 20), max_tokens=30)[0]
    world.step()
    plan = world.scheduler.schedule(num_steps=6)
    assert plan.num_steps == 6
    assert [len(s.blocks) for s in (short, long)] == [2, 3]
    assert [int(world.rows.launched_R[s.row]) for s in (short, long)] == [3, 7]
    assert world.scheduler.schedule(num_steps=1).decode == [long], "all that the other one may sample is under way"


def test_blocks_suffice_or_they_do_not() -> None:
    """Two sequences with room for one and for three tokens more, and two free blocks."""
    world = World(num_blocks=5, block_size=4)
    world.submit(counting(2), max_tokens=40)
    world.submit(counting(4, 20), max_tokens=5)
    world.step()
    assert [len(s.blocks) for s in world.scheduler.decoding] == [1, 1]
    assert world.pool.num_free == 3
    needed = {1: 0 + 1, 2: 0 + 1, 3: 1 + 1, 6: 1 + 1, 7: 2 + 1, 10: 2 + 1, 11: 3 + 1}
    for num_steps, blocks in needed.items():
        assert world.scheduler.can_grow(num_steps) == (blocks <= 3), num_steps


def test_nothing_can_always_grow() -> None:
    assert World().scheduler.can_grow(8)


# ── withdrawal ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_who_waits_can_be_withdrawn() -> None:
    world = World(num_rows=1)
    kept, gone, last = (world.submit(counting(3, start), max_tokens=2)[0] for start in (0, 20, 40))
    world.step()
    world.abort(gone)
    assert gone.stage is Stage.FINISHED
    world.run()
    assert world.finished == [kept, last]
    world.assert_empty()


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2], ids=["waiting", "prefilling", "decoding"])
def test_one_of_several_completions_can_be_withdrawn_at_any_time(which: int, steps: int) -> None:
    world = World(budget=5, block_size=4)
    sequences = world.submit(counting(9), max_tokens=4, n=3)
    other = world.submit([50], max_tokens=1)
    for _ in range(steps):
        world.step()
    world.abort(sequences[which])
    assert sequences[which].stage is Stage.FINISHED
    world.assert_sound()
    world.run()
    left = [s for s in sequences if s is not sequences[which]]
    assert {id(s) for s in world.finished} == {id(s) for s in [*left, *other]}
    assert all(s.sampled.token_ids.tolist() == alone(s) for s in left)
    world.assert_empty()


def test_where_the_first_of_several_is_withdrawn_the_others_do_not_lose_their_turn() -> None:
    world = World(budget=4, num_rows=2)
    leader, follower = world.submit(counting(9), max_tokens=2, n=2)
    world.submit([50], max_tokens=1)
    world.step()
    world.abort(leader)
    assert [s.request_id for s in world.scheduler.waiting] == [1, 2]
    world.step()
    assert follower.stage is Stage.PREFILL


def test_all_completions_can_be_withdrawn_one_after_the_other() -> None:
    world = World(budget=4)
    sequences = world.submit(counting(9), max_tokens=2, n=4)
    world.step()
    for sequence in sequences:
        world.abort(sequence)
    assert not world.scheduler.has_work
    world.assert_empty()


def test_who_gave_way_can_be_withdrawn() -> None:
    world, [first, second, third] = full_world()
    world.step()
    world.abort(third)
    assert third.sampled.token_ids.tolist() == alone(third)[:3], "what it had sampled is still there"
    world.run()
    assert {s.request_id for s in world.finished} == {first.request_id, second.request_id}
    world.assert_empty()


# ── suspension ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_after_a_suspension_everybody_starts_over_in_the_old_order_and_nothing_is_found() -> None:
    world = World(budget=8, num_rows=4)
    for start in (0, 20, 40):
        world.submit(counting(6, start), max_tokens=6, n=2 if start == 20 else 1)
    world.step()
    assert [s.request_id for s in world.scheduler.decoding] == [1]
    world.suspend()
    assert [s.request_id for s in world.scheduler.waiting] == [1, 2, 3]
    assert (world.pool.num_used, world.pool.num_cached, world.scheduler.num_running) == (0, 0, 0)
    assert world.scheduler.counts.preemptions == 0
    world.run()
    assert len(world.finished) == 4
    assert all(s.sampled.token_ids.tolist() == alone(s) for s in world.finished)
    world.assert_empty()


# ── anything at all ────────────────────────────────────────────────────────────────────────────────────────────────────


class AnyUse(RuleBasedStateMachine):
    """Requests with few different tokens, so that prompts often begin alike, in a cache that is often full."""

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        num_rows=st.integers(1, 5),
        budget=st.integers(1, 12),
        prefix_caching=st.booleans(),
        runs_ahead=st.booleans(),
    )
    def begin(self, **config: int) -> None:
        self.world = World(**config)  # type: ignore[arg-type]
        self.unfinished: list[Sequence] = []
        self.aborted: set[int] = set()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 4),
        stops=st.sampled_from([(), (3,), (0, 5)]),
        adapter=st.sampled_from([None, None, "a"]),
        scored=st.sampled_from([False, False, True]),
    )
    def submit(
        self, prompt: list[int], max_tokens: int, n: int, stops: tuple[int, ...], adapter: str | None, scored: bool
    ) -> None:
        world, size = self.world, self.world.block_size
        copies = n - 1 if len(prompt) % size else 0
        fits = len(prompt) + max_tokens <= world.num_blocks * size and -(-len(prompt) // size) + copies <= world.num_blocks
        if fits and n <= world.num_rows:
            self.unfinished += world.submit(
                prompt, max_tokens, n=n, stop_token_ids=stops, adapter=adapter, prompt_logprobs=scored
            )

    @rule(num_steps=st.integers(1, 4), times=st.integers(1, 4))
    def step(self, num_steps: int, times: int) -> None:
        for _ in range(times):
            plan = self.world.step(num_steps)
            tokens = len(plan.decode) + sum(chunk.end - chunk.start for chunk in plan.chunks)
            assert tokens <= max(self.world.budget, len(plan.decode) + 1)
            scheduler = self.world.scheduler
            assert scheduler.decoding_rows.tolist() == [sequence.row for sequence in scheduler.decoding]

    @precondition(lambda self: self.unfinished)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        sequence = self.unfinished.pop(pick % len(self.unfinished))
        if sequence.stage is not Stage.FINISHED:
            self.world.abort(sequence)
            sampled = [] if sequence.sampled is None else sequence.sampled.token_ids.tolist()
            assert sampled == alone(sequence)[: len(sampled)]

    @rule(version=st.integers(0, 2))
    def apply(self, version: int) -> None:
        self.world.apply(version)

    @rule()
    def suspend(self) -> None:
        self.world.suspend()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run()
        for sequence in self.unfinished:
            assert sequence.stage is Stage.FINISHED
            assert sequence.sampled.token_ids.tolist() == alone(sequence)
        self.world.assert_empty()


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=120, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow])
