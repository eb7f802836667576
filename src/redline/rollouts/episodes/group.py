"""The attempts at one task in an environment, from their begin until all have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from redline.rollouts.first_prompts import FirstPrompts
from redline.rollouts.lengths import Order
from redline.types import Task, Trajectory


@dataclass(slots=True, eq=False)
class EpisodeGroup:
    """The attempts at one task, under way."""

    index: int
    """Chooses their randomness."""
    task: Task
    num_wanted: int
    """Attempts to be kept."""
    num_begun: int
    """Attempts to begin: more than are kept where the recipe oversamples."""
    temperature: float
    began: float
    """On `time.perf_counter`."""
    is_here: bool
    """Whether the caller's thread holds the engine and steps it for this group."""
    first_prompts: FirstPrompts
    """Shared by its attempts, many of which begin alike."""
    ended: Callable[[EpisodeGroup], None] = lambda group: None
    """Called in the loop's thread when the last attempt has ended."""
    begins: Order = (0, 0.0)
    """When its requests begin, among those of other groups that wait."""
    expected_tokens: float | None = None
    """As `TrajectoryGroup.expected_tokens`."""
    order: tuple[int, float, int] = (0, 0.0, 0)
    """`begins`, and the number of groups that were begun before it."""
    outcomes: dict[int, list[Trajectory]] = field(default_factory=dict)
    """Sequences of each attempt that has ended, by attempt."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    num_sampled: dict[int, int] = field(default_factory=dict)
    """Tokens that the policy has chosen in each attempt, replies under way not included."""
    is_over: bool = False
    """All attempts have ended, or the group was cancelled."""

    @property
    def has_enough(self) -> bool:
        """Whether as many attempts as are wanted have a reward, or none is left."""
        scored = sum(trajectories[0].failure is None for trajectories in self.outcomes.values())
        return scored >= self.num_wanted or len(self.outcomes) == self.num_begun

    @property
    def trajectories(self) -> list[Trajectory]:
        """The sequences of all attempts that have ended, attempt by attempt."""
        return [trajectory for attempt in sorted(self.outcomes) for trajectory in self.outcomes[attempt]]

    @property
    def num_cut_off(self) -> int:
        """Attempts that were begun and not kept, since enough others had ended."""
        return self.num_begun - len(self.outcomes) if self.is_over else 0
