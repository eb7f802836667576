"""Keys of a recipe that `redline compare` has no use for: it times steps, one after the other, without what lies between them.
Loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LEFT_OUT: Mapping[str, str] = {
    "run.checkpoint_every": "0",
    "rollouts.evaluation.num_tasks": "0",
    "rollouts.evaluation.stop_at": "null",
}
"""Key → what both sides run with, whatever their recipes say."""
_KEYS, _SECTION = ("run.checkpoint_every", "run.keep_checkpoints"), "rollouts.evaluation"


def is_between_steps(key: str) -> bool:
    """Whether a key changes nothing of a step: only evaluations and checkpoints read it."""
    return key in (*_KEYS, _SECTION) or key.startswith(f"{_SECTION}.")


def between_steps(overrides: Sequence[str]) -> list[str]:
    """The keys of these overrides (`section.key=value`) that change nothing of a step."""
    return [key for key in (override.partition("=")[0] for override in overrides) if is_between_steps(key)]
