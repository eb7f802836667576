"""Tasks → requests for the engine, or the reason why there is none: a prompt that is too long, or that cannot be rendered."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from redline.config.sections.rollouts import RolloutsConfig
from redline.errors import ConfigError, TaskError, boundary
from redline.rollouts.chat import Chat
from redline.rollouts.user_code.failures import failure_of
from redline.types import Failure, FinishReason, GenerateRequest, SamplingParams, Task, Trajectory, VersionSpan


class Prompts:
    """Renders tasks, and keeps to the lengths that there is room for."""

    def __init__(
        self,
        chat: Chat,
        config: RolloutsConfig,
        limit: int | None = None,
        check: Callable[[GenerateRequest], None] = lambda request: None,
    ) -> None:
        """`limit`: tokens of a prompt, None for any number. `check` raises what the engine has against a request."""
        self._chat = chat
        self._truncates = config.long_prompts == "truncate"
        self._limit = limit
        self._check = check
        if config.max_prompt_tokens is not None:
            self._why = f"rollouts.max_prompt_tokens = {config.max_prompt_tokens}"
            self._hint = "leave the task out, or raise rollouts.max_prompt_tokens"
        else:
            self._why = f"rollouts.max_new_tokens = {config.max_new_tokens} leaves room for {limit}"
            self._hint = "leave the task out, or lower rollouts.max_new_tokens"
        self._sampling = SamplingParams(max_tokens=config.max_new_tokens, n=config.group_size)

    def request(self, task: Task, sampling: SamplingParams) -> GenerateRequest | Failure:
        with boundary() as caught:
            request = GenerateRequest(self.tokens(task), sampling)
            self._check(request)
        return request if caught.error is None else failure_of("prompt", caught.error)

    def refusal(self, task: Task) -> Failure | None:
        """Why no attempt at the task can be made; None where one can."""
        request = self.request(task, self._sampling)
        return request if isinstance(request, Failure) else None

    def tokens(self, task: Task) -> np.ndarray:
        """int32[tokens]. Raises TaskError where they are too many, and whatever the chat template has against the task."""
        if self._limit is None:
            return self._chat.prompt_ids(task)
        tokens = self._chat.shortened_prompt_ids(task, self._limit) if self._truncates else self._chat.prompt_ids(task)
        if len(tokens) > self._limit:
            cut = ", however much of its last user message is cut" if self._truncates else ""
            raise TaskError(f"a prompt of {len(tokens)} tokens, but {self._why}{cut}", self._hint)
        return tokens


def prompt_limit(config: RolloutsConfig, max_len: int) -> int:
    """Tokens that a prompt may have: `rollouts.max_prompt_tokens`, or what `max_new_tokens` leaves of the `max_len` that the
    engine takes."""
    room = max_len - config.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"rollouts.max_new_tokens = {config.max_new_tokens}: the engine takes {max_len} tokens, prompt included",
            f"lower it to less than {max_len}",
        )
    if config.max_prompt_tokens is not None and config.max_prompt_tokens > room:
        raise ConfigError(
            f"rollouts.max_prompt_tokens = {config.max_prompt_tokens}: the engine takes {max_len} tokens, and"
            f" rollouts.max_new_tokens = {config.max_new_tokens} leaves {room}",
            f"lower it to {room}, or leave it out",
        )
    return config.max_prompt_tokens or room


def failed_attempts(failure: Failure, count: int, version: int) -> list[Trajectory]:
    """Attempts at a task for which the engine was not asked, at a time when the policy was at `version`."""
    attempt = Trajectory(
        token_ids=np.zeros(1, dtype=np.int32),
        loss_mask=np.zeros(1, dtype=np.bool_),
        logprobs=np.zeros(1, dtype=np.float32),
        versions=VersionSpan(version, version),
        finish_reason=FinishReason.ABORT,
        text="",
        failure=failure,
    )
    return [attempt] * count
