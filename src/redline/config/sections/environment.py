"""Section `rollouts.environment`: what attempts of several turns are played in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from redline.config.section import FreeMapping, LocalPath, Section


class EnvironmentConfig(Section):
    name: str | None = None
    """An environment of `redline env list`, or `package.module:Class` of your own, with `async def play(task, policy)` (see
    `redline.ports.Environment`) or the `reset` and `step` of a game (`redline.ports.Game`). It is called with `params` and
    `seed`. null asks each task's question once and scores the reply with the task's `score`."""
    params: FreeMapping = Field(default_factory=dict)
    """Keyword arguments for it."""
    folder: LocalPath | None = None
    """Where the module of your own is looked for when it is not an installed package; null is the folder in which redline is
    called."""
    run_in: Literal["auto", "loop", "threads", "processes"] = "auto"
    """Where a game's `reset` and `step` run. `threads`: a call that does not return in time costs its attempt and leaves its
    thread behind. `processes`: such a call, and a crash of the interpreter, costs the games of its process, which is replaced;
    the game's class must be importable; with `placement.cluster: ray` they are actors, spread over the nodes. `loop`: in the
    event loop itself, the least time a call, but one that blocks holds up all attempts. auto is threads. `async def play` runs
    in the event loop, and a `play` that is not async in a thread."""
    workers: PositiveInt = 8
    """Most threads or processes in which games run. Processes begin when there is more to do, and end when they are idle
    (`rollouts.worker_idle_s`)."""
    call_timeout_s: float | None = Field(60.0, gt=0)
    """Seconds that one call of a game's `reset` or `step` may take; then its attempt has failed. null waits for ever."""
    keep_replies: bool = True
    """Keep earlier replies in later prompts token by token as they were sampled, thinking included: an attempt is then one
    sequence, and each prompt begins with the last. false renders every turn from the beginning, as a served model would see it:
    a template that leaves earlier thinking out (Qwen3's does) then does, and each turn is a sequence of its own."""
    max_turns: PositiveInt | None = None
    """Most replies of the policy in one attempt, those of all roles together. The next `policy.say` raises
    `redline.errors.BudgetError`: an environment that catches it decides the reward; else the attempt ends there with reward 0
    and the part `truncated` = 1, which `reward_weights.truncated` may weigh. null sets no limit."""
    max_tokens: PositiveInt | None = None
    """Most tokens of one attempt, each counted once: prompts, what the environment shows, replies. A reply is cut to what is
    left, where replies under way count with the most that they may have; after that it is as with `max_turns`. null sets no
    limit."""
    timeout_s: float | None = Field(1800.0, gt=0)
    """Seconds that one attempt may take, waits for the engine included; then it has failed. null waits for ever."""
    retries: int = Field(1, ge=0)
    """How often an attempt is begun again after its environment raised an error, took too long or returned no score. What was
    sampled in the failed try is thrown away. A task on which an environment fails more often for bad replies is then trained on
    with better ones than the policy gives: `rollouts/retries` counts them."""
    oversample: int = Field(0, ge=0)
    """Attempts begun at each task beyond `group_size`: the first `group_size` that end are kept, the others are cut off. It
    shortens the wait for the longest attempts and biases what is trained on towards short ones: `rollouts/cut_off` counts
    them."""
