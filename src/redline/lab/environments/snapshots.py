"""Whether a game that was restored from a snapshot goes on as the one that it was taken of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from redline.environments.driver import Asked
from redline.errors import boundary, in_words
from redline.lab.environments.made import Made
from redline.lab.environments.trials import POLICIES, Plan, limited, speaker
from redline.rollouts.tasks.alike import alike
from redline.types import Reaction, Task

MOVES = 50
"""Most moves of a game that is looked at."""


def snapshot_problems(made: Made, tasks: Sequence[Task], plan: Plan) -> list[str] | None:
    """What is wrong at the first task and policy where something is, in sentences; None for what is no game with `snapshot` and
    `restore`. A call may take `plan.limit_s`."""
    game: Any = made.game()
    if game is None or not all(callable(getattr(game, method, None)) for method in ("snapshot", "restore")):
        return None
    problems: list[str] = []
    with boundary() as caught:
        each = (_compared(made, task, policy, plan) for task in tasks for policy in POLICIES)
        problems = next((found for found in each if found), [])
    return problems if caught.error is None else [f"snapshot and restore: {in_words(caught.error)}"]


def _compared(made: Made, task: Task, policy: str, plan: Plan) -> list[str]:
    replies = _replies(made, task, policy, plan)
    game: Any = made.game()
    _call(plan, "reset", partial(game.reset, task))
    middle = len(replies) // 2  # at least one move, unless the game has no more
    for reply in replies[:middle]:
        _call(plan, "step", partial(game.step, reply))
    state = _call(plan, "snapshot", game.snapshot)
    if not isinstance(state, bytes):
        return [f"snapshot() gives a {type(state).__name__}, not bytes"]
    if not state:
        return ["snapshot() gives no bytes at all: a restored game would not know where it was"]
    restored: Any = made.game()
    _call(plan, "restore", partial(restored.restore, state))
    for move, reply in enumerate(replies[middle:], start=middle + 1):
        kept, again = (_call(plan, "step", partial(one.step, reply)) for one in (game, restored))
        if not alike(kept, again):
            return [f"a game restored after {middle} moves answers move {move} with {again} instead of {kept}"]
    return []


def _replies(made: Made, task: Task, policy: str, plan: Plan) -> Sequence[str]:
    """What a policy says in a whole game."""
    game: Any = made.game()
    seen: Any = _call(plan, "reset", partial(game.reset, task))
    say = speaker(policy, task, plan)
    replies: list[str] = []
    for _ in range(MOVES):
        shown = [{"role": "user", "content": seen}] if isinstance(seen, str) else list(seen)
        reply: Any = say(Asked(shown))
        replies.append(reply.text)
        reaction: Reaction = _call(plan, "step", partial(game.step, reply.text))
        if reaction.done:
            break
        seen = reaction.observation
    return replies


def _call(plan: Plan, what: str, call: Callable[[], Any]) -> Any:
    return limited(what, call, plan.limit_s)[0]
