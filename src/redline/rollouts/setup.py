"""What rollouts are made from: the user's tasks, the recipe, and what the model and the engine can take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redline.config.sections.rollouts import RolloutsConfig
from redline.ports import Environment, Score, TaskSource
from redline.rollouts.chat import Chat
from redline.types import GenerateRequest, Task

if TYPE_CHECKING:
    from redline.rollouts.rewards.reward_model import RewardModel  # it needs torch, and most runs do not need it


@dataclass(slots=True, frozen=True)
class RolloutSetup:
    """Everything that `Dispatcher` needs besides an engine."""

    tasks: TaskSource
    environment: Callable[[Callable[[Task, str], Score]], Environment]
    """Makes the environment that plays every attempt, given a function that scores: the tasks' own, with its limits."""
    chat: Chat
    config: RolloutsConfig
    stop_token_ids: tuple[int, ...]
    """A reply ends after any of these."""
    seed: int
    """The run's seed. What is sampled follows from it and from the index of the task."""
    reward_model: RewardModel | None = None
    max_reward_workers: int = 1
    """Threads that may score at once."""
    max_prompt_tokens: int | None = None
    """None sets no limit."""
    check_request: Callable[[GenerateRequest], None] = lambda request: None
    """Raises what the engine has against a request, before the engine gets it."""
    max_sequences: int | None = None
    """Replies that environments may have under way in the engine at once; None sets no limit."""
    group_timeout_s: float | None = None
    """Seconds after which a group is cancelled, and a call of `score` that lasts as long is taken for dead."""
