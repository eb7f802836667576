"""How many groups may be begun: the lag budget, as arithmetic.

With L = `max_lag` and B groups per batch, a group begun at version v must be trained on by version v + L. The batches of v, …,
v + L have room for (L + 1) · B groups; group (L + 1) · B + 1 would be begun for nothing. Hence

    in flight + ready + leased (replays included) ≤ (L + 1) · B,

and, since no more than B groups are trained at each version before v, groups begun and not dropped ≤ (v + L + 1) · B over the
run. With L = 0 that is lockstep: B groups at a time, begun when the step before them is done.

Short answers come first. If batches were made of whatever is ready, long ones would grow too old under way, and training would
see short answers only. A batch therefore leaves only if every group under way can still be trained on in time:

    groups under way with slack for at most k more batches ≤ k · B    for k = 0, …, L,

where a group begun at u has slack u + L - v at version v. For k = 0: no group under way has no slack left. Together with the
places that `num_urgent` keeps for the oldest, no group is ever too old, and all that were begun are trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


def most_at_once(max_lag: int, groups_per_step: int) -> int:
    """(L + 1) · B."""
    return (max_lag + 1) * groups_per_step


def room(num_alive: int, target: int, max_lag: int, groups_per_step: int, steps_left: int | None = None) -> int:
    """Groups to begin now, with `num_alive` in flight, ready or leased. The target is kept between one batch, or nobody would
    ever have one, and the lag budget. With `steps_left`, no more are begun than the rest of the run trains on: what is under
    way at the end would be sampled for nothing, and the long answers are under way longest."""
    limit = min(max(target, groups_per_step), most_at_once(max_lag, groups_per_step))
    if steps_left is not None:
        limit = min(limit, steps_left * groups_per_step)
    return max(0, limit - num_alive)


def must_wait(begun_versions: Iterable[int], version: int, max_lag: int, groups_per_step: int) -> bool:
    """Whether a batch at `version` would leave too few later batches for the groups under way, begun at `begun_versions`."""
    return must_wait_of(Counter(begun_versions), version, max_lag, groups_per_step)


def must_wait_of(begun: Mapping[int, int], version: int, max_lag: int, groups_per_step: int) -> bool:
    """The same where the groups under way are counted: version → how many were begun at it."""
    under_way = 0
    for k in range(max_lag + 1):
        under_way += begun.get(version - max_lag + k, 0)
        if under_way > k * groups_per_step:
            return True
    return False


def num_urgent(oldest_versions: Iterable[int], version: int, max_lag: int, groups_per_step: int) -> int:
    """How many places of the batch of `version` must go to the oldest groups, so that all groups can still be trained in time.

    A group has slack for k more batches if it is within budget at version + k. Those with slack for at most k share the k + 1
    batches from this one on; the later ones take k · B, and what is more than that is due now. Groups beyond the budget are not
    counted: nothing saves them.
    """
    return num_urgent_of(Counter(oldest_versions), version, max_lag, groups_per_step)


def num_urgent_of(oldest: Mapping[int, int], version: int, max_lag: int, groups_per_step: int) -> int:
    """The same where the groups are counted: oldest version → how many there are."""
    due = due_so_far = 0
    for k in range(max_lag + 1):
        due_so_far += oldest.get(version - max_lag + k, 0)
        due = max(due, due_so_far - k * groups_per_step)
    return min(due, groups_per_step)
