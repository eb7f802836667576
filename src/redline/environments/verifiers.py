"""Any environment of the `verifiers` package, as it is: its own code asks, answers, calls tools and scores.

    play ──► env.rollout(row, client) ──► client.get_response(messages, tools) ──► policy.say
                     │                            what the policy said ◄───────────────┘
                     ▼
             rubric.score_rollout(state) ──► the weighted parts of its reward

`rollouts.environment: {name: verifiers, params: {env: gsm8k, args: {...}}}`. An environment is a module with a function
`load_environment`, installed or in `folder`, or `module:function`. It brings its own tasks.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any

from verifiers.clients import Client
from verifiers.envs import environment as verifiers_environment
from verifiers.types import Response, ResponseMessage, ToolCall, Usage

from redline.errors import RedlineError, TaskError, boundary
from redline.ports import Policy
from redline.types import FinishReason, Message, Task, Turn

MODEL = "redline"
"""What an environment is told that the model is called."""


class Verifiers:
    """Plays one environment of `verifiers`. Implements `ports.Environment`, and brings its tasks."""

    def __init__(
        self,
        seed: int,
        env: str,
        args: Mapping[str, Any] | None = None,
        folder: str = ".",
        held_out_fraction: float = 0.1,
    ) -> None:
        """`env` names the environment, `args` are what its `load_environment` takes. `held_out_fraction` is the share of its
        rows that is kept for evaluation where it brings no rows for that."""
        self.env = _load(env, dict(args or {}), Path(folder).absolute())
        if self.env.requires_group_rollouts:
            raise TaskError(
                f"verifiers environment {env}: its rubric scores whole groups, and an attempt is scored by itself here",
                "take its group rewards out, and see rollouts.advantages",
            )
        self._name, self._seed = env.partition(":")[0], seed
        self._split(held_out_fraction)
        self._epoch = lru_cache(maxsize=2)(self._shuffled)
        _keep_errors()

    def _split(self, fraction: float) -> None:
        """Decide which rows are trained on. A question that is held out is not, however often it comes."""
        self._rows = self._held_out_rows = self.env.get_dataset()
        hashes = [_hash(prompt) for prompt in self._rows["prompt"]]
        if self.env.eval_dataset is not None or self.env.eval_dataset_source is not None:
            self._held_out_rows = self.env.get_eval_dataset()
            kept_out = list(dict.fromkeys(_hash(prompt) for prompt in self._held_out_rows["prompt"]))
            first = {hash_: row for row, hash_ in reversed(list(enumerate(map(_hash, self._held_out_rows["prompt"]))))}
        else:
            first = {hash_: row for row, hash_ in reversed(list(enumerate(hashes)))}
            kept_out = sorted(first)[: min(max(int(fraction * len(first)), 1), len(first) - 1)]
        self._held_out = [first[hash_] for hash_ in kept_out]
        self._train = [row for row, hash_ in enumerate(hashes) if hash_ not in set(kept_out)] if kept_out else []
        if not self._train:
            raise TaskError(
                f"verifiers environment {self._name}: {len(hashes)} row(s) leave none to train on beside the held-out ones",
                "give it more rows with args",
            )

    def train(self, index: int) -> Task:
        """Every row once in each epoch, in an order of the epoch's own."""
        epoch, position = divmod(index, len(self._train))
        row = self._train[self._epoch(epoch)[position]]
        return self._task(f"{self._name}/{row}", self._rows[row])

    def held_out(self, count: int) -> list[Task]:
        return [self._task(f"{self._name}/held_out/{row}", self._held_out_rows[row]) for row in self._held_out[:count]]

    async def play(self, task: Task, policy: Policy) -> Mapping[str, float]:
        """The environment's own rollout and rubric. Returns the parts of its reward, each with its weight in it."""
        errors: list[str] = []
        _ERRORS.set(errors)
        state = await self.env.rollout(dict(task.data), PolicyClient(policy), MODEL, {})
        if state["error"] is not None:
            raise state["error"]
        await self.env.rubric.score_rollout(state)
        await self.env.rubric.cleanup(state)
        if errors:  # verifiers logs what a reward function raises, and scores 0
            raise TaskError(errors[0], "look at that function of the environment")
        return self._parts(state)

    def _parts(self, state: Mapping[str, Any]) -> dict[str, float]:
        """The functions of the rubric that have a weight; the whole as one part where they do not add up to it."""
        rubric, reward, metrics = self.env.rubric, float(state["reward"]), state["metrics"] or {}
        weights = zip(rubric._get_reward_func_names(), rubric._get_reward_weights(), strict=True)
        parts = {name: weight * float(metrics[name]) for name, weight in weights if weight and name in metrics}
        return parts if parts and abs(sum(parts.values()) - reward) < 1e-6 else {"reward": reward}

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    def _task(self, task_id: str, row: Mapping[str, Any]) -> Task:
        messages = [_message(message) for message in row["prompt"]]
        return Task(task_id, messages, str(row.get("answer") or ""), dict(row))


# ── the policy, as the environment sees it ─────────────────────────────────────────────────────────────────────────────


class PolicyClient(Client):
    """A client of `verifiers` whose model is the policy of one attempt."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._num_replies = 0

    async def get_response(
        self,
        prompt: Sequence[Any],
        model: str,
        sampling_args: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Response:
        """The policy's reply. What `say` raises goes through: it is not the environment's to handle."""
        stop = sampling_args.get("stop") or ()
        turn = await self.client.say(
            [_message(message) for message in prompt],
            tools=[_tool(tool) for tool in tools or ()],
            stop=[stop] if isinstance(stop, str) else list(stop),
            max_tokens=sampling_args.get("max_completion_tokens") or sampling_args.get("max_tokens"),
        )
        self._num_replies += 1
        return self._response(turn, model)

    def _response(self, turn: Turn, model: str) -> Response:
        calls = [
            ToolCall(id=call.get("id") or f"call_{self._num_replies}_{index}", name=name, arguments=arguments)
            for index, call in enumerate(turn.message.get("tool_calls") or ())
            for name, arguments in [_call(call["function"])]
        ]
        cut = turn.finish_reason is FinishReason.LENGTH
        message = ResponseMessage(
            content=turn.message.get("content"),
            reasoning_content=turn.message.get("reasoning_content"),
            tool_calls=calls or None,
            finish_reason="length" if cut else "tool_calls" if calls else "stop",
            is_truncated=cut,
            said=dict(turn.message),  # kept by verifiers, and found again in the next prompt
        )
        usage = Usage(prompt_tokens=turn.start, reasoning_tokens=0, completion_tokens=turn.num_tokens, total_tokens=turn.end)
        return Response(id=f"reply-{self._num_replies}", created=0, model=model, usage=usage, message=message)

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        """There is nothing to close."""

    to_native_tool = to_native_prompt = get_native_response = setup_client  # the package wants them; never called
    raise_from_native_response = from_native_response = setup_client


def _message(message: Any) -> Message:
    """A message of `verifiers`, or of its data set, as a policy takes it."""
    if said := message.get("said"):
        return dict(said)
    ours: dict[str, Any] = {"role": message["role"], "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        ours["tool_calls"] = [_our_call(call) for call in calls]
    if call_id := message.get("tool_call_id"):
        ours["tool_call_id"] = call_id
    return ours


def _text(content: Any) -> str:
    """The text of a message's content, which may lie in several parts."""
    if content is None or isinstance(content, str):
        return content or ""
    odd = next((part for part in content if part.get("text") is None), None)
    if odd is not None:
        raise TaskError(
            f"a message has a part of type {odd.get('type')!r}; the policy reads text alone", "choose another environment"
        )
    return "".join(part["text"] for part in content)


def _our_call(call: Any) -> dict[str, Any]:
    function = call.get("function") or call
    return {
        "type": "function",
        "id": call.get("id"),
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }


def _call(function: Mapping[str, Any]) -> tuple[str, str]:
    """Name and arguments, the latter as JSON text."""
    arguments = function["arguments"]
    return function["name"], arguments if isinstance(arguments, str) else json.dumps(dict(arguments))


def _tool(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


# ── loading ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _load(env: str, args: dict[str, Any], folder: Path) -> Any:
    """The environment, made by its own function."""
    name, _, function = env.partition(":")
    module = name.replace("-", "_").rpartition("/")[2]
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    environment: Any = None
    with boundary() as caught:
        load: Callable[..., Any] = getattr(importlib.import_module(module), function or "load_environment")
        environment = load(**args)
    if (error := caught.error) is None:
        return environment
    if isinstance(error, RedlineError):
        raise error
    if isinstance(error, ModuleNotFoundError) and error.name == module:
        hint = f"install its package, or put {module}.py into {folder}"
    else:
        hint = f"`python -c 'import {module}; {module}.{function or 'load_environment'}(...)'` must work"
    raise TaskError(f"verifiers environment {env}: {type(error).__name__}: {error}", hint) from error


class _NoSignals:
    """What verifiers gets for the module `signal`: its environments set handlers for Ctrl-C and SIGTERM that end the process. A
    run has its own, which save it; and in any thread but the main one there would be an error."""

    SIGINT, SIGTERM = signal.SIGINT, signal.SIGTERM
    default_int_handler = staticmethod(signal.default_int_handler)

    @staticmethod
    def signal(number: int, handler: object) -> None:
        """Leave the handler as it is."""


vars(verifiers_environment)["signal"] = _NoSignals


def _hash(prompt: Any) -> int:
    text = json.dumps([_message(message) for message in prompt], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


# ── what verifiers only logs ───────────────────────────────────────────────────────────────────────────────────────────

_ERRORS: ContextVar[list[str] | None] = ContextVar("errors of this attempt's reward functions", default=None)


class _ErrorsOfRewards(logging.Handler):
    """Notes in the attempt that logs it what a reward function raised."""

    def emit(self, record: logging.LogRecord) -> None:
        errors = _ERRORS.get()
        if errors is not None and "reward function" in (text := record.getMessage()):
            errors.append(text)


def _keep_errors() -> None:
    logger = logging.getLogger("verifiers")
    if not any(isinstance(handler, _ErrorsOfRewards) for handler in logger.handlers):
        logger.addHandler(_ErrorsOfRewards(logging.ERROR))
