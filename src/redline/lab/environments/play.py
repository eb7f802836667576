"""`redline env play`: one attempt in the terminal, shown turn by turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from redline.environments.driver import Asked, Driver, Episode
from redline.errors import BudgetError, EngineError, RedlineError, boundary
from redline.lab.environments.check import scores_by_role
from redline.lab.environments.made import Made
from redline.lab.environments.players import HOW_TO_CALL, EndOfInputError, Player, function_of
from redline.lab.environments.trials import limited
from redline.rollouts.episodes.scores import truncated_score
from redline.rollouts.rewards.parts import reward_parts
from redline.rollouts.tasks.checks import check_task
from redline.rollouts.user_code.failures import failure_of
from redline.types import Message

MAKE_S = 300.0
"""Seconds that making the environment, and giving a task, may take."""


@dataclass(slots=True)
class Played:
    """An attempt that was played, and what it was worth."""

    name: str
    episode: Episode
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Role → named parts of its reward; one role without a name where there are none."""
    problem: str = ""
    """Why it has no reward; empty where it has one."""

    @property
    def exit_code(self) -> int:
        return 1 if self.problem else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "environment": self.name,
            "task": self.episode.task.id,
            "turns": [
                {
                    "role": exchange.asked.role,
                    "messages": [dict(message) for message in exchange.asked.messages],
                    "reply": dict(exchange.turn.message),
                    "text": exchange.turn.text,
                    "tokens": exchange.turn.num_tokens,
                    "finish_reason": exchange.turn.finish_reason,
                }
                for exchange in self.episode.exchanges
            ],
            "reward_parts": {role: dict(parts) for role, parts in self.parts.items()},
            "problem": self.problem,
        }


def play(made: Made, index: int, player: Player, show: Callable[[str], None], limit_s: float | None) -> Played:
    """Play an attempt at training task `index` with a player, and show what is said as it is said. Blocks until the attempt has
    ended, or for `limit_s`. Raises RedlineError where there is nothing to play, or the player's model cannot be asked."""
    environment, _ = limited("making the environment", made.make, MAKE_S)
    source = made.tasks(environment)
    given, _ = limited(f"train({index})", partial(source.train, index), MAKE_S)
    task = check_task(given, f"train({index})", bare=True)
    show(f"task {task.id}")
    transcript, speaker = Transcript(show), player.begin(task, index)

    def speak(asked: Asked) -> Any:
        transcript.asked(asked)
        return speaker(asked)

    driver = Driver(environment, lambda exchange: transcript.replied(exchange.asked.role, exchange.turn.message))
    try:
        episode = driver.play(task, speak, limit_s)
    finally:
        driver.close()
        getattr(environment, "close", lambda: None)()
    played = _scored(made.name, episode)
    for role, parts in played.parts.items():
        show(f"reward{f' of {role}' if role else ''}: {', '.join(f'{part} {value:g}' for part, value in parts.items())}")
    return played


def _scored(name: str, episode: Episode) -> Played:
    error = episode.error
    if isinstance(error, EndOfInputError):
        return Played(name, episode, problem=error.message)
    if isinstance(error, EngineError):
        raise error
    if isinstance(error, BudgetError) and episode.exchanges:
        return Played(name, episode, {role: truncated_score({})[1] for role in episode.roles})
    if error is not None:
        failure = failure_of("environment", error)
        said = failure.reason if isinstance(error, RedlineError) else f"play raised {failure.reason}"
        return Played(name, episode, problem=f"{said}{f', at {failure.where}' if failure.where else ''}")
    parts: dict[str, Mapping[str, float]] = {}
    with boundary() as caught:
        parts = {role: reward_parts(score) for role, score in scores_by_role(episode).items()}
    return Played(name, episode, parts, failure_of("environment", caught.error).reason if caught.error else "")


class Transcript:
    """Shows each message of each role's conversation once."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._shown: dict[str, list[Message]] = {}
        self._tools: Sequence[Mapping[str, Any]] = ()

    def asked(self, asked: Asked) -> None:
        """Show what is new since this role was last asked; everything where the conversation begins anew."""
        before = self._shown.get(asked.role, [])
        goes_on = list(asked.messages[: len(before)]) == before
        if before and not goes_on:
            self._show("── a new conversation ──")
        for message in asked.messages[len(before) if goes_on else 0 :]:
            self._show(line_of(message, ""))
        if asked.tools and asked.tools != self._tools:
            self._tools = asked.tools
            for tool in asked.tools:
                self._show(_tool_line(function_of(tool)))
        self._shown[asked.role] = list(asked.messages)

    def replied(self, role: str, message: Message) -> None:
        self._show(line_of(message, role))
        self._shown.setdefault(role, []).append(message)


def line_of(message: Message, role: str) -> str:
    """`user: text`; the policy's with its role in the game, and with its calls."""
    who = f"{message.get('role', '')}{f' ({role})' if role else ''}"
    calls = [function_of(call) for call in message.get("tool_calls") or ()]
    said = [str(message.get("content") or "")] if message.get("content") or not calls else []
    said += [f"calls {call.get('name')}({json.dumps(call.get('arguments'))})" for call in calls]
    return f"{who}: " + " ".join(said)


def _tool_line(function: Mapping[str, Any]) -> str:
    schema = function.get("parameters") or {}
    arguments = ", ".join(f"{name}: {kind.get('type', 'any')}" for name, kind in (schema.get("properties") or {}).items())
    what = f": {function['description']}" if function.get("description") else ""
    return f"tool {function.get('name')}({arguments}){what}    ({HOW_TO_CALL})"
