"""A model that plays in `redline env play`: it says what attempt 0 of a run's first step says, token by token.

    asked ──► PlayedAttempt ──► Broker ──► EngineSession, in its thread
                  ▲                             │
                  └──── pieces of the reply ◄───┘ read in the event loop of the environment

Prompts, limits, seeds, calls and the end of a reply are made by the classes of a run, and not a second time here.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast

from redline.config import Config, resolve_engine, validate_engine
from redline.config.sections.rollouts import RolloutsConfig
from redline.environments.driver import Asked, Speaker
from redline.errors import EngineError
from redline.launch.engines import LoadedEngine, load_engine
from redline.launch.process import prepare_process
from redline.rollouts.chat import Chat
from redline.rollouts.episodes.attempt import Limits, PlayedAttempt, Shared
from redline.rollouts.episodes.broker import Broker
from redline.rollouts.episodes.group import EpisodeGroup
from redline.rollouts.first_prompts import FirstPrompts
from redline.rollouts.prompts import prompt_limit
from redline.types import Task, Turn

MAX_TOKENS = 256
"""Most tokens of a reply, where neither recipe nor command line says how many and the model has positions for twice as many."""


MAX_NUM_SEQS = 16
"""Roles that reply at once, where the recipe does not say how many sequences run together."""


@dataclass(slots=True, frozen=True)
class Manner:
    """How a model replies; None is what the recipe says, if there is one."""

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int = 0


class ModelPlayer:
    """Implements `players.Player`."""

    def __init__(self, path: str, manner: Manner, recipe: Config | None = None) -> None:
        """Load the model: a Hugging Face folder, a run folder, a .gguf file, a hub id or a built-in one. Engine, prompts and
        limits are those of the recipe."""
        self._loaded = _load(path, manner.seed, recipe)
        self._seed, self._rollouts = manner.seed, _rollouts(manner, recipe, self._loaded.max_positions)
        self._max_prompt_tokens = prompt_limit(self._rollouts, self._loaded.max_positions)
        self._temperature = self._rollouts.temperature if manner.temperature is None else manner.temperature
        self._session = self._loaded.session()
        self._session.start()

    def begin(self, task: Task, index: int) -> Speaker:
        return _Speaking(self, task, index)

    def close(self) -> None:
        """Give the model's memory back."""
        self._session.close()
        self._loaded.close()

    def attempt(self, task: Task, index: int, loop: asyncio.AbstractEventLoop) -> tuple[PlayedAttempt, Broker]:
        """An attempt in an event loop, and what brings its asks to the engine."""
        rollouts, stops = self._rollouts, self._loaded.stop_token_ids
        environment = rollouts.environment
        chat = Chat(
            self._loaded.tokenizer,
            rollouts.system_prompt,
            rollouts.prompt_suffix,
            rollouts.answer_prefix,
            keeps_replies=environment.keep_replies,
        )

        def fail(error: BaseException) -> None:
            attempt.fail(cast(Exception, error))

        broker = Broker(self._session, loop.call_soon_threadsafe, fail, seed=self._seed, stop_token_ids=stops)
        limits = Limits(rollouts.max_new_tokens, self._max_prompt_tokens, environment.max_turns, environment.max_tokens)
        shared = Shared(chat, stops, limits, broker, _Here(loop), self._loaded.engine.check)
        group = EpisodeGroup(
            index, task, 1, 1, self._temperature, time.perf_counter(), is_here=False, first_prompts=FirstPrompts(chat)
        )
        attempt = PlayedAttempt(group, 0, 0, shared)
        return attempt, broker


@dataclass(slots=True, frozen=True)
class _Here:
    """The event loop that the attempt runs in. Implements `attempt.Loop`."""

    loop: asyncio.AbstractEventLoop
    is_here: bool = True


class _Speaking:
    """What the model says in one attempt, which begins with the first ask."""

    def __init__(self, player: ModelPlayer, task: Task, index: int) -> None:
        self._player, self._task, self._index = player, task, index
        self._begun: tuple[PlayedAttempt, Broker] | None = None

    async def __call__(self, asked: Asked) -> Turn:
        loop = asyncio.get_running_loop()
        self._begun = self._begun or self._player.attempt(self._task, self._index, loop)
        attempt, broker = self._begun
        loop.call_soon(_hand_over, attempt, broker)  # after `say` has asked, which it does before it first waits
        turn: Turn = await attempt.say(
            asked.messages,
            role=asked.role,
            tools=asked.tools,
            stop=asked.stop,
            max_tokens=asked.max_tokens,
            until=asked.until,
        )
        return turn


def _hand_over(attempt: PlayedAttempt, broker: Broker) -> None:
    try:
        broker.hand_over_what_is_asked()
    except EngineError as error:  # it has stopped
        attempt.fail(error)


def _load(path: str, seed: int, recipe: Config | None) -> LoadedEngine:
    """The engine of the recipe, with this model."""
    model = {"dtype": recipe.model.dtype} if recipe else {}
    engine = recipe.engine.model_dump(exclude_unset=True) if recipe else {}
    values = {"model": {**model, "path": path}, "run": {"seed": seed}, "engine": {"max_num_seqs": MAX_NUM_SEQS, **engine}}
    resolved = resolve_engine(validate_engine(values, "redline env play")).recipe
    prepare_process(resolved)
    return load_engine(resolved)


def _rollouts(manner: Manner, recipe: Config | None, max_positions: int) -> RolloutsConfig:
    """What the recipe says of attempts, with the most tokens that the command line wants."""
    if recipe is None:
        own = RolloutsConfig(environment={"name": "played"}, max_new_tokens=min(MAX_TOKENS, max_positions // 2))
    else:
        own = recipe.rollouts
    return own if manner.max_tokens is None else own.model_copy(update={"max_new_tokens": manner.max_tokens})
