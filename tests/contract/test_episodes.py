"""What rollouts promise for environments of several turns, in lockstep and beside the trainer: the same assertions for both."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fakes import FakeEngine, FakeTasks, completion

from redline.config.schema import Config, RolloutsConfig
from redline.engine import EngineSession
from redline.errors import BudgetError, EngineError, TaskError
from redline.models.files.tiny import tiny_tokenizer
from redline.ports import Policy
from redline.rollouts import Chat, Dispatcher, RolloutSetup
from redline.telemetry import Recorder, RunFolder, recording
from redline.telemetry.stalls.watchdog import Watchdog
from redline.types import Completion, Delta, GenerateRequest, Task, Trajectory, TrajectoryGroup, Turn

pytestmark = pytest.mark.usefixtures("no_calls_of_others")

TOKENIZER = tiny_tokenizer()
SOON_S = 300.0
GROUP_SIZE = 4
CONFIG = RolloutsConfig(
    task={"kind": "import", "path": "tests:Fake"},  # type: ignore[arg-type]
    group_size=GROUP_SIZE,
    max_new_tokens=9,
    evaluation={"num_tasks": 2, "samples_per_task": 3, "temperature": 0.5},  # type: ignore[arg-type]
)

Make = Callable[..., Dispatcher]


class SteadyEngine(FakeEngine):
    """Of every request, a completion in each step: those with more attempts take longer."""

    def step(self) -> list[tuple[int, Delta]]:
        left = sum(request.sampling.n - self.given.get(number, 0) for number, request in self.submitted.items())
        self.calls.append(("engine.step", left))
        nothing = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        pieces = []
        for number, request in list(self.submitted.items()):
            position = self.given.get(number, 0)
            self.given[number] = position + 1
            index = request.sampling.first_index + position
            pieces.append((number, Delta(index, *nothing, completion=self.answer(request, index))))
            if position + 1 == request.sampling.n:
                del self.submitted[number]
        return pieces

    @property
    def given(self) -> dict[int, int]:
        return self.__dict__.setdefault("_given", {})


def answer(request: GenerateRequest, index: int) -> Completion:
    """Depends on the prompt, the seed and the index, and on nothing else."""
    drawn = np.random.default_rng([int(request.prompt_ids.sum()), request.sampling.seed, index])
    return completion(drawn.integers(3, 60, drawn.integers(1, 6)).tolist()[: request.sampling.max_tokens], version=7)


class Environment:
    """Plays as `play` says."""

    def __init__(self, play: Callable[[Task, Policy], Any]) -> None:
        self.play = play


@pytest.fixture(params=["lockstep", "beside"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Rollouts of the one kind or the other, which end with the test."""
    made: list[Dispatcher] = []

    def make(play: Callable[[Task, Policy], Any], engine: FakeEngine | None = None, **keys: Any) -> Dispatcher:
        environment = {"name": "tests:Fake", **keys.pop("environment", {})}
        limits = {name: keys.pop(name) for name in ("max_prompt_tokens", "max_sequences") if name in keys}
        config = RolloutsConfig(**{**CONFIG.model_dump(), **keys, "environment": environment})
        chat = Chat(TOKENIZER, None, "")
        setup = RolloutSetup(FakeTasks(), lambda score: Environment(play), chat, config, (3,), 5, **limits)
        session = EngineSession(engine or SteadyEngine(answer=answer))
        made.append(Dispatcher(session, setup, beside=request.param == "beside"))
        return made[-1]

    yield make
    for rollouts in made:
        rollouts.close()


def all_of(rollouts: Dispatcher, count: int) -> dict[int, TrajectoryGroup]:
    """By index."""
    groups: list[TrajectoryGroup] = []
    while len(groups) < count:
        groups += rollouts.finished(SOON_S)
    return {group.index: group for group in groups}


def played(make: Make, play: Callable[[Task, Policy], Any], engine: FakeEngine | None = None, **keys: Any) -> TrajectoryGroup:
    rollouts = make(play, engine, **keys)
    rollouts.begin([0], 4)
    [group] = all_of(rollouts, 1).values()
    return group


def question(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def two_turns(task: Task, policy: Policy) -> float:
    messages = [*task.messages]
    first = await policy.say(messages)
    messages += [first.message, question("and now?")]
    second = await policy.say(messages)
    return float(first.num_tokens + second.num_tokens)


def sampled(group: TrajectoryGroup) -> list[list[list[int]]]:
    """The tokens of each turn of each sequence."""
    return [[t.token_ids[turn.start : turn.end].tolist() for turn in t.turns] for t in group.trajectories]


# ── groups ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_index_comes_as_a_group_whose_masks_logprobs_and_rewards_fit_its_turns(make: Make) -> None:
    rollouts = make(two_turns)
    rollouts.begin([3, 4, 9], 7)
    groups = all_of(rollouts, 3)
    assert groups.keys() == {3, 4, 9}
    for index, group in groups.items():
        assert group.task_id == f"task/{index}"
        assert {t.attempt for t in group.trajectories} == set(range(GROUP_SIZE))
        assert group.has_signal
        assert abs(float(sum(group.advantages[[0]]))) > 0 or group.advantages.any()
        for own in group.attempts:
            assert sum(len(t.turns) for t in own) == 2
            assert {t.reward for t in own} == {float(sum(turn.num_tokens for t in own for turn in t.turns))}
            for t in own:
                _masks_fit(t)


def _masks_fit(t: Trajectory) -> None:
    policy = [place for turn in t.turns for place in range(turn.start, turn.end)]
    assert t.loss_mask.nonzero()[0].tolist() == policy
    assert (t.logprobs[~t.loss_mask] == 0).all()
    for turn in t.turns:
        np.testing.assert_array_equal(t.logprobs[turn.start : turn.end], completion(range(turn.num_tokens)).logprobs)
    assert t.versions.newest == 7


def test_what_is_sampled_follows_from_the_task_the_attempt_and_the_turn_whoever_steps_the_engine(make: Make) -> None:
    engines = [SteadyEngine(answer=answer), FakeEngine(answer=answer)]
    first, second = ([sampled(g) for _, g in sorted(_groups(make, engine).items())] for engine in engines)
    assert first == second, "an engine that answers in another order brings the same"
    seeds = {request.sampling.seed for request in engines[0].requests}
    assert {(5 << 32) + index for index in range(5)} < seeds
    assert len({(r.sampling.seed, i) for r in engines[0].requests for i in r.sampling.indices}) == 2 * 5 * GROUP_SIZE


def _groups(make: Make, engine: FakeEngine) -> dict[int, TrajectoryGroup]:
    rollouts = make(two_turns, engine)
    rollouts.begin(range(5), 0)
    return all_of(rollouts, 5)


def test_attempts_of_a_group_that_ask_the_same_are_one_request(make: Make) -> None:
    engine = SteadyEngine(answer=answer)
    played(make, two_turns, engine)
    assert engine.requests[0].sampling.n == GROUP_SIZE
    assert sum(request.sampling.n for request in engine.requests) == 2 * GROUP_SIZE


def test_no_more_than_so_many_replies_are_in_the_engine_and_none_is_forgotten(make: Make) -> None:
    engine = SteadyEngine(answer=answer)
    rollouts = make(two_turns, engine, max_sequences=2 * GROUP_SIZE)
    rollouts.begin(range(12), 0)
    assert len(all_of(rollouts, 12)) == 12
    assert max(count for what, count in engine.calls if what == "engine.step") <= 2 * GROUP_SIZE


def test_roles_have_rewards_sequences_and_advantages_of_their_own(make: Make) -> None:
    async def play(task: Task, policy: Policy) -> dict[str, Any]:
        white, black = await asyncio.gather(
            policy.say([question("you are white")], role="white"), policy.say([question("you are black")], role="black")
        )
        return {"white": float(white.num_tokens), "black": {"kept": -float(black.num_tokens), "legal": 1.0}}

    group = played(make, play)
    assert [(t.attempt, t.role) for t in group.trajectories] == [(i, r) for i in range(GROUP_SIZE) for r in ("white", "black")]
    for role in ("white", "black"):
        places = [place for place, t in enumerate(group.trajectories) if t.role == role]
        rewards = np.array([group.trajectories[place].reward for place in places])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        np.testing.assert_allclose(group.advantages[places], expected, atol=1e-4)
    assert group.trajectories[1].reward_parts == {"kept": group.trajectories[1].reward - 1.0, "legal": 1.0}


def test_all_sequences_of_an_attempt_have_its_reward_and_its_advantage(make: Make) -> None:
    async def play(task: Task, policy: Policy) -> float:
        turns = [await policy.say([question(f"phase {phase}")]) for phase in range(3)]
        return float(turns[0].num_tokens)

    group = played(make, play)
    assert len(group.trajectories) == 3 * GROUP_SIZE
    for own in group.attempts:
        assert len({t.reward for t in own}) == 1
    by_attempt = group.advantages.reshape(GROUP_SIZE, 3)
    assert (by_attempt == by_attempt[:, :1]).all()
    rewards = np.array([own[0].reward for own in group.attempts])
    np.testing.assert_allclose(by_attempt[:, 0], (rewards - rewards.mean()) / (rewards.std() + 1e-6), atol=1e-4)


@pytest.mark.parametrize("at_once", [False, True])
def test_conversations_of_one_role_that_take_turns_are_one_sequence_each(make: Make, at_once: bool) -> None:
    async def play(task: Task, policy: Policy) -> float:
        talks = [[question("plan")], [question("solve")]]
        for _ in range(3):
            if at_once:
                turns = await asyncio.gather(*(policy.say(talk) for talk in talks))
            else:
                turns = [await policy.say(talk) for talk in talks]
            talks = [[*talk, turn.message, question("go on")] for talk, turn in zip(talks, turns, strict=True)]
        return 1.0

    group = played(make, play)
    assert [[len(t.turns) for t in own] for own in group.attempts] == [[3, 3]] * GROUP_SIZE


# ── where the environment's code runs ──────────────────────────────────────────────────────────────────────────────────


def test_an_environment_may_wait_for_other_things_than_the_policy(make: Make) -> None:
    async def play(task: Task, policy: Policy) -> float:
        await asyncio.sleep(0.01)
        turn = await policy.say(task.messages)
        await asyncio.to_thread(time.sleep, 0.01)
        return float(turn.num_tokens)

    group = played(make, play)
    assert all(t.failure is None and t.turns[0].environment_s > 0.005 and t.score_s > 0.005 for t in group.trajectories)


def test_a_play_that_is_not_async_runs_in_a_thread_where_say_blocks(make: Make) -> None:
    threads: list[str] = []

    def play(task: Task, policy: Any) -> float:
        threads.append(threading.current_thread().name)
        first = policy.say(task.messages)
        second = policy.say([*task.messages, first.message, question("and now?")])
        return float(first.num_tokens + second.num_tokens)

    group = played(make, play)
    assert [t.failure for t in group.trajectories] == [None] * len(group.trajectories)
    assert set(threads) == {"play"}
    assert sampled(group) == sampled(played(make, two_turns)), "as if it were async"


# ── budgets ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def talks_for_ever(task: Task, policy: Policy) -> float:
    messages = [*task.messages]
    while True:
        turn = await policy.say(messages)
        messages += [turn.message, question("go on")]


@pytest.mark.parametrize(("limits", "turns"), [({"max_turns": 3}, 3), ({"max_tokens": 60}, None)])
def test_an_attempt_that_uses_its_budget_up_is_truncated_and_no_failure(make: Make, limits: Any, turns: int | None) -> None:
    group = played(make, talks_for_ever, environment=limits, reward_weights={"truncated": -1.0})
    for own in group.attempts:
        assert {(t.reward, t.reward_parts["truncated"], t.truncated, t.failure) for t in own} == {(-1.0, 1.0, True, None)}
        assert turns is None or sum(len(t.turns) for t in own) == turns
        if "max_tokens" in limits:
            assert sum(len(t.token_ids) for t in own) <= limits["max_tokens"]


def test_an_environment_may_end_an_attempt_by_itself_when_its_budget_is_used_up(make: Make) -> None:
    async def play(task: Task, policy: Policy) -> float:
        try:
            return await talks_for_ever(task, policy)
        except BudgetError:
            return 0.5

    group = played(make, play, environment={"max_turns": 2})
    assert {(t.reward, t.truncated) for t in group.trajectories} == {(0.5, True)}


async def seven_at_once(task: Task, policy: Policy) -> float:
    asks = [policy.say([question(f"you are {role}")], role=str(role)) for role in range(7)]
    found = await asyncio.gather(*asks, return_exceptions=True)
    assert all(isinstance(reply, Turn | BudgetError) for reply in found)
    return 1.0


def test_roles_that_speak_at_once_stay_within_the_tokens_of_an_attempt(make: Make) -> None:
    engine = SteadyEngine(answer=lambda request, index: completion([5] * request.sampling.max_tokens))
    group = played(make, seven_at_once, engine, environment={"max_tokens": 105})
    for own in group.attempts:
        assert 1 < len(own) < 7
        assert sum(len(t.token_ids) for t in own) == 105, "the last reply is cut to what is left"
        assert all(t.truncated and t.failure is None for t in own)


def test_what_a_reply_did_not_use_of_the_tokens_or_a_cancelled_ask_was_to_get_is_given_back(make: Make) -> None:
    async def play(task: Task, policy: Policy) -> float:
        cancelled = asyncio.ensure_future(policy.say(task.messages, role="cancelled"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        messages = [*task.messages]
        for _ in range(3):
            turn = await policy.say(messages)
            messages += [turn.message, question("go on")]
        return 1.0

    unbound = played(make, play, SteadyEngine(answer=answer), max_new_tokens=60)
    most = max(sum(len(t.token_ids) for t in own) for own in unbound.attempts)
    group = played(make, play, SteadyEngine(answer=answer), max_new_tokens=60, environment={"max_tokens": most + 1})
    assert sampled(group) == sampled(unbound)
    assert not any(t.truncated or t.failure for t in group.trajectories)


def test_an_attempt_that_asks_on_whatever_is_raised_fails_alone(make: Make) -> None:
    began: list[Policy] = []

    async def play(task: Task, policy: Policy) -> float:
        began.append(policy)
        is_stubborn, messages = began[0] is policy, [*task.messages]
        for _ in range(6):
            turn = await policy.say(messages)
            messages += [turn.message, question("go on")]
            while is_stubborn and not end.is_set():
                with contextlib.suppress(BaseException):
                    await policy.say(messages)
        return float(turn.num_tokens)

    end = threading.Event()
    group = played(make, play, environment={"max_turns": 6, "timeout_s": 2.0, "retries": 0})
    end.set()
    failures = [own[0].failure for own in group.attempts]
    assert [failure and failure.reason for failure in failures] == ["`play` did not return within 2 s", None, None, None]


def test_a_reply_may_be_shorter_than_the_recipe_allows_and_not_longer(make: Make) -> None:
    async def play(task: Task, policy: Policy) -> float:
        await policy.say(task.messages, max_tokens=4, stop=["\n"])
        await policy.say(task.messages, max_tokens=1000)
        return 1.0

    engine = SteadyEngine(answer=answer)
    played(make, play, engine)
    assert [(r.sampling.max_tokens, r.sampling.stop) for r in engine.requests if r.sampling.stop] == [(4, ("\n",))]
    assert {r.sampling.max_tokens for r in engine.requests if not r.sampling.stop} == {9}


def test_a_first_prompt_that_is_too_long_is_a_failure_that_is_not_tried_again(make: Make) -> None:
    engine = SteadyEngine(answer=answer)
    group = played(make, two_turns, engine, max_prompt_tokens=3, environment={"retries": 5})
    assert {t.failure and t.failure.stage for t in group.trajectories} == {"prompt"}
    assert {t.retries for t in group.trajectories} == {0}
    assert (group.versions.oldest, group.versions.newest) == (4, 4)


# ── what goes wrong ────────────────────────────────────────────────────────────────────────────────────────────────────


async def raises(task: Task, policy: Policy) -> float:
    await policy.say(task.messages)
    raise ValueError("no such move")


async def never_asks(task: Task, policy: Policy) -> float:
    return 1.0


async def returns_nothing(task: Task, policy: Policy) -> None:
    await policy.say(task.messages)


async def ends_the_program(task: Task, policy: Policy) -> None:
    await policy.say(task.messages)
    raise SystemExit(3)


FOR_EVER = threading.Event()
"""What a thread waits for that hangs: set after the test."""


async def hangs(task: Task, policy: Policy) -> None:
    _ = await policy.say(task.messages), await asyncio.Event().wait()  # one line: where it is, however slow the reply comes


async def hangs_whatever_is_done(task: Task, policy: Policy) -> None:
    await policy.say(task.messages)
    while True:
        try:
            await asyncio.sleep(0.5)
        except asyncio.CancelledError:
            continue


async def closes_itself(task: Task, policy: Policy) -> None:
    await policy.say(task.messages)
    raise GeneratorExit


async def fails_in_a_group(task: Task, policy: Policy) -> None:
    async with asyncio.TaskGroup() as turns:
        turns.create_task(raises(task, policy))


def hangs_in_a_thread(task: Task, policy: Any) -> None:
    _ = policy.say(task.messages), FOR_EVER.wait(SOON_S)


async def leaves_a_role_out(task: Task, policy: Policy) -> dict[str, float]:
    await policy.say(task.messages, role="white")
    await policy.say(task.messages, role="black")
    return {"white": 1.0}


@pytest.mark.parametrize(
    ("play", "reason", "place", "limit_s"),
    [
        (raises, "ValueError: no such move", 'in raises: raise ValueError("no such move")', SOON_S),
        (never_asks, "the environment ended before it asked the policy", "in never_asks", SOON_S),
        (returns_nothing, "`play` returned None; it must return a number, or named numbers", "in returns_nothing", SOON_S),
        (ends_the_program, "SystemExit: 3", "in ends_the_program", SOON_S),
        (closes_itself, "GeneratorExit", "in closes_itself: raise GeneratorExit", SOON_S),
        (
            fails_in_a_group,
            "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception): ValueError: no such move",
            'in raises: raise ValueError("no such move")',
            SOON_S,
        ),
        (hangs_in_a_thread, "`play` did not return within 0.3 s", "FOR_EVER.wait(SOON_S)", 0.3),
        (hangs, "`play` did not return within 0.1 s", "await asyncio.Event().wait()", 0.1),
        (hangs_whatever_is_done, "`play` did not return within 0.1 s", "in hangs_whatever_is_done", 0.1),
        (
            leaves_a_role_out,
            "`play` returned a score for white and none for 'black', who has spoken",
            "in leaves_a_role_out",
            SOON_S,
        ),
    ],
)
def test_what_goes_wrong_in_an_environment_is_a_failure_of_its_attempt_with_its_place(
    make: Make, play: Any, reason: str, place: str, limit_s: float
) -> None:
    FOR_EVER.clear()
    group = played(make, play, environment={"timeout_s": limit_s, "retries": 1})
    FOR_EVER.set()
    assert {(t.failure.stage, t.failure.reason) for t in group.trajectories if t.failure} == {("environment", reason)}
    assert all(t.failure is not None and place in t.failure.where and t.retries == 1 for t in group.trajectories)
    assert not group.has_signal
    assert len(group.attempts) == GROUP_SIZE


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("wrong", [{"stop": [5]}, {"role": 5}, {"max_tokens": 0}, {"messages": []}], ids=str)
def test_an_argument_of_say_that_cannot_be_used_is_a_failure_of_its_attempt_and_the_others_go_on(
    make: Make, wrong: dict[str, Any], is_async: bool
) -> None:
    numbers = itertools.count()

    async def play(task: Task, policy: Policy) -> float:
        arguments: dict[str, Any] = {"messages": task.messages, **(wrong if next(numbers) == 0 else {})}
        return float((await policy.say(**arguments)).num_tokens)

    def play_in_a_thread(task: Task, policy: Any) -> float:
        arguments = {"messages": task.messages, **(wrong if next(numbers) == 0 else {})}
        return float(policy.say(**arguments).num_tokens)

    group = played(make, play if is_async else play_in_a_thread, environment={"retries": 0})
    [failure] = [t.failure for t in group.trajectories if t.failure]
    assert failure.reason.startswith(f"`policy.say` was given {next(iter(wrong))} = ")
    assert failure.hint.startswith("give ")
    assert "in play" in failure.where
    assert len(group.attempts) == GROUP_SIZE


def test_an_attempt_that_fails_is_begun_again_with_other_randomness_and_nothing_of_the_failed_try(make: Make) -> None:
    tries: dict[int, int] = {}

    async def play(task: Task, policy: Policy) -> float:
        turn = await policy.say(task.messages)
        me = id(policy)
        tries[me] = 1
        if len(tries) <= 2:
            raise OSError("the service is away")
        return float(turn.num_tokens)

    group = played(make, play, environment={"retries": 1})
    assert [t.failure for t in group.trajectories] == [None] * GROUP_SIZE
    assert sorted(t.retries for t in group.trajectories) == [0, 0, 1, 1]
    assert all(len(t.turns) == 1 for t in group.trajectories)


def test_what_breaks_the_engine_reaches_the_caller(make: Make) -> None:
    class Broken(SteadyEngine):
        def step(self) -> Any:
            return [(number, EngineError("the model gave NaN")) for number in self.submitted]

    rollouts = make(two_turns, Broken())
    rollouts.begin([0, 1], 0)
    with pytest.raises(EngineError, match="the model gave NaN"):
        rollouts.finished(SOON_S)


# ── the long tail ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_with_oversampling_the_first_that_end_are_kept_and_the_others_are_cut_off(make: Make) -> None:
    began: list[int] = []

    async def play(task: Task, policy: Policy) -> float:
        mine = len(began)
        began.append(mine)
        turn = await policy.say(task.messages)
        if mine in (1, 4):
            await asyncio.Event().wait()
        return float(turn.num_tokens)

    group = played(make, play, environment={"oversample": 2})
    assert len(began) == GROUP_SIZE + 2
    assert [t.attempt for t in group.trajectories] == [0, 2, 3, 5]
    assert group.num_cut_off == 2


# ── cancelling, evaluating, ending ─────────────────────────────────────────────────────────────────────────────────────


def test_what_is_cancelled_does_not_come_and_the_others_do(make: Make) -> None:
    engine = SteadyEngine(answer=answer)
    rollouts = make(two_turns, engine)
    with rollouts.session.held():
        rollouts.begin(range(4), 0)
        rollouts.cancel([1, 2])
    assert sorted(all_of(rollouts, 2)) == [0, 3]
    assert list(rollouts.finished(0.05)) == []


def test_an_evaluation_asks_the_same_every_time_and_leaves_groups_under_way_as_they_are(make: Make) -> None:
    engine = SteadyEngine(answer=answer)
    rollouts = make(two_turns, engine)
    held_out = FakeTasks().held_out(2)
    alone = rollouts.evaluate(held_out)
    with rollouts.session.held():
        rollouts.begin(range(3), 0)
        again = rollouts.evaluate(held_out)
    groups = all_of(rollouts, 3)
    assert [[t.token_ids.tolist() for t in own] for own in alone] == [[t.token_ids.tolist() for t in own] for own in again]
    assert [len({t.attempt for t in own}) for own in alone] == [3, 3]
    assert groups.keys() == {0, 1, 2}


@pytest.mark.parametrize("make", ["beside"], indirect=True)
def test_an_evaluation_does_not_wait_for_room_that_training_holds_nor_training_for_its(make: Make) -> None:
    engine, most = SteadyEngine(answer=answer), 2 * GROUP_SIZE
    rollouts = make(two_turns, engine, max_sequences=most, environment={"timeout_s": SOON_S, "retries": 0})
    for _ in range(3):
        with rollouts.session.held():
            rollouts.begin(range(6), 0)
            _wait_until_the_engine_is_full(rollouts)
            attempts = rollouts.evaluate(FakeTasks().held_out(4))
        assert [t.failure for own in attempts for t in own] == [None] * sum(map(len, attempts))
        groups = all_of(rollouts, 6)
        assert all(t.failure is None for group in groups.values() for t in group.trajectories)
        assert max(count for what, count in engine.calls if what == "engine.step") <= 2 * most
    engine.calls.clear()
    with rollouts.session.held():
        rollouts.begin(range(6), 0)
        _wait_until_the_engine_is_full(rollouts)
    all_of(rollouts, 6)
    assert max(count for what, count in engine.calls if what == "engine.step") == most, "all room has come back, and no more"


def _wait_until_the_engine_is_full(rollouts: Dispatcher) -> None:
    deadline = time.monotonic() + SOON_S
    while not rollouts.queues()["rollouts: requests that wait for room in the engine"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def writes_into_its_task(task: Task, policy: Policy) -> float:
    messages: Any = task.messages
    turn = await policy.say(messages)
    messages += [turn.message, question("And?")]
    messages[0]["content"] += " LEAK"
    task.data["seen"]["words"].append(turn.text)  # type: ignore[index]
    if len(messages) != 3 or len(task.data["seen"]["words"]) != 1:
        raise AssertionError("an earlier try wrote into this task")
    await policy.say(messages)
    return 1.0


def writes_into_its_task_in_a_thread(task: Task, policy: Any) -> float:
    task.data["seen"]["words"].append("")  # type: ignore[index]
    policy.say(task.messages)
    task.messages[0]["content"] += " LEAK"  # type: ignore[index]
    return float(len(task.data["seen"]["words"]))


@pytest.mark.parametrize("play", [writes_into_its_task, writes_into_its_task_in_a_thread])
def test_what_an_attempt_writes_into_its_task_reaches_no_other_attempt_and_no_evaluation(make: Make, play: Any) -> None:
    rollouts = make(play)
    held_out = [Task("held/0", [question("exam")], data={"seen": {"words": []}, "shared": np.ones(2)})]
    evaluations = [rollouts.evaluate(held_out) for _ in range(2)]
    for [attempts] in evaluations:
        assert [(t.failure, t.reward) for t in attempts if t.failure or t.reward != 1.0] == []
    first, second = ([t.token_ids.tolist() for t in attempts] for [attempts] in evaluations)
    assert first == second
    assert held_out[0].messages == [question("exam")]
    assert held_out[0].data["seen"] == {"words": []}


def test_a_retry_gets_the_task_as_it_was(make: Make) -> None:
    asked: list[str] = []

    async def fails_once(task: Task, policy: Policy) -> float:
        asked.append(task.messages[0]["content"])
        task.messages[0]["content"] += " LEAK"  # type: ignore[index]
        await policy.say(task.messages)
        if len(asked) <= GROUP_SIZE:
            raise ValueError("try again")
        return 1.0

    group = played(make, fails_once, environment={"retries": 1})
    assert [t.failure for t in group.trajectories] == [None] * GROUP_SIZE
    assert set(asked) == {"question 0"}


@pytest.mark.parametrize("play", [two_turns, hangs, hangs_whatever_is_done])
def test_closing_leaves_nothing_in_the_engine_and_waits_for_no_environment(make: Make, play: Any) -> None:
    engine = SteadyEngine(answer=answer)
    rollouts = make(play, engine)
    with rollouts.session.held():
        rollouts.begin(range(8), 0)
    rollouts.close()  # which comes back, though two of them never do
    assert not engine.has_work


def test_an_async_environment_that_blocks_ends_the_run_with_its_place_and_the_fix(make: Make) -> None:
    end, ended = threading.Event(), threading.Event()

    async def blocks(task: Task, policy: Policy) -> float:
        await policy.say(task.messages)
        end.wait(SOON_S)
        ended.set()
        return 1.0

    rollouts = make(blocks, environment={"timeout_s": 1.0})
    rollouts.begin([0, 1], 0)
    with pytest.raises(TaskError, match=r"event loop of all attempts for 1 s, at .*in blocks: end\.wait") as caught:
        rollouts.finished()
    assert not ended.is_set(), "nobody waited for it"
    assert "await asyncio.to_thread(call)" in caught.value.hint
    end.set()


def test_an_async_environment_that_blocks_is_told_of_as_a_stall_of_its_lane_and_place(make: Make, tmp_path: Path) -> None:
    end = threading.Event()

    async def blocks(task: Task, policy: Policy) -> float:
        turn = await policy.say(task.messages)
        end.wait(SOON_S)
        return float(turn.num_tokens)

    recorder = Recorder()
    folder = RunFolder.create(tmp_path, "run")
    alerts: list[Any] = []

    def run() -> None:
        rollouts.begin([0], 0)
        rollouts.finished()

    with recording(recorder):
        rollouts = make(blocks)
        caller = threading.Thread(target=run)
        watchdog = Watchdog(recorder, send=alerts.append, every_s=0.02)
        watchdog.started(folder, _watched(stall_after_s=1.0))
        watchdog.begin(rollouts.queues)
        caller.start()
        while not alerts:
            time.sleep(0.01)
        end.set()
        caller.join(SOON_S)
        watchdog.close()
    assert alerts[0]["kind"] == "stalled_rollouts"
    assert "in blocks: end.wait(SOON_S), in lane environments" in alerts[0]["seen"]


def _watched(**telemetry: Any) -> Config:
    return Config.model_validate(
        {"model": {"path": "builtin:tiny"}, "rollouts": {"task": {"kind": "import", "path": "a:B"}}, "telemetry": telemetry}
    )


# ── many ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_two_thousand_attempts_in_flight_stay_within_bounded_memory_and_leave_nothing(make: Make) -> None:
    under_way: set[int] = set()
    most = 0

    async def play(task: Task, policy: Policy) -> float:
        nonlocal most
        under_way.add(id(policy))
        most = max(most, len(under_way))
        score = await two_turns(task, policy)
        under_way.discard(id(policy))
        return score

    engine = SteadyEngine(answer=answer)
    rollouts = make(play, engine, group_size=8, max_sequences=256)
    rollouts.begin([0], 0)
    all_of(rollouts, 1)  # what is made once is there
    engine.calls.clear()
    tracemalloc.start()
    rollouts.begin(range(1, 251), 0)
    groups = all_of(rollouts, 250)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most == 2000
    assert max(count for what, count in engine.calls if what == "engine.step") <= 256
    assert all(t.failure is None for group in groups.values() for t in group.trajectories)
    assert peak < 2000 * 64 * 1024, f"{peak / 2000 / 1024:.0f} KiB an attempt"
    assert not engine.has_work
