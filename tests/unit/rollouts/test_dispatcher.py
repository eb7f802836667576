"""Rollouts in a thread of their own, with a real engine."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fakes import FakeTasks
from support.small_models import CONFIGS, llama, write_model

from redline.config.sections.engine import EngineConfig
from redline.config.sections.rollouts import RolloutsConfig
from redline.engine import EngineSession, NativeEngine
from redline.environments.single_turn import SingleTurn
from redline.errors import BrokenModelError, EngineError, TaskError
from redline.lab.material.forced_lengths import ForcedLengths
from redline.models.files.hf import AnyDecoder, load_decoder
from redline.models.files.tiny import tiny_tokenizer
from redline.rollouts import Chat, Dispatcher, RolloutSetup, dispatcher
from redline.telemetry import Recorder, recording
from redline.types import Delta, EngineStats, Task, TrajectoryGroup, WeightUpdate

TOKENIZER = tiny_tokenizer()
CONFIG = RolloutsConfig(task={"kind": "import", "path": "tests:Fake"}, group_size=3, max_new_tokens=12)  # type: ignore[arg-type]


@pytest.fixture
def decoder(tmp_path: Path) -> AnyDecoder:
    config = copy.deepcopy(CONFIGS["llama, tied"])
    config.vocab_size = len(TOKENIZER)
    write_model(tmp_path, config, seed=1, std=0.2)
    return load_decoder(tmp_path)


def setup_of(tasks: FakeTasks | None = None, *, workers: int = 1, judge: Any = None, **keys: float) -> RolloutSetup:
    """`keys` are of the recipe's rollouts."""
    chat, config = Chat(TOKENIZER, None, ""), CONFIG.model_copy(update={"task_timeout_s": 60.0, **keys})
    return RolloutSetup(tasks or FakeTasks(), SingleTurn, chat, config, (3,), 5, reward_model=judge, max_reward_workers=workers)


def lockstep(decoder: AnyDecoder) -> Dispatcher:
    return Dispatcher(EngineSession(NativeEngine(decoder, EngineConfig(max_num_seqs=8), TOKENIZER)), setup_of())


def beside(engine: NativeEngine, tasks: FakeTasks | None = None, **keys: Any) -> Dispatcher:
    return Dispatcher(EngineSession(engine), setup_of(tasks, **keys), beside=True)


@pytest.fixture
def engine(decoder: AnyDecoder) -> NativeEngine:
    return NativeEngine(decoder, EngineConfig(max_num_seqs=8), TOKENIZER)


@pytest.fixture
def background(engine: NativeEngine) -> Iterator[Dispatcher]:
    rollouts = beside(engine)
    yield rollouts
    rollouts.close()


def all_of(rollouts: Dispatcher, count: int) -> dict[int, TrajectoryGroup]:
    groups: list[TrajectoryGroup] = []
    while len(groups) < count:
        groups += rollouts.finished()
    return {group.index: group for group in groups}


def test_groups_are_those_that_the_caller_would_have_made_himself(background: Dispatcher, decoder: AnyDecoder) -> None:
    own = lockstep(decoder)
    own.begin(range(5), 0)
    expected = {group.index: group for group in own.finished()}
    own.close()
    background.begin([0, 1], 0)
    background.begin([2, 3, 4], 0)
    found = all_of(background, 5)
    assert found.keys() == expected.keys()
    for number, group in found.items():
        for one, other in zip(group.trajectories, expected[number].trajectories, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


class Thrice(FakeTasks):
    """Three tasks, over and over."""

    def train(self, index: int):  # type: ignore[no-untyped-def]
        return replace(super().train(index), id=f"task/{index % 3}")


LENGTHS = {index: np.full(3, (2, 9, 5)[index % 3]) for index in range(9)}
"""Attempts at the second task are the longest, those at the first the shortest."""


def begun_in_order(groups: dict[int, TrajectoryGroup]) -> list[int]:
    return sorted(groups, key=lambda index: groups[index].trajectories[0].turns[0].queue_s)


@pytest.mark.parametrize("is_beside", [False, True])
def test_of_the_groups_that_wait_for_rows_the_longest_begin_first(decoder: AnyDecoder, is_beside: bool) -> None:
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=3), TOKENIZER)
    session = EngineSession(ForcedLengths(engine, LENGTHS))
    rollouts = Dispatcher(session, setup_of(Thrice()), beside=is_beside)
    seen = []
    for step in range(3):
        indices = range(3 * step, 3 * step + 3)
        with session.held():  # so that the engine has none of them before it has all
            rollouts.begin(indices, step)
            while is_beside and not all(rollouts.sampled_tokens(index) for index in indices):
                time.sleep(0.001)
        groups = all_of(rollouts, 3)
        seen.append([index % 3 for index in begun_in_order(groups)])
        expected = [groups[index].expected_tokens for index in indices]
        assert expected == ([None] * 3 if step == 0 else [2.0, 9.0, 5.0])
    assert seen == [[0, 1, 2], [1, 2, 0], [1, 2, 0]]
    rollouts.close()


def test_the_order_changes_no_token(decoder: AnyDecoder) -> None:
    def sampled(earlier: Sequence[tuple[str, Sequence[int]]]) -> list[list[int]]:
        session = EngineSession(NativeEngine(decoder, EngineConfig(max_num_seqs=3), TOKENIZER))
        rollouts = Dispatcher(session, setup_of(Thrice()))
        rollouts.remember(earlier)
        rollouts.begin(range(6), 0)
        groups = all_of(rollouts, 6)
        rollouts.close()
        order.append(begun_in_order(groups))
        return [t.token_ids.tolist() for index in range(6) for t in groups[index].trajectories]

    order: list[list[int]] = []
    assert sampled([]) == sampled([("task/2", [9]), ("task/1", [5, 7]), ("task/0", [2])])
    assert order == [[0, 1, 2, 3, 4, 5], [2, 5, 1, 4, 0, 3]]


class SeesScores(ForcedLengths):
    """Samples on once the first attempt that it has sampled is scored."""

    def __init__(self, engine: NativeEngine, lengths: dict[int, np.ndarray], scored: threading.Event) -> None:
        super().__init__(engine, lengths)
        self.scored, self.was_scored, self.num_steps = scored, False, 0

    def step(self) -> list[Delta]:
        self.num_steps += 1
        if self.num_steps == 6:
            self.was_scored = self.scored.wait(60)
        return super().step()


class Scored(FakeTasks):
    def __init__(self) -> None:
        super().__init__()
        self.scored = threading.Event()

    def score(self, task: Task, text: str) -> dict[str, float]:
        self.scored.set()
        return {"length": len(text)}


def test_in_lockstep_an_attempt_is_scored_while_others_are_sampled_and_rewards_are_in_order(decoder: AnyDecoder) -> None:
    tasks = Scored()
    lengths = {0: np.array([9, 11, 2]), 1: np.array([3, 12, 7])}
    engine = SeesScores(NativeEngine(decoder, EngineConfig(max_num_seqs=8), TOKENIZER), lengths, tasks.scored)
    rollouts = Dispatcher(EngineSession(engine), setup_of(tasks))
    rollouts.begin(range(2), 0)
    groups = all_of(rollouts, 2)
    rollouts.close()
    assert engine.was_scored
    for index, group in groups.items():
        assert [t.num_completion_tokens for t in group.trajectories] == lengths[index].tolist()
        assert [t.reward for t in group.trajectories] == [len(t.text) for t in group.trajectories]


def test_groups_of_an_earlier_process_are_known_with_what_was_expected_of_them(decoder: AnyDecoder) -> None:
    first, second = lockstep(decoder), lockstep(decoder)
    first.begin(range(2), 0)
    groups = first.finished()
    assert [group.expected_tokens for group in second.take_over(groups)] == [None, None]
    again = second.take_over(groups)
    assert [group.expected_tokens for group in again] == [np.mean(group.lengths) for group in groups]
    first.close()
    second.close()


def test_who_pauses_has_the_engine_until_he_resumes(background: Dispatcher, engine: NativeEngine) -> None:
    background.begin(range(6), 0)
    for version in range(1, 4):
        with background.paused():
            steps = engine.stats.steps
            engine.apply(WeightUpdate(version, (), 0))
            threading.Event().wait(0.02)
            assert engine.stats.steps == steps, "nobody steps the engine in the meantime"
    spans = [t.versions for group in all_of(background, 6).values() for t in group.trajectories]
    assert all(0 <= span.oldest <= span.newest <= 3 for span in spans)


def test_pauses_may_be_nested_and_cost_nothing_where_there_is_no_work(background: Dispatcher) -> None:
    with background.paused(), background.paused():
        background.begin([0], 0)
    assert list(all_of(background, 1)) == [0]


def test_what_goes_wrong_in_the_thread_reaches_the_caller(engine: NativeEngine, decoder: AnyDecoder) -> None:
    decoder.output_weight.data.fill_(float("nan"))
    rollouts = beside(engine)
    rollouts.begin([0], 0)
    with pytest.raises(BrokenModelError, match="NaN"):
        rollouts.finished()
    with pytest.raises(BrokenModelError):
        rollouts.session.hold()
    rollouts.close()


def test_a_task_that_cannot_be_made_is_a_group_of_failures_and_the_others_go_on(engine: NativeEngine) -> None:
    class NoTasks(FakeTasks):
        def train(self, index: int):  # type: ignore[no-untyped-def]
            if index == 1:
                raise TaskError("no more tasks", "add some")
            return super().train(index)

    rollouts = beside(engine, NoTasks())
    rollouts.begin([0, 1, 2], 4)
    groups = all_of(rollouts, 3)
    assert {t.failure and t.failure.reason for t in groups[1].trajectories} == {"no more tasks"}
    assert groups[1].versions.oldest == 4
    assert all(t.failure is None for number in (0, 2) for t in groups[number].trajectories)
    rollouts.close()


def test_a_task_that_never_comes_holds_up_no_pause_and_no_other_group(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "PATIENCE_S", 0.5)
    begun, end = threading.Event(), threading.Event()

    class Hanging(FakeTasks):
        def train(self, index: int):  # type: ignore[no-untyped-def]
            if index == 1:
                begun.set()
                end.wait(60)
            return super().train(index)

    rollouts = beside(engine, Hanging(), task_timeout_s=None)
    rollouts.begin([0, 1, 2], 0)
    assert begun.wait(60)
    rollouts.session.hold()
    rollouts.session.resume()
    assert all(group.index != 1 for group in rollouts.finished(0)), "weights are updated before its time is up"
    rollouts.close()
    rollouts = beside(engine, Hanging(), task_timeout_s=0.5)
    rollouts.begin([0, 1, 2], 0)
    groups = all_of(rollouts, 3)
    assert [t.failure is None for t in (groups[n].trajectories[0] for n in range(3))] == [True, False, True]
    end.set()
    rollouts.close()


def test_a_task_that_is_cancelled_leaves_its_worker_behind(engine: NativeEngine) -> None:
    begun, end = threading.Event(), threading.Event()

    class Hanging(FakeTasks):
        def train(self, index: int):  # type: ignore[no-untyped-def]
            if index == 0:
                begun.set()
                end.wait(60)
            return super().train(index)

    rollouts = beside(engine, Hanging())
    rollouts.begin([0, 1], 0)
    assert begun.wait(30)
    rollouts.cancel([0])
    assert all_of(rollouts, 1).keys() == {1}
    end.set()
    rollouts.close()


def test_a_reward_that_exits_fails_its_attempts_and_ends_nothing(engine: NativeEngine) -> None:
    class Exits(FakeTasks):
        def score(self, task, text):  # type: ignore[no-untyped-def]
            raise SystemExit(3)

    rollouts = beside(engine, Exits())
    rollouts.begin([0], 0)
    [group] = all_of(rollouts, 1).values()
    assert {t.failure and t.failure.reason for t in group.trajectories} == {"SystemExit: 3"}
    rollouts.close()


def test_closing_gives_up_what_is_under_way(engine: NativeEngine) -> None:
    rollouts = beside(engine)
    rollouts.begin(range(8), 0)
    rollouts.close()
    while engine.has_work:
        engine.step()
    assert engine.stats.kv_blocks_used == 0
    assert engine.stats.running == engine.stats.waiting == 0


# ── rewards that never come ────────────────────────────────────────────────────────────────────────────────────────────


class Hanging(FakeTasks):
    """The reward of one task waits until the test lets it go."""

    hangs = threading.Event()
    goes_on = threading.Event()

    def score(self, task, text):  # type: ignore[no-untyped-def]
        if task.id == self.train(1).id:
            self.hangs.set()
            assert self.goes_on.wait(60)
        return super().score(task, text)


@pytest.fixture
def hanging(engine: NativeEngine) -> Iterator[Dispatcher]:
    Hanging.hangs, Hanging.goes_on = threading.Event(), threading.Event()
    rollouts = beside(engine, Hanging())
    yield rollouts
    Hanging.goes_on.set()
    rollouts.close()


def test_a_reward_that_hangs_holds_up_neither_the_engine_nor_an_update(hanging: Dispatcher, engine: NativeEngine) -> None:
    hanging.begin([1], 0)
    assert Hanging.hangs.wait(60)
    hanging.session.hold()
    engine.apply(WeightUpdate(1, (), 0))
    hanging.session.resume()
    hanging.begin([2], 1)
    assert hanging.finished(0.05) == []


def test_a_group_whose_reward_hangs_is_cancelled_and_the_others_go_on(engine: NativeEngine) -> None:
    Hanging.hangs, Hanging.goes_on = threading.Event(), threading.Event()
    hanging = beside(engine, Hanging(), reward_timeout_s=1.0)
    hanging.begin([0, 1, 2, 3], 0)
    found = all_of(hanging, 1)
    assert Hanging.hangs.wait(60)
    hanging.cancel([1])
    found |= all_of(hanging, 3 - len(found))
    assert sorted(found) == [0, 2, 3]
    Hanging.goes_on.set()
    hanging.begin([4], 0)
    assert list(all_of(hanging, 1)) == [4], "what was cancelled does not come, even if its reward does"
    hanging.close()


class NoticesTwoCallers(FakeTasks):
    """Notices two calls of `score` at once. The first call waits until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.calls: list[str] = []
        self.most_at_once = self._now = 0

    def score(self, task, text):  # type: ignore[no-untyped-def]
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        self.calls.append(task.id)
        if len(self.calls) == 1:
            self.begun.set()
            assert self.goes_on.wait(60)
        time.sleep(0.01)
        self._now -= 1
        return super().score(task, text)


def test_a_source_that_is_not_thread_safe_is_never_called_twice_at_once_though_its_group_was_given_up(
    engine: NativeEngine,
) -> None:
    tasks = NoticesTwoCallers()
    rollouts = beside(engine, tasks)
    rollouts.begin([0], 0)
    assert tasks.begun.wait(60)
    rollouts.cancel([0])
    rollouts.begin([1, 2], 1)
    assert rollouts.finished(0.3) == [], "the call under way is waited for, though nobody wants its result"
    tasks.goes_on.set()
    assert sorted(all_of(rollouts, 2)) == [1, 2]
    with rollouts.paused():
        rollouts.evaluate([tasks.train(3)])
    rollouts.close()
    assert tasks.most_at_once == 1
    assert tasks.calls.count(tasks.train(0).id) == 1, "the other attempts of the group that was given up are not scored"


def test_if_every_score_hangs_three_calls_a_step_are_given_up_and_all_groups_fail_with_the_reason(engine: NativeEngine) -> None:
    end = threading.Event()

    class AllHang(FakeTasks):
        num_calls = 0

        def score(self, task, text):  # type: ignore[no-untyped-def]
            self.num_calls += 1
            end.wait(60)
            return super().score(task, text)

    tasks = AllHang()
    rollouts = beside(engine, tasks, reward_timeout_s=0.3)
    for version in (0, 1):
        rollouts.begin(range(8 * version, 8 * version + 8), version)
        groups = all_of(rollouts, 8)
        assert tasks.num_calls == 3 * (version + 1), "24 attempts of a step, and one step tries no more than three"
        reasons = {t.failure.reason for group in groups.values() for t in group.trajectories if t.failure}
        assert reasons == {
            "`score` did not return within 0.3 s",
            "`score` was not called: the 3 calls before did not return within 0.3 s",
        }
        assert all(t.failure for group in groups.values() for t in group.trajectories)
    end.set()
    rollouts.begin([16], 2)
    assert all(t.failure is None for t in all_of(rollouts, 1)[16].trajectories), "the next step tries again"
    rollouts.close()


def test_a_worker_that_was_left_behind_ends_and_takes_the_thread_of_its_calls_along(hanging: Dispatcher) -> None:
    before = set(threading.enumerate())
    hanging.begin([1], 0)
    assert Hanging.hangs.wait(60)
    [calls] = [thread for thread in set(threading.enumerate()) - before if thread.name == "rewards"]
    hanging.cancel([1])
    Hanging.goes_on.set()
    calls.join(60)
    assert not calls.is_alive(), "a run that cancels many groups would keep a thread of each"
    hanging.begin([2], 0)
    assert list(all_of(hanging, 1)) == [2]


def test_tokens_of_a_group_under_way_are_known_until_it_comes_or_is_cancelled(hanging: Dispatcher) -> None:
    assert hanging.sampled_tokens(1) == [], "not begun"
    hanging.begin([0, 1], 0)
    assert list(all_of(hanging, 1)) == [0]
    assert Hanging.hangs.wait(60)
    tokens = hanging.sampled_tokens(1)
    assert len(tokens) == CONFIG.group_size
    assert all(0 < count <= CONFIG.max_new_tokens for count in tokens)
    assert hanging.sampled_tokens(0) == [], "it came"
    Hanging.goes_on.set()
    [other] = all_of(hanging, 1).values()
    assert tokens == [attempt.num_completion_tokens for attempt in other.trajectories]
    hanging.begin([2], 0)
    hanging.cancel([2])
    assert hanging.sampled_tokens(2) == []


def test_attempts_that_are_still_sampled_count_with_what_they_have(
    background: Dispatcher, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of the engine waits until the test has looked."""
    may_step, has_stepped, step = threading.Semaphore(0), threading.Semaphore(0), engine.step
    monkeypatch.setattr(engine, "step", lambda: (may_step.acquire(timeout=60), step(), has_stepped.release())[1])
    background.begin([0], 0)
    so_far: list[int] = []
    while max(so_far, default=0) < 4:
        may_step.release()
        assert has_stepped.acquire(timeout=60)
        so_far = background.sampled_tokens(0)
    assert 4 <= max(so_far) < 12
    for _ in range(60):
        may_step.release()
    [group] = all_of(background, 1).values()
    ends = [attempt.num_completion_tokens for attempt in group.trajectories]
    assert all(count <= end for count, end in zip(so_far, ends, strict=True))


def test_waiting_for_late_groups_is_a_wait_of_its_own(background: Dispatcher) -> None:
    with recording(Recorder()) as recorder, background.paused():
        background.finished(0.01)
        background.finished(0.01, late=True)
    rows = recorder.ledger().lanes["main"].rows
    assert {"wait.for_rollouts", "wait.for_late_groups"} <= rows.keys()
    assert rows["wait.for_late_groups"] >= 10_000_000


def test_a_reward_that_hangs_ends_nobodys_patience_but_that_of_an_evaluation(hanging: Dispatcher) -> None:
    hanging.begin([1], 0)
    assert Hanging.hangs.wait(60)
    with hanging.paused(patience_s=0.01):
        assert hanging.reward_workers.num_scoring == 1
    Hanging.goes_on.set()
    with hanging.paused():
        assert hanging.reward_workers.num_scoring == 0


def test_while_others_have_the_tasks_no_reward_is_begun(background: Dispatcher) -> None:
    with background.paused():
        background.begin([0], 0)
        assert background.finished(0.05) == []
    assert list(all_of(background, 1)) == [0]


@pytest.mark.parametrize("begun", [range(8), range(2)], ids=["some queued", "all running"])
def test_a_group_that_is_cancelled_while_it_is_sampled_leaves_the_engine(
    background: Dispatcher, engine: NativeEngine, begun: range
) -> None:
    with background.paused():
        background.begin(begun, 0)
        background.cancel([begun[0]])
    background.begin([20], 0)
    background.cancel([begun[1]])
    assert sorted(all_of(background, len(begun) - 1)) == [*begun[2:], 20]
    with background.paused():
        assert not engine.has_work
        assert engine.stats.kv_blocks_used == 0


# ── several workers ────────────────────────────────────────────────────────────────────────────────────────────────────


class Together(FakeTasks):
    """A reward comes only when as many are computed at once as the test wants."""

    barrier = threading.Barrier(3)

    def score(self, task, text):  # type: ignore[no-untyped-def]
        self.barrier.wait(60)
        return super().score(task, text)


def test_as_many_groups_are_scored_at_once_as_there_are_workers(engine: NativeEngine, decoder: AnyDecoder) -> None:
    own = lockstep(decoder)
    own.begin(range(6), 0)
    expected = {group.index: group for group in own.finished()}
    own.close()
    rollouts = beside(engine, Together(), workers=4)
    rollouts.reward_workers.hold(3)
    rollouts.begin(range(6), 0)
    found = all_of(rollouts, 6)
    rollouts.close()
    assert found.keys() == expected.keys()
    for number, group in found.items():
        assert [t.text for t in group.trajectories] == [t.text for t in expected[number].trajectories]
        assert [t.reward for t in group.trajectories] == [t.reward for t in expected[number].trajectories]


def test_rewards_that_hang_cost_their_workers_only_until_they_are_cancelled(engine: NativeEngine) -> None:
    Hanging.hangs, Hanging.goes_on = threading.Event(), threading.Event()
    rollouts = beside(engine, Hanging(), workers=2)
    rollouts.reward_workers.hold(2)
    rollouts.begin([1], 0)
    assert Hanging.hangs.wait(60)
    rollouts.begin([2, 3], 0)
    assert sorted(all_of(rollouts, 2)) == [2, 3], "the other worker goes on"
    assert rollouts.reward_workers.num_scoring == 1
    rollouts.cancel([1])
    assert rollouts.reward_workers.num_scoring == 0
    Hanging.goes_on.set()
    rollouts.begin([4], 0)
    assert list(all_of(rollouts, 1)) == [4]
    rollouts.close()


def test_an_evaluation_waits_for_every_reward_under_way(engine: NativeEngine) -> None:
    Hanging.hangs, Hanging.goes_on = threading.Event(), threading.Event()
    rollouts = beside(engine, Hanging(), workers=2)
    rollouts.reward_workers.hold(2)
    rollouts.begin([1, 2, 3], 0)
    assert Hanging.hangs.wait(60)
    all_of(rollouts, 2)
    threading.Timer(0.05, Hanging.goes_on.set).start()
    with rollouts.paused():
        assert Hanging.goes_on.is_set()
        assert rollouts.reward_workers.num_scoring == 0
    assert list(all_of(rollouts, 1)) == [1]
    rollouts.close()


class OneAtATime:
    """A reward model that does not bear two callers."""

    def __init__(self) -> None:
        self.is_free = threading.Lock()
        self.calls = 0

    def scores(self, conversations: Sequence[object]) -> list[float]:
        assert self.is_free.acquire(blocking=False)
        self.calls += 1
        time.sleep(0.01)
        self.is_free.release()
        return [0.5] * len(conversations)


def test_workers_take_turns_with_the_reward_model(engine: NativeEngine) -> None:
    judge = OneAtATime()
    rollouts = beside(engine, workers=3, judge=judge)
    rollouts.reward_workers.hold(3)
    rollouts.begin(range(8), 0)
    groups = all_of(rollouts, 8)
    rollouts.close()
    assert judge.calls == 8
    assert {t.reward_parts["reward_model"] for group in groups.values() for t in group.trajectories} == {0.5}


def test_a_task_s_own_part_is_not_taken_for_the_reward_model_s(engine: NativeEngine) -> None:
    tasks = FakeTasks(lambda task, text: {"reward_model": 100.0})
    rollouts = beside(engine, workers=1, judge=OneAtATime(), tasks=tasks)
    rollouts.begin(range(1), 0)
    [group] = all_of(rollouts, 1).values()
    rollouts.close()
    for attempt in group.trajectories:
        assert attempt.failure is not None
        assert "a part called reward_model, which is the name of rollouts.reward_model's" in attempt.failure.reason


def test_the_device_is_idle_whenever_the_engine_changes_hands(engine: NativeEngine) -> None:
    """The thread and its borrowers launch on streams of their own, and nothing but this wait orders them."""
    steps_at_wait: list[int] = []
    session = EngineSession(engine, wait_for_device=lambda: steps_at_wait.append(engine.stats.steps))
    rollouts = Dispatcher(session, setup_of(), beside=True)
    rollouts.begin(range(3), 0)
    with rollouts.paused():
        steps = engine.stats.steps
        assert steps_at_wait == [steps], "between the thread's last launch and the borrower's first"
    assert steps_at_wait == [steps, steps], "and between the borrower's last and the thread's next"
    all_of(rollouts, 3)
    rollouts.close()


@pytest.mark.gpu
def test_an_evaluation_beside_rollouts_changes_no_training_sample(tmp_path: Path) -> None:
    """Bit for bit what lockstep order gives, although the device is a second behind when the evaluation takes the engine."""
    config = llama(vocab_size=len(TOKENIZER), hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    write_model(tmp_path, config, seed=1, std=0.2)
    decoder = load_decoder(tmp_path, "cuda", torch.bfloat16)
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=32, kv_cache_memory_bytes=2**26), TOKENIZER)
    long = CONFIG.model_copy(update={"group_size": 8, "max_new_tokens": 200})
    expected = _beside_an_evaluation(engine, long, evaluate=False)
    for _ in range(3):
        assert _beside_an_evaluation(engine, long, evaluate=True) == expected


def _beside_an_evaluation(engine: NativeEngine, config: RolloutsConfig, *, evaluate: bool) -> list[list[int]]:
    """The tokens of one group, with held-out tasks answered in the middle of it."""
    lagging = _LaggingDevice(engine, after_steps=5)
    session = EngineSession(lagging, wait_for_device=torch.cuda.synchronize)
    setup = RolloutSetup(FakeTasks(), SingleTurn, Chat(TOKENIZER, None, ""), config, (3,), 5)
    rollouts = Dispatcher(session, setup, beside=True, prepare_thread=lambda: torch.cuda.set_stream(torch.cuda.Stream()))
    rollouts.begin([0], 0)
    assert lagging.is_behind.wait(60), session.failure
    if evaluate:
        rollouts.evaluate(FakeTasks().held_out(4))
    [group] = all_of(rollouts, 1).values()
    rollouts.close()
    return [trajectory.token_ids.tolist() for trajectory in group.trajectories]


class _LaggingDevice:
    """An engine whose device falls about a second behind its host after some steps."""

    def __init__(self, engine: NativeEngine, after_steps: int) -> None:
        self._engine, self._left = engine, after_steps
        self.submit, self.abort, self.apply = engine.submit, engine.abort, engine.apply
        self.sampled_tokens, self.reset_prefix_cache = engine.sampled_tokens, engine.reset_prefix_cache
        self.is_behind = threading.Event()

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    def step(self) -> Sequence[tuple[int, Delta | EngineError]]:
        self._left -= 1
        if self._left == 0:
            torch.cuda._sleep(2_000_000_000)
        pieces = self._engine.step()
        if self._left == 0:
            self.is_behind.set()
        return pieces
