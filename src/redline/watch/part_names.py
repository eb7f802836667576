"""Whether the attempts of a group have the same named parts in their rewards: a part that comes and goes counts as 0 without
a word."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from redline.types import Trajectory, TrajectoryGroup

_TRUNCATED = {"truncated"}
"""The parts of an attempt that a budget ended, which has no score of its own."""
MOST_NAMES = 8


class PartNames:
    """Tells of the first group whose attempts have different parts."""

    def __init__(self) -> None:
        self._was_told = False

    def news(self, groups: Iterable[TrajectoryGroup]) -> str | None:
        """A sentence with both sets of names; None where there is nothing to tell, or something was told before."""
        if self._was_told:
            return None
        for group in groups:
            if found := _two_sets(group.trajectories):
                self._was_told = True
                one, other = map(_listed, found)
                return (
                    f"the parts of the reward differ within a group: of two attempts at task {group.task_id} one has {one}, the"
                    f" other {other}. A part that is missing counts as 0; give each part every time, as 0 where it was not"
                    " earned"
                )
        return None


def _two_sets(trajectories: Sequence[Trajectory]) -> tuple[Mapping[str, float], Mapping[str, float]] | None:
    """The parts of two attempts of one role whose names differ."""
    first: dict[str, Mapping[str, float]] = {}
    for own in trajectories:
        if own.failure is not None or own.reward_parts.keys() == _TRUNCATED:
            continue
        known = first.setdefault(own.role, own.reward_parts)
        if known.keys() != own.reward_parts.keys():
            return known, own.reward_parts
    return None


def _listed(parts: Mapping[str, float]) -> str:
    names = sorted(parts)
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}" if names else "none"
