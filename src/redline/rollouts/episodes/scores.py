"""What `play` returned → the reward of each role, and its named parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redline.errors import TaskError, shortened
from redline.rollouts.rewards.parts import reward_parts, total_reward
from redline.types.numbers import in_float32

TRUNCATED_PART = "truncated"
"""1 in the reward of an attempt that a budget ended before its environment had a score."""

Scored = tuple[float, dict[str, float]]
"""A reward and its named parts."""


def scores_of_roles(score: Any, roles: Sequence[str], weights: Mapping[str, float]) -> dict[str, Scored]:
    """The reward of each role that has spoken. Raises TaskError where `score` is none, or leaves a role out.

    A mapping that has a role of the attempt among its names is by role, and may name roles that had no turn; every other score,
    such as one number, is that of all roles alike."""
    by_role = isinstance(score, Mapping) and any(role and role in score for role in roles)
    missing = [role for role in roles if by_role and role not in score]
    if missing:
        raise TaskError(
            f"`play` returned a score for {', '.join(map(str, list(score)[:10]))} and none for {missing[0]!r}, who has spoken",
            "return a score for every role that `policy.say` was called with",
        )
    if isinstance(score, Mapping) and not by_role:
        _check_that_parts_are_meant(score, roles)
    if by_role:
        _check_that_others_are_roles(score, roles)
    return {role: _weighed(score[role] if by_role else score, weights) for role in roles}


def _check_that_parts_are_meant(score: Mapping[Any, Any], roles: Sequence[str]) -> None:
    """Raise TaskError where names that are no role of the attempt are those of roles all the same: each has named parts of its
    own, or is written as a role is but for its case. As parts of one reward they would be added up."""
    known = {role.strip().casefold() for role in roles if role}
    are_roles = any(isinstance(value, Mapping) for value in score.values())
    if are_roles or any(isinstance(name, str) and name.strip().casefold() in known for name in score):
        spoke = f"the roles that have spoken are {_listed(roles)}" if known else "no role has spoken"
        raise TaskError(
            f"`play` returned scores for {_listed(list(score))}, and {spoke}",
            "give `policy.say` the role that speaks, `role=`, by the name that its score has",
        )


def _check_that_others_are_roles(score: Mapping[Any, Any], roles: Sequence[str]) -> None:
    """Raise TaskError where a score by role has a name beside its roles that is none: a role's but for its case, or no text. It
    would count for nothing."""
    known = {role.strip().casefold() for role in roles}
    for name in score:
        if name not in roles and (not isinstance(name, str) or not name or name.strip().casefold() in known):
            raise TaskError(
                f"`play` returned a score for {shortened(repr(name), 60)}, and the roles that have spoken are {_listed(roles)}",
                "return one score for each role, by the name that `policy.say` was called with",
            )


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(shortened(repr(name), 60) for name in names[:10]) + (f" and {len(names) - 10} more" if names[10:] else "")


def _weighed(score: Any, weights: Mapping[str, float]) -> Scored:
    parts = reward_parts(score, "play")
    if TRUNCATED_PART in weights:
        parts.setdefault(TRUNCATED_PART, 0.0)
    return total_reward(parts, weights), parts


def truncated_score(weights: Mapping[str, float]) -> Scored:
    """That of an attempt that a budget ended before its environment had a score: 0, or the weight of its only part."""
    return in_float32(weights.get(TRUNCATED_PART, 0.0)), {TRUNCATED_PART: 1.0}
