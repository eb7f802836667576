"""Attempts that are played with a policy that is a function."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.eventually import eventually

from redline.environments.driver import Asked, Driver, Reply
from redline.environments.speakers import AnsweringSpeaker, RandomSpeaker, ScriptedSpeaker
from redline.types import Task

TASK = Task("sum", [{"role": "user", "content": "What is 1 + 2?"}], answer="3")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": [1, 2]}},
            "required": ["a", "b"],
        },
    },
}


class Again:
    """Asks until the answer is right, three times at most."""

    async def play(self, task, policy):
        messages = list(task.messages)
        for left in (2, 1, 0):
            turn = await policy.say(messages, stop=["\n"])
            if turn.text == task.answer:
                return {"correct": 1.0, "left": float(left)}
            messages += [turn.message, {"role": "user", "content": "No. Again:"}]
        return {"correct": 0.0, "left": 0.0}


class TwoPlayers:
    async def play(self, task, policy):
        first, second = await asyncio.gather(policy.say(task.messages, role="a"), policy.say(task.messages, role="b"))
        return {"a": float(first.text), "b": float(second.text)}


class NotAsync:
    def play(self, task, policy):
        return policy.say(task.messages).text == task.answer


class Hangs:
    def __init__(self, how: str, seconds: float = 0.5) -> None:
        self._how, self._seconds = how, seconds

    async def play(self, task, policy):
        if self._how == "awaits":
            await asyncio.Event().wait()
        time.sleep(self._seconds)
        return 1.0


def test_an_attempt_goes_on_until_the_environment_has_a_score() -> None:
    episode = Driver(Again()).play(TASK, ScriptedSpeaker(["1", "2", "3"]), limit_s=300)
    assert (episode.score, episode.error) == ({"correct": 1.0, "left": 0.0}, None)
    assert [len(exchange.asked.messages) for exchange in episode.exchanges] == [1, 3, 5]
    assert episode.exchanges[1].asked.messages[1] is episode.exchanges[0].turn.message
    assert episode.exchanges[0].asked.stop == ("\n",)
    assert episode.seconds >= episode.end_s >= 0


def test_roles_speak_side_by_side() -> None:
    episode = Driver(TwoPlayers()).play(TASK, lambda asked: Reply({"a": "1", "b": "2"}[asked.role]), limit_s=300)
    assert (episode.roles, episode.score) == (("a", "b"), {"a": 1.0, "b": 2.0})


def test_an_environment_that_is_not_async_is_played_in_a_thread() -> None:
    assert Driver(NotAsync()).play(TASK, AnsweringSpeaker(TASK), limit_s=300).score is True


def test_a_policy_may_be_async() -> None:
    async def speak(asked: Asked) -> Reply:
        await asyncio.sleep(0.001)
        return Reply("3")

    assert Driver(Again()).play(TASK, speak, limit_s=300).score["correct"] == 1.0


@pytest.mark.parametrize("how", ["awaits", "blocks"])
def test_what_does_not_end_in_time_is_left_behind_and_the_next_attempt_is_played(how: str) -> None:
    environment = Hangs(how, seconds=60)
    driver = Driver(environment)
    episode = driver.play(TASK, AnsweringSpeaker(TASK), limit_s=0.1)
    assert "did not end within 0.1 s" in str(episode.error)
    driver._environment = Again()
    assert driver.play(TASK, AnsweringSpeaker(TASK), limit_s=300).score["correct"] == 1.0


def test_what_an_environment_raises_is_the_error_of_its_attempt() -> None:
    class Broken:
        async def play(self, task, policy):
            await policy.say(task.messages)
            raise SystemExit(3)

    episode = Driver(Broken()).play(TASK, AnsweringSpeaker(TASK), limit_s=300)
    assert "SystemExit: 3" in str(episode.error)
    assert len(episode.exchanges) == 1


def test_arguments_of_say_are_checked_as_in_a_run() -> None:
    class Numbers:
        async def play(self, task, policy):
            await policy.say(task.messages, role=5)

    episode = Driver(Numbers()).play(TASK, AnsweringSpeaker(TASK), limit_s=300)
    assert "`policy.say` was given role = 5" in str(episode.error)
    assert episode.exchanges == []


@pytest.mark.parametrize("is_async", [True, False])
def test_an_attempt_that_ends_as_a_generator_does_is_an_error_of_that_attempt(is_async: bool) -> None:
    class Closes:
        async def play(self, task, policy):
            raise GeneratorExit

    class ClosesInAThread:
        def play(self, task, policy):
            raise GeneratorExit

    episode = Driver(Closes() if is_async else ClosesInAThread()).play(TASK, AnsweringSpeaker(TASK), limit_s=300)
    assert "GeneratorExit" in str(episode.error)


def test_a_reply_ends_where_the_environment_says() -> None:
    class Brief:
        async def play(self, task, policy):
            return (await policy.say(task.messages, until=lambda reply: "b" in reply.text)).text

    driver = Driver(Brief())
    assert [driver.play(TASK, ScriptedSpeaker([text]), 300.0).score for text in ("aabba", "aa")] == ["aab", "aa"]
    driver.close()


def test_a_driver_that_is_closed_leaves_no_loop_open() -> None:
    loops = []

    class Here(Again):
        async def play(self, task, policy):
            loops.append(asyncio.get_running_loop())
            return await super().play(task, policy)

    driver = Driver(Here())
    driver.play(TASK, AnsweringSpeaker(TASK), limit_s=300)
    driver.close()
    eventually(loops[0].is_closed, "it is open still")


def test_many_attempts_are_under_way_at_once() -> None:
    class Waits:
        """Waits until all of them do."""

        num_waiting = 0

        async def play(self, task, policy):
            self.num_waiting += 1
            while self.num_waiting < 200:
                await asyncio.sleep(0.01)
            return 1.0

    episodes = Driver(Waits()).play_all([(TASK, AnsweringSpeaker(TASK))] * 200, limit_s=300)
    assert [episode.score for episode in episodes] == [1.0] * 200


def test_a_driver_knows_how_long_an_attempt_kept_the_loop_from_others() -> None:
    driver = Driver(Hangs("blocks"))
    driver.play(TASK, AnsweringSpeaker(TASK), limit_s=300)
    driver.play(TASK, AnsweringSpeaker(TASK), limit_s=300)
    assert driver.longest_hold_s >= 0.4


def test_the_random_policy_says_the_same_again_and_calls_tools_as_their_schemas_allow() -> None:
    def said(seed: str) -> list[Reply]:
        speaker = RandomSpeaker(seed)
        return [speaker(Asked(TASK.messages, tools=[ADD])) for _ in range(50)]

    assert said("1") == said("1") != said("2")
    calls = [call for reply in said("1") for call in reply.tool_calls]
    assert len(calls) > 20
    assert all(call.name == "add" and isinstance(call.arguments["a"], int) for call in calls)
    assert {call.arguments["b"] for call in calls} == {1, 2}
