"""Tasks → requests for the engine, or the reason why there is none: a prompt that is too long, or that cannot be rendered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    def requests(self, asked: Sequence[tuple[Task, SamplingParams]]) -> list[GenerateRequest | Failure]:
        """`request` of each. The prompts of many are encoded together."""
        whole: Sequence[np.ndarray | None] = [None] * len(asked)
        if len(asked) > 1 and not self._truncates:
            whole = self._chat.all_prompt_ids([task for task, _ in asked])
        return [self.request(task, sampling, ids) for (task, sampling), ids in zip(asked, whole, strict=True)]

    def request(self, task: Task, sampling: SamplingParams, prompt_ids: np.ndarray | None = None) -> GenerateRequest | Failure:
        """`prompt_ids`: its whole prompt, where that is encoded already."""
        with boundary() as caught:
            request = GenerateRequest(self.tokens(task, prompt_ids), sampling)
            self._check(request)
        return request if caught.error is None else failure_of("prompt", caught.error)

    def refusal(self, task: Task) -> Failure | None:
        """Why no attempt at the task can be made; None where one can."""
        request = self.request(task, self._sampling)
        return request if isinstance(request, Failure) else None

    def tokens(self, task: Task, prompt_ids: np.ndarray | None = None) -> np.ndarray:
        """int32[tokens]. Raises TaskError where they are too many, and whatever the chat template has against the task.
        `prompt_ids` as in `request`."""
        if self._limit is not None and self._truncates:
            tokens = self._chat.shortened_prompt_ids(task, self._limit)
        else:
            tokens = self._chat.prompt_ids(task) if prompt_ids is None else prompt_ids
        if self._limit is not None and len(tokens) > self._limit:
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
