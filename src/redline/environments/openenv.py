"""Environments of OpenEnv (`openenv-core`), as they are: reset and step, with a reply of the policy as the action.

    openenv          the environment's class, in this process: a `ports.Game`, a new one for each attempt
    openenv_server   an environment that runs as a server, over its WebSocket: a `ports.Environment`, one session per attempt

An action with one text field takes the whole reply; any other takes a JSON object in it. A reply that is no action is answered
with the reason, and the attempt goes on. The policy sees an observation's only text, or the observation as JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import json
import sys
import typing
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from openenv.core.env_server.interfaces import Environment as OpenEnvironment
from openenv.core.env_server.serialization import serialize_observation
from openenv.core.env_server.types import Action
from openenv.core.generic_client import GenericEnvClient
from pydantic import ValidationError
from websockets.exceptions import ConnectionClosed

from redline.errors import RedlineError, TaskError, boundary
from redline.ports import Policy
from redline.types import Message, Reaction, Task

HELD_OUT_SEEDS = 2**20
"""Seeds below are for evaluation, those from here on for training."""
CONNECT_TIMEOUT_S = 10.0
OWN_FIELDS = ("metadata", "done", "reward")
"""Fields that every action or observation has."""


class NoActionError(Exception):
    """A reply of the policy is no action; says why, to the policy."""


class Words:
    """How a reply becomes an action, and an observation a text."""

    def __init__(self, schema: Mapping[str, Any], action_field: str | None, observation_field: str | None) -> None:
        """`schema` is the JSON schema of an action."""
        self._fields = {name: field for name, field in schema.get("properties", {}).items() if name not in OWN_FIELDS}
        required = [name for name in schema.get("required", ()) if name in self._fields] or list(self._fields)
        if action_field is not None and action_field not in self._fields:
            raise TaskError(
                f"action_field = {action_field!r}: an action has no such field", f"one of {', '.join(self._fields)}"
            )
        is_one_text = len(required) == 1 and self._fields[required[0]].get("type") == "string"
        self._action_field = action_field or (required[0] if is_one_text else None)
        self._observation_field = observation_field

    def action(self, reply: str) -> dict[str, Any]:
        """The action that a reply is. Raises NoActionError."""
        if self._action_field is not None:
            return {self._action_field: reply}
        begin, end = reply.find("{"), reply.rfind("}")
        with suppress(ValueError):
            found = json.loads(reply[begin : end + 1])
            if isinstance(found, dict):
                return found
        raise NoActionError(f"your reply has no JSON object with {', '.join(self._fields)}")

    def seen(self, observation: Mapping[str, Any]) -> str:
        """What the policy sees."""
        if self._observation_field is not None:
            if self._observation_field not in observation:
                fields = ", ".join(observation)
                raise TaskError(f"observation_field = {self._observation_field!r}: no such field", f"one of {fields}")
            value = observation[self._observation_field]
            return value if isinstance(value, str) else json.dumps(value)
        shown = {
            name: value for name, value in observation.items() if name not in OWN_FIELDS and value not in (None, "", [], {})
        }
        texts = [value for value in shown.values() if isinstance(value, str)]
        return texts[0] if len(texts) == len(shown) == 1 else json.dumps(shown, ensure_ascii=False)


class Episodes:
    """Tasks that differ by the seed of the environment's `reset`, and what the two kinds of environments share."""

    def __init__(self, name: str, seed: int, instructions: str, max_steps: int) -> None:
        self._name, self._seed, self._max_steps = name, seed, max_steps
        self._instructions = instructions

    def train(self, index: int) -> Task:
        digest = hashlib.blake2b(f"{self._seed}/{index}".encode(), digest_size=8).digest()
        return self._task(f"{self._name}/{index}", HELD_OUT_SEEDS + int.from_bytes(digest, "big") % 2**30)

    def held_out(self, count: int) -> list[Task]:
        return [self._task(f"{self._name}/held_out/{seed}", seed) for seed in range(min(count, HELD_OUT_SEEDS))]

    def _task(self, task_id: str, seed: int) -> Task:
        return Task(task_id, self._first(""), "", {"seed": seed})

    def _first(self, seen: str) -> list[Message]:
        """The first message: what the recipe says, then what the environment shows."""
        return [{"role": "user", "content": "\n\n".join(filter(None, [self._instructions, seen])) or self._name}]


class OpenEnvGame(Episodes):
    """An OpenEnv environment in this process. Implements `ports.Game`."""

    def __init__(
        self,
        seed: int,
        environment: str,
        params: Mapping[str, Any] | None = None,
        folder: str = ".",
        instructions: str = "",
        max_steps: int = 16,
        action_field: str | None = None,
        observation_field: str | None = None,
    ) -> None:
        """`environment` is `package.module:Class`, looked for in `folder` too; `params` are its arguments. An attempt ends when
        the environment is done, or after `max_steps`."""
        super().__init__(environment.rpartition(":")[2], seed, instructions, max_steps)
        self._class, self._params = _environment_class(environment, Path(folder).absolute()), dict(params or {})
        self._action = _action_class(self._class)
        self._words = Words(self._action.model_json_schema(), action_field, observation_field)
        self._playing: Any = None
        self._steps = 0

    def reset(self, task: Task) -> list[Message]:
        self._playing, self._steps = self._class(**self._params), 0
        return self._first(self._words.seen(_fields(_call(self._playing.reset, seed=task.data["seed"]))["observation"]))

    def step(self, reply: str) -> Reaction:
        self._steps += 1
        try:
            action = self._action.model_validate(self._words.action(reply))
        except (NoActionError, ValidationError) as error:
            return self._ended(Reaction(_no_action(error)))
        result = _fields(self._playing.step(action))
        seen = self._words.seen(result["observation"])
        return self._ended(Reaction(seen, float(result["reward"] or 0.0), bool(result["done"])))

    def _ended(self, reaction: Reaction) -> Reaction:
        """The reaction, with the end of the attempt where its steps are used up."""
        done = reaction.done or self._steps >= self._max_steps
        if done and callable(close := getattr(self._playing, "close", None)):
            close()
        return Reaction(reaction.observation, reaction.reward, done)


class OpenEnvServer(Episodes):
    """An OpenEnv environment that runs as a server. Implements `ports.Environment`."""

    def __init__(
        self,
        seed: int,
        url: str,
        sessions: int = 1,
        instructions: str = "",
        max_steps: int = 16,
        action_field: str | None = None,
        observation_field: str | None = None,
    ) -> None:
        """`sessions` is how many attempts the server may have at once (its `max_concurrent_envs`); the others wait."""
        super().__init__("openenv", seed, instructions, max_steps)
        self._url, self._sessions = url.rstrip("/"), sessions
        self._words = Words(_schema(self._url), action_field, observation_field)
        self._places: asyncio.Semaphore | None = None

    async def play(self, task: Task, policy: Policy) -> float:
        if self._places is None:  # in the event loop, which there was none of before
            self._places = asyncio.Semaphore(self._sessions)
        async with self._places:
            client = GenericEnvClient(self._url, connect_timeout_s=CONNECT_TIMEOUT_S)
            try:
                return await self._played(client, task, policy)
            except ConnectionClosed as error:  # it may close before the client has read why
                raise TaskError(
                    f"the OpenEnv server closed the connection ({error}); it may have no room for {self._sessions} sessions",
                    "lower `sessions`, or raise the server's max_concurrent_envs",
                ) from error
            finally:
                await client.close()

    async def _played(self, client: GenericEnvClient, task: Task, policy: Policy) -> float:
        result = await client.reset(seed=task.data["seed"])
        messages, total = self._first(self._words.seen(result.observation)), 0.0
        for _ in range(self._max_steps):
            turn = await policy.say(messages)
            try:
                result = await client.step(self._words.action(turn.text))
            except (NoActionError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "VALIDATION_ERROR" not in str(error):
                    raise
                messages = [*messages, turn.message, {"role": "user", "content": _no_action(error)}]
                continue
            total += float(result.reward or 0.0)
            if result.done:
                break
            messages = [*messages, turn.message, {"role": "user", "content": self._words.seen(result.observation)}]
        return total


def _no_action(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "No action: " + "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    return f"No action: {error}"


def _call(method: Any, **arguments: Any) -> Any:
    """Call it with the arguments that it takes: some environments' `reset` has no seed."""
    parameters = inspect.signature(method).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return method(**{name: value for name, value in arguments.items() if takes_all or name in parameters})


def _fields(observation: Any) -> dict[str, Any]:
    return serialize_observation(observation)


def _environment_class(path: str, folder: Path) -> Any:
    module, _, name = path.partition(":")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    found: Any = None
    with boundary() as caught:
        found = getattr(importlib.import_module(module), name)
    if caught.error is not None:
        if isinstance(caught.error, RedlineError):
            raise caught.error
        raise TaskError(
            f"OpenEnv environment {path}: {type(caught.error).__name__}: {caught.error}",
            f"write package.module:Class; `python -c 'import {module}'` must work in {folder}",
        ) from caught.error
    if not (isinstance(found, type) and issubclass(found, OpenEnvironment)):
        raise TaskError(f"{path} is no class of OpenEnv environments", "name the class that its server's create_app gets")
    return found


def _action_class(environment: type) -> type[Action]:
    """The class of actions that `step` says it takes."""
    hints: dict[str, Any] = {}
    with boundary() as caught:
        hints = typing.get_type_hints(environment.step)  # type: ignore[attr-defined]
    found = next((hint for hint in hints.values() if isinstance(hint, type) and issubclass(hint, Action)), None)
    if found is None or found is Action:
        why = f": {caught.error}" if caught.error else ""
        raise TaskError(
            f"{environment.__name__}.step does not say which class of actions it takes{why}",
            "annotate it: def step(self, action: MyAction), or run its server and use openenv_server",
        )
    return found


def _schema(url: str) -> Mapping[str, Any]:
    """The JSON schema of the actions that a server takes. Blocks for `CONNECT_TIMEOUT_S` at most."""
    if not url.startswith(("http://", "https://")):
        raise TaskError(f"url = {url!r}: must begin with http:// or https://", "such as http://127.0.0.1:8000")
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=CONNECT_TIMEOUT_S) as answer:
            schema: Mapping[str, Any] = json.load(answer)["action"]
    except (OSError, ValueError, KeyError) as error:
        raise TaskError(
            f"url = {url!r}: no OpenEnv server answers there: {error}",
            "start it, for example: uvicorn my_env.server.app:app --port 8000",
        ) from error
    return schema
