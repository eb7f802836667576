"""What rollouts promise, in lockstep and beside the trainer: the same assertions for both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.fakes import FakeEngine, FakeTasks, completion

from redline.config.schema import RolloutsConfig
from redline.engine import EngineSession
from redline.environments.single_turn import SingleTurn
from redline.errors import EngineError
from redline.models.files.tiny import tiny_tokenizer
from redline.ports import Policy, Score
from redline.rollouts import Chat, Dispatcher, RolloutSetup
from redline.types import Completion, Delta, GenerateRequest, Message, SamplingParams, Task, TrajectoryGroup

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
    """One completion of every request in each step, so that a group takes as many steps as it has attempts."""

    def step(self) -> list[tuple[int, Delta]]:
        self.calls.append(("engine.step", len(self.submitted)))
        nothing = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        pieces = []
        for number, request in list(self.submitted.items()):
            index = self.given.get(number, 0)
            self.given[number] = index + 1
            pieces.append((number, Delta(index, *nothing, completion=self.answer(request, index))))
            if index + 1 == request.sampling.n:
                del self.submitted[number]
        return pieces

    @property
    def given(self) -> dict[int, int]:
        """Completions of each request so far."""
        return self.__dict__.setdefault("_given", {})

    def reset_prefix_cache(self) -> None:
        self.calls.append(("engine.reset_prefix_cache",))


def answer(request: GenerateRequest, index: int) -> Completion:
    """Depends on the prompt, the seed and the index, and on nothing else."""
    drawn = np.random.default_rng([int(request.prompt_ids.sum()), request.sampling.seed, index])
    return completion(drawn.integers(3, 60, 1 + index).tolist(), version=7)


@pytest.fixture(params=["lockstep", "beside"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Rollouts of the one kind or the other, which end with the test."""
    made: list[Dispatcher] = []

    def make(tasks: FakeTasks | None = None, engine: FakeEngine | None = None, **keys: Any) -> Dispatcher:
        environment = keys.pop("environment", SingleTurn)
        config = CONFIG.model_copy(update=keys)
        setup = RolloutSetup(tasks or FakeTasks(), environment, Chat(TOKENIZER, None, ""), config, (3,), 5)
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


def replies(group: TrajectoryGroup) -> list[list[int]]:
    return [t.token_ids[t.loss_mask].tolist() for t in group.trajectories]


# ── groups ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_index_that_is_begun_comes_as_a_group_with_rewards_and_advantages(make: Make) -> None:
    tasks = FakeTasks(lambda task, text: {"length": float(len(text))})
    rollouts = make(tasks)
    rollouts.begin([3, 4], 7)
    rollouts.begin([9], 7)
    groups = all_of(rollouts, 3)
    assert groups.keys() == {3, 4, 9}
    for index, group in groups.items():
        assert group.task_id == f"task/{index}"
        assert len(group.trajectories) == GROUP_SIZE
        assert [t.reward for t in group.trajectories] == [float(len(t.text)) for t in group.trajectories]
        assert abs(float(group.advantages.sum())) < 1e-4
        assert group.has_signal
        assert group.latency_s > 0
    assert rollouts.arrived() == []


def test_what_is_sampled_follows_from_the_index_whoever_steps_the_engine(make: Make) -> None:
    engine = SteadyEngine(answer=answer)
    rollouts = make(engine=engine)
    rollouts.begin(range(5), 0)
    groups = all_of(rollouts, 5)
    assert sorted(request.sampling.seed for request in engine.requests) == [(5 << 32) + index for index in range(5)]
    for group in groups.values():
        [request] = [r for r in engine.requests if r.sampling.seed == (5 << 32) + group.index]
        assert replies(group) == [answer(request, i).token_ids.tolist() for i in range(GROUP_SIZE)]


def test_the_attempts_of_a_group_are_one_request(make: Make) -> None:
    engine = SteadyEngine(answer=answer)
    rollouts = make(engine=engine)
    rollouts.begin(range(3), 0)
    all_of(rollouts, 3)
    assert [request.sampling.n for request in engine.requests] == [GROUP_SIZE] * 3


def test_a_turn_says_where_its_tokens_are_and_who_sampled_them(make: Make) -> None:
    rollouts = make()
    rollouts.begin([0], 0)
    for trajectory in all_of(rollouts, 1)[0].trajectories:
        [turn] = trajectory.turns
        assert trajectory.loss_mask.nonzero()[0].tolist() == list(range(turn.start, turn.end))
        assert turn.num_tokens == trajectory.num_completion_tokens
        assert (turn.text, turn.versions, turn.finish_reason) == (
            trajectory.text,
            trajectory.versions,
            trajectory.finish_reason,
        )


# ── what goes wrong ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_task_that_fails_is_a_group_of_failures_at_the_version_it_was_begun_at(make: Make) -> None:
    class SomeTasks(FakeTasks):
        def train(self, index: int) -> Task:
            if index == 1:
                raise ValueError("no such row")
            return super().train(index)

    rollouts = make(SomeTasks())
    rollouts.begin([0, 1, 2], 4)
    groups = all_of(rollouts, 3)
    assert {t.failure and t.failure.reason for t in groups[1].trajectories} == {"ValueError: no such row"}
    assert (groups[1].versions.oldest, groups[1].versions.newest) == (4, 4)
    assert all(t.failure is None for index in (0, 2) for t in groups[index].trajectories)


def test_a_score_that_fails_costs_its_attempt_alone(make: Make) -> None:
    def score(task: Task, text: str) -> dict[str, float]:
        if calls.pop() == 1:
            raise ValueError("not this one")
        return {"correct": 1.0}

    calls = list(range(GROUP_SIZE))[::-1]
    rollouts = make(FakeTasks(score))
    rollouts.begin([0], 0)
    [group] = all_of(rollouts, 1).values()
    assert [t.failure and t.failure.reason for t in group.trajectories] == [None, "ValueError: not this one", None, None]


def test_a_score_that_does_not_return_costs_its_attempt_and_no_more_time_than_its_limit(make: Make) -> None:
    end = threading.Event()

    def score(task: Task, text: str) -> dict[str, float]:
        if task.id == "task/1":
            end.wait(SOON_S)
        return {"correct": 1.0}

    rollouts = make(FakeTasks(score), reward_timeout_s=0.5)
    rollouts.begin([0, 1, 2], 0)
    groups = all_of(rollouts, 3)
    end.set()
    assert all(t.failure is not None for t in groups[1].trajectories)
    assert "did not return within 0.5 s" in str(groups[1].trajectories[0].failure)
    assert all(t.failure is None for t in groups[0].trajectories)


def test_a_score_may_be_a_coroutine(make: Make) -> None:
    class Tasks(FakeTasks):
        async def score(self, task: Task, text: str) -> float:  # type: ignore[override]
            await asyncio.sleep(0)
            return float(len(text))

    rollouts = make(Tasks())
    rollouts.begin([0], 0)
    [group] = all_of(rollouts, 1).values()
    assert [t.reward for t in group.trajectories] == [float(len(t.text)) for t in group.trajectories]


def test_what_breaks_the_engine_reaches_the_caller(make: Make) -> None:
    class Broken(SteadyEngine):
        def step(self) -> Any:
            return [(number, EngineError("the model gave NaN")) for number in self.submitted]

    rollouts = make(engine=Broken())
    rollouts.begin([0, 1], 0)
    with pytest.raises(EngineError, match="the model gave NaN"):
        rollouts.finished(SOON_S)
    with pytest.raises(EngineError, match="the model gave NaN"):
        rollouts.arrived()


# ── cancelling, evaluating, ending ─────────────────────────────────────────────────────────────────────────────────────


def test_what_is_cancelled_does_not_come_and_the_others_do(make: Make) -> None:
    rollouts = make()
    with rollouts.session.held():
        rollouts.begin(range(4), 0)
        rollouts.cancel([1, 2])
    assert sorted(all_of(rollouts, 2)) == [0, 3]
    assert list(rollouts.finished(0.05)) == []


def test_an_evaluation_asks_the_same_every_time_and_leaves_groups_under_way_as_they_are(make: Make) -> None:
    engine = SteadyEngine(answer=answer)
    rollouts = make(engine=engine)
    held_out = FakeTasks().held_out(2)
    alone = rollouts.evaluate(held_out)
    with rollouts.session.held():
        rollouts.begin(range(3), 0)
        again = rollouts.evaluate(held_out)
    groups = all_of(rollouts, 3)
    assert [[t.text for t in attempts] for attempts in alone] == [[t.text for t in attempts] for attempts in again]
    assert [len(attempts) for attempts in alone] == [3, 3]
    asked = [request.sampling for request in engine.requests if request.sampling.n == 3]
    assert asked[:2] == asked[2:]
    assert {sampling.temperature for sampling in asked} == {0.5}
    assert groups.keys() == {0, 1, 2}
    assert ("engine.reset_prefix_cache",) in engine.calls, "no later sample finds what an evaluation computed"


def test_closing_leaves_nothing_in_the_engine(make: Make) -> None:
    engine = SteadyEngine(answer=answer)
    rollouts = make(engine=engine)
    with rollouts.session.held():
        rollouts.begin(range(8), 0)
    rollouts.close()
    assert not engine.has_work
    with pytest.raises(EngineError, match="has stopped"):
        rollouts.session.submit(GenerateRequest(np.ones(1, np.int32), SamplingParams(1)), rollouts)


# ── environments ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Environment:
    """Plays as `play` says, in one turn."""

    asks_once = True

    def __init__(self, play: Callable[[Task, Policy], Any]) -> None:
        self.play = play


def played(make: Make, play: Callable[[Task, Policy], Any], engine: FakeEngine | None = None) -> TrajectoryGroup:
    rollouts = make(engine=engine, environment=lambda score: Environment(play))
    rollouts.begin([0], 0)
    [group] = all_of(rollouts, 1).values()
    return group


def question(content: str) -> Sequence[Message]:
    return [{"role": "user", "content": content}]


def test_an_environment_that_asks_once_hears_what_it_may_not_ask_for(make: Make) -> None:
    async def play(task: Task, policy: Policy) -> Score:
        await policy.say(question("heads or tails?"), max_tokens=3, until=lambda reply: True)
        return 1.0

    failure = played(make, play).trajectories[0].failure
    assert failure is not None
    assert "`policy.say` was given `max_tokens`, `until` in an environment that asks once" in failure.reason


def test_attempts_that_ask_the_same_share_a_request_and_others_have_their_own_randomness(make: Make) -> None:
    numbers = iter([0, 1, 0, 0])

    async def play(task: Task, policy: Policy) -> Score:
        turn = await policy.say(question(f"heads or tails, {next(numbers)}?"))
        return float(turn.num_tokens)

    engine = SteadyEngine(answer=answer)
    group = played(make, play, engine)
    assert [request.sampling.n for request in engine.requests] == [3, 1]
    assert len({request.sampling.seed for request in engine.requests}) == 2
    first, second = engine.requests
    expected = [answer(first, 0), answer(second, 0), answer(first, 1), answer(first, 2)]
    assert replies(group) == [c.token_ids.tolist() for c in expected]
    prompts = [TOKENIZER.decode(t.token_ids[~t.loss_mask]) for t in group.trajectories]
    assert ["tails, 1?" in prompt for prompt in prompts] == [False, True, False, False]


async def _raises(task: Task, policy: Policy) -> Score:
    raise ValueError("no board")


async def _never_asks(task: Task, policy: Policy) -> Score:
    return 1.0


async def _awaits_something_else(task: Task, policy: Policy) -> Score:
    await asyncio.sleep(0)
    return 1.0


async def _asks_twice(task: Task, policy: Policy) -> Score:
    await policy.say(task.messages)
    await policy.say(task.messages)
    return 1.0


async def _raises_later(task: Task, policy: Policy) -> Score:
    await policy.say(task.messages)
    raise ValueError("no such move")


@pytest.mark.parametrize(
    ("play", "stage", "reason"),
    [
        (_raises, "task", "ValueError: no board"),
        (_never_asks, "task", "the environment ended before it asked the policy"),
        (_awaits_something_else, "task", "the environment awaited a NoneType"),
        (_asks_twice, "reward", "the environment asked the policy a second time"),
        (_raises_later, "reward", "ValueError: no such move"),
    ],
)
def test_what_goes_wrong_in_an_environment_is_a_failure_of_its_attempts(
    make: Make, play: Callable[[Task, Policy], Any], stage: str, reason: str
) -> None:
    group = played(make, play)
    assert {(t.failure.stage, t.failure.reason) for t in group.trajectories if t.failure} == {(stage, reason)}
    assert all(t.failure is not None for t in group.trajectories)
    assert not group.has_signal
