"""Section `buffer`: attempts on their way to the trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from redline.config.section import Section

GroupOrder = Literal["fresh_first", "oldest_first", "signal_first"]
LateGroups = Literal["wait", "drop"]


class BufferConfig(Section):
    max_lag: int = Field(0, ge=0)
    """Most optimizer steps between the policy that sampled a token and the one trained on it. 0 is lockstep, 1 samples the next
    batch while this one is trained on, more lets slow attempts take longer."""
    depth: PositiveInt | None = None
    """Steps' worth of groups that may be under way or waiting at once, at most `max_lag + 1`; null lets a controller hold it
    where neither trainer nor groups wait long."""
    order: GroupOrder = "fresh_first"
    """Which of the groups within the lag budget a batch takes. `fresh_first`: the newest, but the oldest while there is time.
    `oldest_first`: as they were begun. `signal_first`: those whose attempts differ in reward. Lockstep has no choice."""
    late_groups: LateGroups = "wait"
    """What becomes of groups that are still under way when the next step would make them older than `max_lag`. `wait`: the
    trainer waits for them, and trains on everything that is sampled. `drop`: they are cancelled, which is faster and biased:
    long answers are late most often, so training sees fewer of them than the policy gives. Lockstep has no late groups."""
    max_reuses: int = Field(0, ge=0)
    """Times a group may be trained on again, within the lag budget, where new groups are too few for a batch."""
    group_timeout_s: float | None = Field(3600.0, gt=0)
    """Seconds after which a group that is still under way is cancelled, with that reason, and another task is attempted in its
    place; null waits for ever. Give it more time than the longest answers need: what it drops is not trained on. In lockstep
    this clock does not run: a step takes as long as `rollouts.task_timeout_s` and `rollouts.reward_timeout_s` let it."""
    max_bytes: int | None = Field(8 << 30, ge=0)
    """Size of the Arrow files in the run folder that keep groups; beyond it the oldest that no step, replay or resumed run
    needs are deleted. 0 keeps no groups, null keeps all."""
    max_age_steps: PositiveInt | None = None
    """Steps after which a group that was trained on or dropped is deleted; null keeps all."""

    @model_validator(mode="after")
    def _only_a_lag_makes_groups_late(self) -> BufferConfig:
        if self.late_groups == "drop" and self.max_lag == 0:
            raise ValueError("late_groups = drop: in lockstep (max_lag = 0) no group is late; leave it out, or raise max_lag")
        return self

    @model_validator(mode="after")
    def _depth_is_within_the_lag_budget(self) -> BufferConfig:
        if self.depth is not None and self.depth > self.max_lag + 1:
            raise ValueError(
                f"depth = {self.depth}: a group may wait for at most max_lag = {self.max_lag} steps; set depth to"
                f" {self.max_lag + 1} or less, or raise max_lag"
            )
        return self

    @property
    def keep_trajectories(self) -> bool:
        """max_bytes is not 0."""
        return self.max_bytes != 0
