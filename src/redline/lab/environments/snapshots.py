"""Whether a game that was restored from a snapshot goes on as the one that it was taken of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from redline.environments.driver import Asked
from redline.errors import boundary, in_words
from redline.lab.environments.made import Made
from redline.lab.environments.trials import Plan, limited, speaker
from redline.types import Reaction, Task

MOVES = 50
"""Most moves of a game that is looked at."""


def snapshot_problems(made: Made, task: Task, plan: Plan) -> list[str] | None:
    """What is wrong, in sentences; None for what is no game with `snapshot` and `restore`. A call may take `plan.limit_s`."""
    game: Any = made.game()
    if game is None or not all(callable(getattr(game, method, None)) for method in ("snapshot", "restore")):
        return None
    problems: list[str] = []
    with boundary() as caught:
        problems = _compared(made, game, task, plan)
    return problems if caught.error is None else [f"snapshot and restore: {in_words(caught.error)}"]


def _compared(made: Made, game: Any, task: Task, plan: Plan) -> list[str]:
    replies = _replies(made, task, plan)
    _call(plan, "reset", partial(game.reset, task))
    middle = len(replies) // 2
    for reply in replies[:middle]:
        _call(plan, "step", partial(game.step, reply))
    state = _call(plan, "snapshot", game.snapshot)
    if not isinstance(state, bytes):
        return [f"snapshot() gives a {type(state).__name__}, not bytes"]
    restored: Any = made.game()
    _call(plan, "restore", partial(restored.restore, state))
    for move, reply in enumerate(replies[middle:], start=middle + 1):
        kept, again = (_call(plan, "step", partial(one.step, reply)) for one in (game, restored))
        if kept != again:
            return [f"a game restored after {middle} moves answers move {move} with {again} instead of {kept}"]
    return []


def _replies(made: Made, task: Task, plan: Plan) -> Sequence[str]:
    """What the random policy says in a whole game."""
    game: Any = made.game()
    seen: Any = _call(plan, "reset", partial(game.reset, task))
    say = speaker("random", task, plan)
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
