"""Which groups make the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from redline.buffer.admission import num_urgent
from redline.buffer.store.group_store import GroupInfo
from redline.config.sections.buffer import GroupOrder

ORDERS: dict[GroupOrder, Callable[[GroupInfo], tuple[int, int, int]]] = {
    "fresh_first": lambda group: (-group.versions.oldest, not group.has_signal, group.index),
    "oldest_first": lambda group: (group.versions.oldest, not group.has_signal, group.index),
    "signal_first": lambda group: (not group.has_signal, -group.versions.oldest, group.index),
}
"""Sort keys. A group with signal goes before one without wherever they are otherwise equal."""


def choose(
    ready: Sequence[GroupInfo],
    in_flight: Iterable[int],
    replays: Sequence[GroupInfo],
    version: int,
    max_lag: int,
    groups_per_step: int,
    order: GroupOrder,
) -> list[GroupInfo] | None:
    """The groups of the batch of `version`, by index; None while there are too few.

    `ready` are within budget; `in_flight` are the versions at which the groups under way were begun; `replays` were trained on
    before, the one to prefer first. The oldest groups get the places they need to stay within budget, those under way
    considered, and the order decides the rest. Replays fill what is left, where that makes no group under way too old.
    """
    if max_lag == 0:
        first = sorted(ready, key=lambda group: group.index)[:groups_per_step]
        return first if len(first) == groups_per_step else None
    oldest_versions = [group.versions.oldest for group in ready]
    urgent = num_urgent([*oldest_versions, *in_flight], version, max_lag, groups_per_step)
    by_age = sorted(ready, key=ORDERS["oldest_first"])
    chosen = (by_age[:urgent] + sorted(by_age[urgent:], key=ORDERS[order]))[:groups_per_step]
    missing = groups_per_step - len(chosen)
    if missing > len(replays) or (missing and urgent > len(chosen)):
        return None
    return sorted([*chosen, *replays[:missing]], key=lambda group: group.index)
