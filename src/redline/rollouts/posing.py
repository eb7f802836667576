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
from redline.types import Failure, Message, SamplingParams, Task


@dataclass(slots=True, frozen=True)
class Refused:
    """A task for which the engine is not asked."""

    index: int
    task: Task
    failure: Failure
    began: float
    """On `time.perf_counter`."""


class Posing:
    """Begins the attempts at tasks."""

    def __init__(self, environment: Environment, setup: RolloutSetup) -> None:
        self._environment = environment
        self._prompts = Prompts(setup.chat, setup.config, setup.max_prompt_tokens, setup.check_request)
        self._max_new_tokens = setup.config.max_new_tokens
        self._stop_token_ids, self._seed = setup.stop_token_ids, setup.seed

    def pose(
        self, task: Task, index: int, n: int, temperature: float, began: float, order: Order = (0, 0.0)
    ) -> GroupPlay | Refused:
        """Begin n attempts at a task. The index chooses their randomness, the order when they begin."""
        sampling = SamplingParams(
            max_tokens=self._max_new_tokens,
            n=n,
            temperature=temperature,
            stop_token_ids=self._stop_token_ids,
            seed=(self._seed << 32) + index,
        )
        requests: Sequence[SharedRequest] | Failure = ()
        with boundary() as caught:
            attempts = [Attempt(self._environment, task) for _ in range(n)]
            requests = self._requests(task, [attempt.asked for attempt in attempts], sampling, order)
        if caught.error is not None:
            requests = failure_of("task", caught.error)
        if isinstance(requests, Failure):
            return Refused(index, task, requests, began)
        return GroupPlay(index, task, attempts, requests, began)

    def _requests(
        self, task: Task, asked: Sequence[Sequence[Message]], sampling: SamplingParams, order: Order
    ) -> list[SharedRequest] | Failure:
        """One request for all attempts that ask the same: their prompt is computed once."""
        requests: list[SharedRequest] = []
        for place, (messages, attempts) in enumerate(_same(asked)):
            posed = task if messages is task.messages else replace(task, messages=messages)
            seed = sampling.seed if place == 0 else _another_seed(sampling.seed, place)
            request = self._prompts.request(posed, replace(sampling, n=len(attempts), seed=seed))
            if isinstance(request, Failure):
                return request
            requests.append(SharedRequest(replace(request, order=order, task=task.id), attempts))
        return requests


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
