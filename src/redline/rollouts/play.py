"""Attempts under way: each is a coroutine of an environment, which rests while the engine samples what the policy says.

    Attempt ──► environment.play ──► policy.say ──► Ask ┄┄ the engine ┄┄ Turn ──► end ──► its score

The coroutines have no event loop. Making an `Attempt` runs its coroutine up to the point where it asks the policy, and `end`
from there to its score, each in the calling thread: the pipeline decides in which thread an environment's code runs.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from redline.errors import TaskError
from redline.ports import Environment, Score
from redline.types import Completion, GenerateRequest, Message, Task, Turn, Until


class Ask:
    """What an environment waits for: the policy's reply to these messages."""

    __slots__ = ("messages",)

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages

    def __await__(self) -> Generator[Ask, Turn, Turn]:
        return (yield self)


class AskedPolicy:
    """The policy as environments see it; the pipeline answers. Implements `ports.Policy`."""

    async def say(
        self,
        messages: Sequence[Message],
        *,
        role: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        until: Until | None = None,
    ) -> Turn:
        given = {"role": role, "tools": tools, "stop": stop, "max_tokens": max_tokens is not None, "until": until is not None}
        if any(given.values()):
            names = ", ".join(f"`{name}`" for name, is_given in given.items() if is_given)
            raise TaskError(
                f"`policy.say` was given {names} in an environment that asks once", "leave out that, or its `asks_once`"
            )
        return await Ask(messages)


POLICY = AskedPolicy()


def asks_once(environment: Environment) -> bool:
    """Whether `play` awaits `policy.say` once and nothing else: such an environment says so, and needs no event loop."""
    return bool(getattr(environment, "asks_once", False))


class Attempt:
    """One try at a task."""

    __slots__ = ("_play", "asked")

    def __init__(self, environment: Environment, task: Task) -> None:
        """Run the environment, with a copy of the task, until it asks the policy. Raises what the environment raises."""
        self._play = environment.play(task.own_copy(), POLICY)
        try:
            ask = self._play.send(None)
        except StopIteration:
            raise TaskError("the environment ended before it asked the policy", "let `play` await `policy.say`") from None
        self.asked = _messages_of(ask)
        """The messages that the policy is to reply to."""

    def end(self, turn: Turn) -> Score:
        """Give the environment the policy's reply and run it to its end. Returns the score; raises what it raises."""
        try:
            self._play.send(turn)
        except StopIteration as end:
            score: Score = end.value
            return score
        raise TaskError("the environment asked the policy a second time", "let `play` await `policy.say` once")


def _messages_of(ask: object) -> Sequence[Message]:
    if not isinstance(ask, Ask):
        raise TaskError(f"the environment awaited a {type(ask).__name__}", "let `play` await `policy.say` and nothing else")
    return ask.messages


@dataclass(slots=True, frozen=True)
class SharedRequest:
    """One request to the engine for all attempts of a group that ask the same."""

    request: GenerateRequest
    attempts: Sequence[int]
    """Which of the group's attempts its completions are for, in their order."""


@dataclass(slots=True, eq=False)
class GroupPlay:
    """The attempts at one task, under way."""

    index: int
    task: Task
    attempts: Sequence[Attempt]
    requests: Sequence[SharedRequest]
    began: float
    """On `time.perf_counter`."""
    expected_tokens: float | None = None
    """As `TrajectoryGroup.expected_tokens`."""
    numbers: dict[int, SharedRequest] = field(default_factory=dict)
    """The session's number of each request."""
    completions: dict[int, SampledAttempt] = field(default_factory=dict)
    """By attempt, as they come."""
    is_wanted: bool = True
    """False once the group is cancelled: what is left of its rewards is not computed."""

    @property
    def is_sampled(self) -> bool:
        return len(self.completions) == len(self.attempts)

    def take(self, number: int, position: int, completion: Completion) -> SampledAttempt:
        """The completion of a request at a position is there: which attempt has been waiting for it."""
        shared = self.numbers[number]
        place = shared.attempts[position]
        sampled = self.completions[place] = SampledAttempt(self, place, self.attempts[place], shared.request, completion)
        return sampled

    def sampled(self) -> list[SampledAttempt]:
        """The attempts in order, once each has its completion."""
        return [self.completions[number] for number in range(len(self.attempts))]


class SampledAttempt(NamedTuple):
    """An attempt for which the engine has sampled a reply."""

    play: GroupPlay
    number: int
    """Which of the group's attempts it is."""
    attempt: Attempt
    request: GenerateRequest
    completion: Completion
