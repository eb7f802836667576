from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.eventually import eventually
from support.fakes import FakeEngine, FakeTasks, completion
from transformers import PreTrainedTokenizerFast

from redline.config.sections.rollouts import RolloutsConfig
from redline.engine import EngineSession
from redline.environments.single_turn import SingleTurn
from redline.errors import ConfigError, TaskError
from redline.models.files.tiny import tiny_tokenizer
from redline.rollouts import Chat, Dispatcher, RolloutSetup
from redline.rollouts.prompts import prompt_limit
from redline.telemetry import Recorder, recording
from redline.types import Completion, Failure, FinishReason, GenerateRequest, Task, TrajectoryGroup

TOKENIZER = tiny_tokenizer()
START, END = (TOKENIZER.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def say(*answers: str) -> FakeEngine:
    """An engine whose attempt i at any task is `answers[i]`, ended by the stop token."""

    def answer(request: GenerateRequest, i: int) -> Completion:
        return completion([*ids(answers[i % len(answers)]), END], version=4)

    return FakeEngine(answer=answer)


def settings_of(**config: Any) -> RolloutsConfig:
    given = {"task": {"kind": "import", "path": "tests:Fake"}, "groups_per_step": 3, "group_size": 2, "max_new_tokens": 9}
    return RolloutsConfig(**{**given, **config})


def strict_tokenizer() -> PreTrainedTokenizerFast:
    """One whose template refuses roles that it does not know."""
    tokenizer = tiny_tokenizer()
    refusal = "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
    tokenizer.chat_template = refusal + str(tokenizer.chat_template)
    return tokenizer


MADE: list[Dispatcher] = []
"""Rollouts of the test that runs."""


def make_rollouts(
    tasks: FakeTasks,
    engine: FakeEngine,
    *,
    seed: int = 0,
    workers: int = 1,
    tokenizer: PreTrainedTokenizerFast = TOKENIZER,
    **config: Any,
) -> Dispatcher:
    settings = settings_of(**config)
    chat = Chat(tokenizer, settings.system_prompt, settings.prompt_suffix)
    limit = settings.max_prompt_tokens
    setup = RolloutSetup(tasks, SingleTurn, chat, settings, (END,), seed, max_reward_workers=workers, max_prompt_tokens=limit)
    MADE.append(Dispatcher(EngineSession(engine), setup))
    return MADE[-1]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Rollouts keep threads for the calls of a task until they are closed."""
    yield
    while MADE:
        MADE.pop().close()


def collect(rollouts: Dispatcher, num_groups: int, version: int) -> Sequence[TrajectoryGroup]:
    """The groups of a step in lockstep."""
    rollouts.begin(range(version * 3, version * 3 + num_groups), version)
    return rollouts.finished()


def by_answer(scores: dict[str, Any]) -> FakeTasks:
    """A reward that is looked up, or raised, by the answer."""

    def score(task: Task, text: str) -> Any:
        if isinstance(scores[text], BaseException):
            raise scores[text]
        return scores[text]

    return FakeTasks(score)


# ── groups ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_group_is_the_attempts_at_one_task_with_their_advantages() -> None:
    tasks = by_answer({"yes": {"correct": 1.0}, "no": {"correct": 0.0}})
    [group] = collect(make_rollouts(tasks, say("yes", "no")), 1, version=0)
    assert group.task_id == "task/0"
    assert [t.text for t in group.trajectories] == ["yes", "no"]
    assert [t.reward for t in group.trajectories] == [1.0, 0.0]
    np.testing.assert_allclose(group.advantages, [1.0, -1.0], atol=1e-5)
    assert group.has_signal


class SlowToTake(FakeEngine):
    """Takes a while over every request that it is given."""

    SECONDS = 0.05

    def submit(self, request: GenerateRequest, *, streaming: bool = False) -> int:
        time.sleep(self.SECONDS)
        return super().submit(request, streaming=streaming)


def test_what_an_engine_takes_over_new_requests_is_its_time_in_lockstep_too() -> None:
    with recording(Recorder()) as recorder:
        collect(make_rollouts(FakeTasks(), SlowToTake()), 3, version=0)
    assert recorder.step_mark()["engine.schedule"] >= 3 * SlowToTake.SECONDS * 1e9


@pytest.mark.parametrize(
    ("advantages", "expected"), [("group_centred", [0.5, -0.5]), ("leave_one_out", [1.0, -1.0]), ("batch", [1.0, 0.0])]
)
def test_the_recipe_says_what_an_attempt_is_compared_with(advantages: str, expected: list[float]) -> None:
    tasks = by_answer({"yes": {"correct": 1.0}, "no": {"correct": 0.0}})
    [group] = collect(make_rollouts(tasks, say("yes", "no"), advantages=advantages), 1, version=0)
    np.testing.assert_allclose(group.advantages, expected)


def test_a_trajectory_is_the_prompt_and_what_the_policy_chose() -> None:
    [group] = collect(make_rollouts(FakeTasks(), say("four", "4")), 1, version=0)
    prompt = [START, *ids("user\nquestion 0"), END, *ids("\n"), START, *ids("assistant\n")]
    for attempt, answer in zip(group.trajectories, ("four", "4"), strict=True):
        chosen = [*ids(answer), END]
        assert attempt.token_ids.tolist() == prompt + chosen
        assert attempt.token_ids.dtype == np.int32
        assert attempt.loss_mask.tolist() == [False] * len(prompt) + [True] * len(chosen)
        assert attempt.logprobs.tolist() == [0.0] * len(prompt) + [-0.25 * (i + 1) for i in range(len(chosen))]
        assert attempt.logprobs.dtype == np.float32
        assert attempt.num_completion_tokens == len(chosen)
        assert attempt.finish_reason == FinishReason.STOP
        assert (attempt.versions.oldest, attempt.versions.newest) == (4, 4)
        assert attempt.failure is None


def test_the_reward_is_the_weighted_sum_of_its_parts_and_the_parts_stay_as_they_are() -> None:
    tasks = FakeTasks(lambda task, text: {"correct": 1.0, "format": 0.5})
    [group] = collect(make_rollouts(tasks, say("x"), reward_weights={"format": -2.0}), 1, version=0)
    assert group.trajectories[0].reward == 0.0
    assert group.trajectories[0].reward_parts == {"correct": 1.0, "format": 0.5}


def test_a_reward_without_a_part_that_has_a_weight_is_a_failure_with_the_name_of_the_part() -> None:
    tasks = by_answer({"both": {"correct": 1.0, "format": 1.0}, "one": {"correct": 1.0}, "none": {"correct": 0, "format": 0}})
    [group] = collect(make_rollouts(tasks, say("both", "one", "none"), group_size=3, reward_weights={"format": 1.0}), 1, 0)
    both, one, none = group.trajectories
    assert (both.reward, one.reward, none.reward) == (2.0, 0.0, 0.0)
    assert one.failure is not None
    assert one.failure.reason == "rollouts.reward_weights.format: the task's reward has no such part"
    assert one.failure.where.endswith("in score")
    assert both.failure is none.failure is None
    np.testing.assert_allclose(group.advantages, [1.0, 0.0, -1.0], atol=1e-5)


# ── length ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_reward_falls_with_the_last_tokens_an_attempt_may_have() -> None:
    """max_new_tokens = 10, of which the last 5 cost 0.2 each."""
    engine = FakeEngine(answer=lambda request, i: completion(range(1, 2 + i)))
    [group] = collect(
        make_rollouts(FakeTasks(), engine, group_size=10, max_new_tokens=10, overlong_fraction=0.5, advantages="group_centred"),
        1,
        version=0,
    )
    rewards = [1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0]
    assert [t.reward for t in group.trajectories] == pytest.approx(rewards)
    assert [t.reward_parts["overlong"] for t in group.trajectories] == pytest.approx([r - 1 for r in rewards])


def test_a_part_called_as_the_penalty_is_a_failure_and_no_reward() -> None:
    tasks = FakeTasks(lambda task, text: {"overlong": 1.0} if text == "yes" else {"correct": 1.0})
    keys = {"group_size": 3, "max_new_tokens": 64, "overlong_fraction": 0.5}
    [group] = collect(make_rollouts(tasks, say("no", "yes", "no"), **keys), 1, version=0)
    fine, bad, _ = group.trajectories
    assert fine.failure is None
    assert fine.reward_parts == {"correct": 1.0, "overlong": 0.0}
    assert bad.failure is not None
    assert "a part called overlong, which is the name of rollouts.overlong_fraction's" in bad.failure.reason
    assert bad.reward == 0


@pytest.mark.parametrize("advantages", ["group", "group_centred", "leave_one_out", "batch_baseline"])
@pytest.mark.parametrize("correct", [0.0, 1.0])
def test_a_penalty_for_length_alone_is_no_signal(advantages: str, correct: float) -> None:
    """Eight answers that score alike and of which the later ones are ever longer."""
    engine = FakeEngine(answer=lambda request, i: completion(range(1, 2 + i)))
    tasks = FakeTasks(lambda task, text: {"correct": correct})
    rollouts = make_rollouts(tasks, engine, group_size=8, max_new_tokens=8, overlong_fraction=0.5, advantages=advantages)
    [group] = collect(rollouts, 1, version=0)
    assert len({t.reward for t in group.trajectories}) == 5, "the rewards differ all the same"
    assert not group.has_signal
    assert not group.advantages.any()


def test_a_group_with_signal_is_trained_on_the_reward_with_its_penalty() -> None:
    tasks = by_answer({"no": {"correct": 0.0}, "yes": {"correct": 1.0}, "yes and more": {"correct": 1.0}})
    keys = {"group_size": 3, "max_new_tokens": 1 + len(ids("yes and more")), "overlong_fraction": 1.0}
    rollouts = make_rollouts(tasks, say("no", "yes", "yes and more"), advantages="group_centred", **keys)
    [group] = collect(rollouts, 1, version=0)
    rewards = np.array([t.reward for t in group.trajectories])
    assert rewards.tolist() == pytest.approx(
        [t.reward_parts["correct"] + t.reward_parts["overlong"] for t in group.trajectories]
    )
    assert rewards[0] < rewards[2] + 1 < rewards[1] + 1
    np.testing.assert_allclose(group.advantages, rewards - rewards.mean(), atol=1e-6)


def test_a_penalty_for_length_moves_a_critics_rewards_whatever_the_group() -> None:
    engine = FakeEngine(answer=lambda request, i: completion(range(1, 2 + i)))
    [group] = collect(
        make_rollouts(FakeTasks(), engine, group_size=4, max_new_tokens=4, overlong_fraction=0.5, advantages="gae"),
        1,
        version=0,
    )
    assert group.advantages.tolist() == pytest.approx([1.0, 1.0, 0.5, 0.0])


def test_an_evaluation_is_never_punished_for_length() -> None:
    rollouts = make_rollouts(FakeTasks(), say("a long answer"), overlong_fraction=1.0, max_new_tokens=4)
    [[attempt]] = rollouts.evaluate(FakeTasks().held_out(1))
    assert (attempt.reward, dict(attempt.reward_parts)) == (1.0, {"correct": 1.0})


def test_a_failed_attempt_is_not_punished_on_top() -> None:
    rollouts = make_rollouts(by_answer({"x": ValueError("broken")}), say("x"), overlong_fraction=1.0, max_new_tokens=2)
    [group] = collect(rollouts, 1, version=0)
    assert [(t.reward, dict(t.reward_parts)) for t in group.trajectories] == [(0.0, {})] * 2


# ── which tasks, which randomness ──────────────────────────────────────────────────────────────────────────────────────


def test_each_step_attempts_the_tasks_after_those_of_the_last() -> None:
    tasks = FakeTasks()
    rollouts = make_rollouts(tasks, say("x"))
    for version in (0, 1, 5):
        collect(rollouts, 3, version)
    assert tasks.asked == [0, 1, 2, 3, 4, 5, 15, 16, 17]


def test_tasks_and_seeds_follow_from_the_version_alone() -> None:
    """A run that is resumed at a step asks for exactly what it would have asked for."""
    straight, resumed = FakeEngine(), FakeEngine()
    long = make_rollouts(FakeTasks(), straight, seed=7)
    for version in range(4):
        collect(long, 3, version)
    collect(make_rollouts(FakeTasks(), resumed, seed=7), 3, 3)
    asked = [(request.prompt_ids.tolist(), request.sampling) for request in straight.requests[-3:]]
    assert asked == [(request.prompt_ids.tolist(), request.sampling) for request in resumed.requests]


def test_no_two_requests_of_a_run_share_their_randomness_nor_do_runs_of_other_seeds() -> None:
    seeds = []
    for seed in (0, 1, 2**31 - 1):
        engine = FakeEngine()
        rollouts = make_rollouts(FakeTasks(), engine, seed=seed)
        for version in range(20):
            collect(rollouts, 3, version)
        rollouts.evaluate(FakeTasks().held_out(16))
        seeds += [request.sampling.seed for request in engine.requests]
    assert len(set(seeds)) == len(seeds) == 3 * (60 + 16)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_request_says_all_the_recipe_says() -> None:
    engine = FakeEngine()
    collect(make_rollouts(FakeTasks(), engine, group_size=5, max_new_tokens=33, temperature=0.8), 2, version=0)
    for request in engine.requests:
        sampling = request.sampling
        assert (sampling.n, sampling.max_tokens, sampling.temperature, sampling.stop_token_ids) == (5, 33, 0.8, (END,))


def test_all_prompts_of_a_step_reach_the_engine_together() -> None:
    engine = FakeEngine()
    collect(make_rollouts(FakeTasks(), engine), 3, version=0)
    assert engine.calls == [("engine.generate", 3)]


def test_an_evaluation_asks_the_same_every_time() -> None:
    engine = FakeEngine()
    rollouts = make_rollouts(
        FakeTasks(), engine, evaluation={"num_tasks": 4, "samples_per_task": 3, "temperature": 0.0}, temperature=0.9
    )
    held_out = FakeTasks().held_out(4)
    first = rollouts.evaluate(held_out)
    collect(rollouts, 3, version=0)
    rollouts.evaluate(held_out)
    asked = [(request.prompt_ids.tolist(), request.sampling) for request in engine.requests]
    assert asked[:4] == asked[-4:]
    assert {(sampling.n, sampling.temperature) for _, sampling in asked[:4]} == {(3, 0.0)}
    assert [len(attempts) for attempts in first] == [3] * 4


# ── rewards that fail ──────────────────────────────────────────────────────────────────────────────────────────────────

BAD_SCORES = {
    "raised": (ValueError("no number"), "ValueError: no number"),
    "nan": ({"correct": math.nan}, "correct = nan: not a finite number"),
    "inf": ({"correct": 1.0, "bonus": math.inf}, "bonus = inf: not a finite number"),
    "text": ({"correct": "much"}, "`score` returned correct = 'much', a str; each part must be a number"),
    "nothing": (None, "`score` returned None; it must return a number, or named numbers"),
    "list": ([1.0], "`score` returned [1.0], a list; it must return a number, or named numbers"),
    "array": (np.ones(2), "`score` returned array([1., 1.]), a ndarray; it must return a number, or named numbers"),
    "a name that is none": ({1: 1.0}, "`score` returned a part called 1, a int; names are texts"),
    "huge": ({"correct": 1e39}, "reward part correct = 1e+39: not a finite number, too large for float32"),
    "huge together": ({"correct": 3e38, "format": 3e38}, "the weighted sum of the reward = 6e+38: not a finite number"),
    "end": (SystemExit(3), "SystemExit: 3"),
}


@pytest.mark.parametrize(("bad", "reason"), BAD_SCORES.values(), ids=BAD_SCORES.keys())
def test_a_reward_that_fails_is_recorded_and_the_others_of_its_group_go_on(bad: Any, reason: str) -> None:
    tasks = by_answer({"good": {"correct": 1.0}, "poor": {"correct": 0.0}, "bad": bad})
    [group] = collect(make_rollouts(tasks, say("good", "bad", "poor"), group_size=3), 1, version=0)
    good, failed, poor = group.trajectories
    assert isinstance(failed.failure, Failure)
    assert failed.failure.stage == "reward"
    assert reason in failed.failure.reason
    assert (failed.reward, dict(failed.reward_parts)) == (0.0, {})
    assert failed.text == "bad"
    assert good.failure is poor.failure is None
    np.testing.assert_allclose(group.advantages, [1.0, 0.0, -1.0], atol=1e-5)


def test_a_group_whose_every_reward_fails_has_no_signal() -> None:
    [group] = collect(make_rollouts(by_answer({"x": ValueError("broken")}), say("x")), 1, version=0)
    assert not group.has_signal
    assert group.advantages.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("number", [1, 0.5, True, np.float32(0.25), np.array(3.0), torch.tensor(2.0), torch.tensor([2.0])])
def test_a_reward_may_be_a_number(number: Any) -> None:
    [group] = collect(make_rollouts(FakeTasks(lambda task, text: number), say("x")), 1, version=0)
    assert [t.failure for t in group.trajectories] == [None, None]
    assert group.trajectories[0].reward == float(number)
    assert dict(group.trajectories[0].reward_parts) == {"reward": float(number)}


def test_a_reward_may_be_a_coroutine() -> None:
    class Tasks(FakeTasks):
        async def score(self, task: Task, text: str) -> float:  # type: ignore[override]
            await asyncio.sleep(0)
            if text == "bad":
                raise ValueError("not this one")
            return float(len(text))

    rollouts = make_rollouts(Tasks(), say("one", "three", "bad"), group_size=3)
    [group] = collect(rollouts, 1, version=0)
    assert [t.reward for t in group.trajectories] == [3.0, 5.0, 0.0]
    failure = group.trajectories[2].failure
    assert failure is not None
    assert failure.reason == "ValueError: not this one"
    assert "in score: raise ValueError" in failure.where
    rollouts.close()


def test_ctrl_c_goes_through_a_reward_that_the_main_thread_calls() -> None:
    def interrupted(task: Task, text: str) -> dict[str, float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(make_rollouts(FakeTasks(interrupted), say("x"), reward_timeout_s=None), 1, version=0)


def test_a_reward_that_does_not_return_in_time_fails_its_attempt_alone() -> None:
    end = threading.Event()

    def score(task: Task, text: str) -> float:
        return float(end.wait(300)) if text == "slow" else 1.0

    rollouts = make_rollouts(FakeTasks(score), say("quick", "slow", "x"), group_size=3, reward_timeout_s=0.8)  # type: ignore[arg-type]
    [group] = collect(rollouts, 1, version=0)
    end.set()
    assert [t.failure and t.failure.reason for t in group.trajectories] == [None, "`score` did not return within 0.8 s", None]
    rollouts.close()


# ── tasks that fail ────────────────────────────────────────────────────────────────────────────────────────────────────


class SomeTasks(FakeTasks):
    """Task 1 is whatever a test says."""

    def __init__(self, bad: Any) -> None:
        super().__init__(lambda task, text: {"length": float(len(text))})
        self._bad = bad

    def train(self, index: int) -> Task:
        if index != 1:
            return super().train(index)
        if isinstance(self._bad, BaseException):
            raise self._bad
        return self._bad  # type: ignore[no-any-return]


LONG = Task("long", [{"role": "user", "content": "say it again " * 50}])
BAD_TASKS: dict[str, tuple[Any, str, str]] = {
    "raises": (IndexError("no more rows"), "train(1)", "task: IndexError: no more rows, at test_single_turn.py:"),
    "exits": (SystemExit(3), "train(1)", "task: SystemExit: 3"),
    "dict": ({"id": "x"}, "train(1)", "task: rollouts.task: train(1) gave a dict, not a Task"),
    "text": (Task("t", "a question"), "train(1)", "whose messages are a str, not a list"),  # type: ignore[arg-type]
    "long": (LONG, "long", "prompt: a prompt of "),
    "refused by the template": (
        Task("odd", [{"role": "nobody", "content": "a"}]),
        "odd",
        "prompt: TemplateError: no such role",
    ),
}


@pytest.mark.parametrize(("bad", "task_id", "reason"), BAD_TASKS.values(), ids=BAD_TASKS.keys())
def test_a_task_that_cannot_be_posed_is_a_group_of_failed_attempts_and_the_others_go_on(
    bad: Any, task_id: str, reason: str
) -> None:
    alone = collect(make_rollouts(FakeTasks(), engine := say("one", "three")), 3, version=0)
    rollouts = make_rollouts(SomeTasks(bad), say("one", "three"), max_prompt_tokens=60, tokenizer=strict_tokenizer())
    rollouts.begin([0, 1, 2], 7)
    groups = rollouts.finished()
    assert [group.index for group in groups] == [0, 1, 2]
    failed = groups[1]
    assert failed.task_id == task_id
    assert len(failed.trajectories) == 2
    assert not failed.has_signal
    assert (failed.versions.oldest, failed.versions.newest) == (7, 7), "a batch of this version may hold it"
    for attempt in failed.trajectories:
        assert reason in str(attempt.failure)
        assert (attempt.num_completion_tokens, attempt.reward) == (0, 0.0)
    assert [group.has_signal for group in groups] == [True, False, True]
    for one, other in ((alone[0], groups[0]), (alone[2], groups[2])):
        assert [t.token_ids.tolist() for t in one.trajectories] == [t.token_ids.tolist() for t in other.trajectories]
    assert len(engine.requests) == 3


def test_a_held_out_task_that_is_too_long_fails_and_the_others_are_answered() -> None:
    rollouts = make_rollouts(SomeTasks(None), say("one"), max_prompt_tokens=60)
    held_out = [*FakeTasks().held_out(1), LONG, *FakeTasks().held_out(1)]
    assert [[t.failure is None for t in attempts] for attempts in rollouts.evaluate(held_out)] == [[True], [False], [True]]


def test_where_no_task_can_be_posed_the_engine_is_asked_for_nothing() -> None:
    engine = say("x")
    rollouts = make_rollouts(SomeTasks(ValueError("no")), engine)
    rollouts.begin([1], 0)
    assert [t.failure is not None for t in rollouts.finished()[0].trajectories] == [True, True]
    assert not engine.calls


def test_a_task_that_does_not_come_in_time_fails_and_the_others_are_attempted() -> None:
    end = threading.Event()

    class Slow(FakeTasks):
        def train(self, index: int) -> Task:
            if index == 1:
                end.wait(300)
            return super().train(index)

    rollouts = make_rollouts(Slow(), say("x"), task_timeout_s=0.8)
    groups = collect(rollouts, 3, version=0)
    end.set()
    failures = [group.trajectories[0].failure for group in groups]
    assert failures[0] is failures[2] is None
    assert "`train` did not return within 0.8 s" in str(failures[1])
    rollouts.close()


def test_a_long_prompt_loses_the_beginning_of_its_last_question_and_nothing_else() -> None:
    messages = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "yes"}]
    task = Task("t", [*messages, {"role": "user", "content": "".join(f"word{i} " for i in range(80)) + "the end"}])
    chat = Chat(TOKENIZER, "be brief", " now")
    whole = chat.prompt_ids(task)
    limit = len(whole) - 50
    cut = chat.shortened_prompt_ids(task, limit)
    assert limit - 20 < len(cut) <= limit
    text = TOKENIZER.decode(cut)
    assert "be brief" in text
    assert "first" in text
    assert "the end now" in text
    assert "word0" not in text
    assert chat.shortened_prompt_ids(task, len(whole)).tolist() == whole.tolist()
    assert len(chat.shortened_prompt_ids(task, 3)) > 3, "the rest of the conversation is not cut"


def test_a_long_prompt_is_attempted_where_it_may_be_truncated() -> None:
    engine = say("one", "three")
    rollouts = make_rollouts(SomeTasks(LONG), engine, max_prompt_tokens=60, long_prompts="truncate")
    groups = collect(rollouts, 3, version=0)
    assert [group.task_id for group in groups] == ["task/0", "long", "task/2"]
    assert all(t.failure is None for group in groups for t in group.trajectories)
    assert len(engine.requests[1].prompt_ids) <= 60


@pytest.mark.parametrize(("wanted", "limit"), [(None, 91), (91, 91), (20, 20)])
def test_a_prompt_may_have_what_the_answer_leaves_or_less(wanted: int | None, limit: int) -> None:
    assert prompt_limit(settings_of(max_prompt_tokens=wanted), 100) == limit


@pytest.mark.parametrize(("wanted", "max_len", "key"), [(92, 100, "max_prompt_tokens"), (None, 9, "max_new_tokens")])
def test_lengths_that_cannot_be_are_refused_with_the_key(wanted: int | None, max_len: int, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)rollouts\.{key} = .*hint: lower it to"):
        prompt_limit(settings_of(max_prompt_tokens=wanted), max_len)


# ── chat ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def prompt_of(messages: list[dict[str, str]], system_prompt: str | None = None, suffix: str = "") -> str:
    return TOKENIZER.decode(Chat(TOKENIZER, system_prompt, suffix).prompt_ids(Task("t", messages)))


def test_a_conversation_is_rendered_with_the_models_template() -> None:
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2 + 2?"},
    ]
    assert prompt_of(messages) == TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt_of(messages).endswith("<|im_start|>assistant\n")


def test_the_suffix_ends_the_last_question_only() -> None:
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "reply"},
        {"role": "user", "content": "second"},
    ]
    prompt = prompt_of(messages, suffix=" Be brief.")
    assert "first<|im_end|>" in prompt
    assert "second Be brief.<|im_end|>" in prompt


def test_a_suffix_goes_to_the_question_even_where_the_answer_has_begun() -> None:
    prompt = prompt_of([{"role": "user", "content": "ask"}, {"role": "assistant", "content": "So,"}], suffix="!")
    assert "ask!<|im_end|>" in prompt
    assert "So,<|im_end|>" in prompt


def test_an_answer_begins_with_the_prefix_which_is_part_of_the_prompt_and_not_of_its_text() -> None:
    chat = Chat(TOKENIZER, None, " Be brief.", "It is")
    prompt = chat.prompt_ids(Task("t", [{"role": "user", "content": "1 + 2 ="}]))
    assert TOKENIZER.decode(prompt).endswith("1 + 2 = Be brief.<|im_end|>\n<|im_start|>assistant\nIt is")
    assert chat.texts([np.array([*ids(" 3"), END], dtype=np.int32)]) == [" 3"]


def test_the_system_prompt_comes_first() -> None:
    prompt = prompt_of([{"role": "user", "content": "ask"}], system_prompt="You count.")
    assert prompt.startswith("<|im_start|>system\nYou count.<|im_end|>\n<|im_start|>user\nask")


def test_rendering_leaves_the_task_as_it_was() -> None:
    task = Task("t", [{"role": "user", "content": "ask"}])
    chat = Chat(TOKENIZER, "system", " suffix")
    assert chat.prompt_ids(task).tolist() == chat.prompt_ids(task).tolist()
    assert task.messages == [{"role": "user", "content": "ask"}]


def test_prompt_ids_are_tokenised_once_with_special_tokens_as_one_id_each() -> None:
    prompt = Chat(TOKENIZER, None, "").prompt_ids(Task("t", [{"role": "user", "content": "a"}]))
    assert prompt.dtype == np.int32
    assert prompt.tolist() == [START, *ids("user\na"), END, *ids("\n"), START, *ids("assistant\n")]


class Backwards(PreTrainedTokenizerFast):
    """Encodes in a way of its own."""

    def encode(self, *arguments: Any, **options: Any) -> list[int]:
        return super().encode(*arguments, **options)[::-1]


QUESTIONS = ["one", "", "two  lines\n", "ends <|im_end|> here", "漢字 🙂", "one", "a \ud800 half", "x" * 300]


@pytest.mark.parametrize("left_out", ["", "<|im_end|>"])
@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, Backwards])
def test_prompts_that_are_encoded_together_are_those_that_are_encoded_alone(kind: type[Any], left_out: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.__class__ = kind
    chat = Chat(tokenizer, "count", " now", "It is")
    questions = [question for question in QUESTIONS if not left_out or left_out not in question]
    tasks = [Task("t", [{"role": "user", "content": question}]) for question in questions]
    together = chat.all_prompt_ids(tasks)
    assert [ids.tolist() for ids in together if ids is not None] == [chat.prompt_ids(task).tolist() for task in tasks]
    assert {ids.dtype for ids in together if ids is not None} == {np.dtype(np.int32)}


def test_a_prompt_that_cannot_be_rendered_leaves_those_beside_it_alone() -> None:
    chat = Chat(strict_tokenizer(), None, "")
    good, bad = (Task("t", [{"role": role, "content": "one"}]) for role in ("user", "nobody"))
    first, none, last = chat.all_prompt_ids([good, bad, good])
    assert none is None
    assert first is not None
    assert last is not None
    assert first.tolist() == last.tolist() == chat.prompt_ids(good).tolist()
    assert chat.all_prompt_ids([]) == []


def test_a_tokenizer_that_refuses_texts_together_is_given_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = PreTrainedTokenizerFast._encode_plus

    def one_by_one(self: Any, text: Any, **options: Any) -> Any:
        assert isinstance(text, str), "several"
        return encode(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", one_by_one)
    engine = say("one", "three")
    groups = collect(make_rollouts(FakeTasks(), engine), 3, version=0)
    assert all(t.failure is None for group in groups for t in group.trajectories)
    assert "question 2" in TOKENIZER.decode(engine.requests[2].prompt_ids)


def test_the_prompts_of_a_step_take_one_call_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    encode = PreTrainedTokenizerFast._encode_plus

    def counted(self: Any, text: Any, **options: Any) -> Any:
        calls.append(text)
        return encode(self, text, **options)

    rollouts = make_rollouts(FakeTasks(), say("one", "three"))
    collect(rollouts, 3, version=0)
    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", counted)
    collect(rollouts, 3, version=1)
    [together] = [texts for texts in calls if "question" in str(texts)]  # the engine encodes its answers too
    assert [f"question {i}" in text for i, text in enumerate(together, 3)] == [True] * 3


class OneList:
    """An environment that asks with the same list of messages every time."""

    asks_once = True

    def __init__(self, score: Any) -> None:
        self._messages: list[dict[str, str]] = []

    async def play(self, task: Task, policy: Any) -> float:
        self._messages[:] = [dict(message) for message in task.messages]
        self._messages[0]["content"] += "!"
        await policy.say(self._messages)
        return 1.0


def test_an_environment_may_use_its_list_of_messages_again() -> None:
    engine = say("one", "three")
    settings = settings_of()
    setup = RolloutSetup(FakeTasks(), OneList, Chat(TOKENIZER, None, ""), settings, (END,), 0, max_reward_workers=1)
    MADE.append(Dispatcher(EngineSession(engine), setup))
    collect(MADE[-1], 3, version=0)
    asked = [TOKENIZER.decode(request.prompt_ids) for request in engine.requests]
    assert [f"question {i}!" in text for i, text in enumerate(asked)] == [True] * 3


def test_texts_have_no_special_tokens() -> None:
    answers = [np.array([*ids("seven"), END], dtype=np.int32), np.array([END], dtype=np.int32)]
    assert Chat(TOKENIZER, None, "").texts(answers) == ["seven", ""]


class Shouting(PreTrainedTokenizerFast):
    """Says something else than what its ids say."""

    def _decode(self, *arguments: Any, **options: Any) -> str:
        return super()._decode(*arguments, **options).upper()


@pytest.mark.parametrize("kind", ["plain", "cleans up", "its own way"])
def test_texts_are_those_of_the_tokenizer_however_it_makes_them(kind: str) -> None:
    tokenizer = tiny_tokenizer()
    if kind == "cleans up":
        tokenizer.clean_up_tokenization_spaces = True
        tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    if kind == "its own way":
        tokenizer.__class__ = Shouting
    random = np.random.default_rng(0)
    answers = [random.integers(0, len(tokenizer), length).astype(np.int32) for length in range(40)]
    answers.append(np.array(tokenizer.encode("well , that 's it ."), dtype=np.int32))
    chat = Chat(tokenizer, None, "")
    assert chat.texts(answers) == tokenizer.batch_decode([ids.tolist() for ids in answers], skip_special_tokens=True)
    assert chat.texts(answers[-1:]) == [
        {"plain": "well , that 's it .", "cleans up": "well, that's it.", "its own way": "WELL , THAT 'S IT ."}[kind]
    ]
    assert chat.texts([]) == []


def test_a_tokenizer_without_a_chat_template_is_refused_with_a_hint() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TaskError, match="no chat template") as caught:
        Chat(tokenizer, None, "")
    assert "chat_template.jinja" in caught.value.hint


# ── several threads ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_several_threads_score_a_batch_as_one_does() -> None:
    names: set[str] = set()
    calls: list[str] = []

    def score(task: Task, text: str) -> dict[str, float]:
        names.add(threading.current_thread().name)
        calls.append(text)
        time.sleep(0.025 if len(calls) == 1 else 0.0)  # others help once one has waited
        eventually(lambda: len(calls) == 1 or len(names) == num_workers)
        if task.id == "task/4" and text == "two":
            raise ValueError("not this one")
        return {"length": len(text) + 1 / (1 + len(task.id)), "number": float(task.id.removeprefix("task/"))}

    def batch(workers: int) -> Sequence[TrajectoryGroup]:
        nonlocal num_workers
        num_workers = workers
        calls.clear()
        rollouts = make_rollouts(FakeTasks(scores=score), say("one", "two", "three"), workers=workers, group_size=3)
        groups = collect(rollouts, 6, 0)
        rollouts.close()
        return groups

    num_workers = 1
    alone, together = batch(1), batch(4)
    assert names == {"score", "score-2", "score-3", "score-4"}
    assert [group.index for group in together] == [group.index for group in alone] == list(range(6))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.advantages, other.advantages)
        for a, b in zip(one.trajectories, other.trajectories, strict=True):
            assert (a.text, a.reward, a.reward_parts, a.failure) == (b.text, b.reward, b.reward_parts, b.failure)
    failures = [t.failure for group in together for t in group.trajectories if t.failure]
    assert [failure.reason for failure in failures] == ["ValueError: not this one"]
