"""The arms of `redline bench rollout environment=NAME`: what can be off in rollouts, and rollouts with some of it off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from redline.config import Config
from redline.engine import EngineSession
from redline.errors import TaskError
from redline.lab.material.switched_engine import SwitchedEngine
from redline.lab.measure.machine import synchronize
from redline.launch.build import make_rollout_setup
from redline.launch.models import LoadedModel
from redline.launch.preflight import load_tasks
from redline.ports import Environment, Policy
from redline.rollouts import Dispatcher
from redline.types import EngineStats, Task, TrajectoryGroup

ON, OFF = "all on", "all off"
WARM_UP_PHASES = 8


@dataclass(slots=True, frozen=True)
class Switch:
    """One thing that makes rollouts fast."""

    name: str
    what: str
    """What is done instead where it is off."""
    off: Mapping[str, Any] = field(default_factory=dict)
    """Params of the environment where it is off."""
    on: Mapping[str, Any] = field(default_factory=dict)
    """Params where it is on, beside the environment's defaults."""


ASYNC = Switch("async episodes", "attempts are played one after another")
BROKER = Switch("broker", "one completion at a time is in the engine")
PREFIX = Switch("prefix caching", "every prompt is computed from its first token")
ADAPTER = Switch("warm adapter", "the LoRA adapter is read anew for each group")
STATE_CACHE = Switch("state cache", "each task's beginning is played by a script", {"warm_up": WARM_UP_PHASES}, {"states": ""})
OF_DIPLOMACY = (
    STATE_CACHE,
    Switch("memoised orders", "legal orders are asked for each power", {"memoise": False}),
    Switch("kept prompts", "a prompt is built for each reply", {"keep_prompts": False}),
    Switch("compact prompts", "prompts are indented JSON", {"compact": False}),
    Switch("positions as values", "each attempt has a deep copy of a game", {"clone": "deepcopy"}),
)
SWITCHES: Mapping[str, tuple[Switch, ...]] = {"diplomacy": OF_DIPLOMACY}
"""Environment → what it can be measured without; beside what all have."""
ROLES: Mapping[str, int] = {"diplomacy": 7}
"""Environment → replies that one attempt may wait for at once; 1 for all others."""


@dataclass(slots=True, frozen=True)
class Times:
    """A reading of two clocks, in seconds; or the difference of two readings."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Times:
        return cls(time.perf_counter(), time.process_time())

    def since(self, earlier: Times) -> Times:
        return Times(self.wall_s - earlier.wall_s, self.cpu_s - earlier.cpu_s)


@dataclass(slots=True, frozen=True)
class ArmRun:
    """The groups of one step, by one arm."""

    seconds: float
    cpu_s: float
    """CPU time of this process, with all its threads."""
    turns: int
    new_tokens: int
    prompt_tokens: int
    """Tokens of all prompts, as they were asked."""
    computed_prompt_tokens: int
    """Tokens of prompts that were not found in the prefix cache."""
    mean_batch: float
    """decoded_rows / decode_steps."""
    hit_rate: float
    attempts: int
    failures: int

    @classmethod
    def of(cls, groups: Sequence[TrajectoryGroup], times: Times, before: EngineStats, after: EngineStats) -> ArmRun:
        every = [t for group in groups for t in group.trajectories]
        queried = after.prefix_query_tokens - before.prefix_query_tokens
        computed = after.prompt_tokens - before.prompt_tokens
        hits = after.prefix_hit_tokens - before.prefix_hit_tokens
        return cls(
            seconds=times.wall_s,
            cpu_s=times.cpu_s,
            turns=sum(len(t.turns) for t in every),
            new_tokens=sum(t.num_completion_tokens for t in every),
            prompt_tokens=sum(turn.start for t in every for turn in t.turns),
            computed_prompt_tokens=computed,
            mean_batch=(after.decoded_rows - before.decoded_rows) / max(1, after.decode_steps - before.decode_steps),
            hit_rate=hits / queried if queried else 0.0,
            attempts=len({(group.index, t.attempt) for group in groups for t in group.trajectories}),
            failures=sum(t.failure is not None for t in every),
        )

    @property
    def tokens_per_turn(self) -> float:
        return self.new_tokens / max(1, self.turns)

    @property
    def s_per_turn(self) -> float:
        return self.seconds / max(1, self.turns)

    @property
    def cpu_s_per_turn(self) -> float:
        return self.cpu_s / max(1, self.turns)


class OneByOne:
    """Plays one attempt at a time. Implements `ports.Environment`."""

    def __init__(self, environment: Environment) -> None:
        self._environment, self._turn = environment, asyncio.Lock()

    async def play(self, task: Task, policy: Policy) -> Any:
        async with self._turn:
            return await self._environment.play(task, policy)


class Arm:
    """Rollouts with some things off."""

    def __init__(self, config: Config, model: LoadedModel, engine: SwitchedEngine, off: Sequence[Switch]) -> None:
        self._engine, self._size = engine, config.rollouts.groups_per_step
        self._reloads = ADAPTER in off
        self._version = 0
        setup = make_rollout_setup(config, model, engine.engine, load_tasks(config))
        if ASYNC in off:
            make = setup.environment
            setup = replace(setup, environment=lambda score: OneByOne(make(score)))
        self._rollouts = Dispatcher(EngineSession(engine), setup)
        self._device = torch.device(config.run.device)

    def run(self, number: int) -> ArmRun:
        """The groups of step `number`. Blocks until all have their reward."""
        self._engine.reset_prefix_cache()
        before = self._engine.stats
        synchronize(self._device)
        began = Times.now()
        self._load_adapter()
        self._rollouts.begin(range(number * self._size, (number + 1) * self._size), 0)
        groups: list[TrajectoryGroup] = []
        while len(groups) < self._size:
            groups += self._rollouts.finished()
        synchronize(self._device)
        refuse_failures(groups)
        return ArmRun.of(groups, Times.now().since(began), before, self._engine.stats)

    def _load_adapter(self) -> None:
        for _ in range(self._size if self._reloads else 1):
            self._version += self._reloads
            self._engine.load_adapter(self._version)

    def close(self) -> None:
        self._rollouts.close()


def refuse_failures(groups: Sequence[TrajectoryGroup]) -> None:
    """Raise TaskError where no attempt was played to its end: the time of failures says nothing."""
    failures = [t.failure for group in groups for t in group.trajectories]
    if failures and all(failures):
        raise TaskError(f"every attempt failed: {failures[0]}", failures[0].hint if failures[0] else "")
