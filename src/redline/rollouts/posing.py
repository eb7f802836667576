"""Tasks → attempts that have asked the policy → requests to the engine, or the reason why there are none."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from redline.errors import boundary
from redline.ports import Environment
from redline.rollouts.lengths import Order
from redline.rollouts.play import Attempt, GroupPlay, SharedRequest
from redline.rollouts.prompts import Prompts
from redline.rollouts.setup import RolloutSetup
from redline.rollouts.user_code.failures import failure_of
from redline.types import Failure, GenerateRequest, Message, SamplingParams, Task, plain_copy


@dataclass(slots=True, frozen=True)
class Refused:
    """A task for which the engine is not asked."""

    index: int
    task: Task
    failure: Failure
    began: float
    """On `time.perf_counter`."""


@dataclass(slots=True, frozen=True)
class _Begun:
    """The attempts at a task, each of which has asked the policy."""

    attempts: Sequence[Attempt]
    asked: Sequence[tuple[Task, SamplingParams]]
    """What they ask, each once."""
    askers: Sequence[Sequence[int]]
    """Which of the attempts ask it."""


class Posing:
    """Begins the attempts at tasks."""

    def __init__(self, environment: Environment, setup: RolloutSetup) -> None:
        self._environment = environment
        self._prompts = Prompts(setup.chat, setup.config, setup.max_prompt_tokens, setup.check_request)
        self._max_new_tokens = setup.config.max_new_tokens
        self._stop_token_ids, self._seed = setup.stop_token_ids, setup.seed

    def pose(
        self, tasks: Sequence[Task], indices: Sequence[int], orders: Sequence[Order], n: int, temperature: float, began: float
    ) -> list[GroupPlay | Refused]:
        """Begin n attempts at each task. The indices choose their randomness, the orders when they begin."""
        begun = [self._begun(task, index, n, temperature) for task, index in zip(tasks, indices, strict=True)]
        asked = [ask for group in begun if isinstance(group, _Begun) for ask in group.asked]
        requests = iter(self._prompts.requests(asked))
        posed: list[GroupPlay | Refused] = []
        for task, index, order, group in zip(tasks, indices, orders, begun, strict=True):
            if isinstance(group, Failure):
                posed.append(Refused(index, task, group, began))
                continue
            shared = _shared([next(requests) for _ in group.asked], group, task, order)
            if isinstance(shared, Failure):
                posed.append(Refused(index, task, shared, began))
            else:
                posed.append(GroupPlay(index, task, group.attempts, shared, began))
        return posed

    def _begun(self, task: Task, index: int, n: int, temperature: float) -> _Begun | Failure:
        """One request for all attempts that ask the same: their prompt is computed once."""
        with boundary() as caught:
            attempts = [Attempt(self._environment, task) for _ in range(n)]
            asked: list[tuple[Task, SamplingParams]] = []
            askers: list[list[int]] = []
            for place, (messages, own) in enumerate(_same([attempt.asked for attempt in attempts])):
                asked.append(
                    (replace(task, messages=plain_copy(messages)), self._sampling(index, place, len(own), temperature))
                )
                askers.append(own)
        return _Begun(attempts, asked, askers) if caught.error is None else failure_of("task", caught.error)

    def _sampling(self, index: int, place: int, n: int, temperature: float) -> SamplingParams:
        seed = (self._seed << 32) + index
        return SamplingParams(
            max_tokens=self._max_new_tokens,
            n=n,
            temperature=temperature,
            stop_token_ids=self._stop_token_ids,
            seed=seed if place == 0 else _another_seed(seed, place),
        )


def _shared(
    requests: Sequence[GenerateRequest | Failure], group: _Begun, task: Task, order: Order
) -> list[SharedRequest] | Failure:
    """The requests with who asks them; the first failure where there is one."""
    shared: list[SharedRequest] = []
    for request, askers in zip(requests, group.askers, strict=True):
        if isinstance(request, Failure):
            return request
        shared.append(SharedRequest(replace(request, order=order, task=task.id), askers))
    return shared


def _same(asked: Sequence[Sequence[Message]]) -> list[tuple[Sequence[Message], list[int]]]:
    """What was asked, each once, and by which attempts."""
    found: list[tuple[Sequence[Message], list[int]]] = []
    for attempt, messages in enumerate(asked):
        for known, attempts in found:
            if known is messages or known == messages:
                attempts.append(attempt)
                break
        else:
            found.append((messages, [attempt]))
    return found


def _another_seed(seed: int, place: int) -> int:
    """All 63 bits are taken by the run and the task already, so the place of the request is hashed in."""
    digest = hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
