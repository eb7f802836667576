"""Where groups are kept on their way to the trainer: the interface that the buffer needs of a store.

begin ──► in_flight ──add──► ready ──lease──► leased ──trained──► trained
              │                │
              └──────drop──────┴──► dropped, with the reason
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from redline.buffer.store.stored_groups import StoredGroups
from redline.types import TrajectoryGroup, VersionSpan


class GroupState(StrEnum):
    IN_FLIGHT = "in_flight"
    """Being attempted."""
    READY = "ready"
    """Complete, and in no batch yet."""
    LEASED = "leased"
    """Part of the batch that the trainer is at."""
    TRAINED = "trained"
    DROPPED = "dropped"
    """Will not be trained on; the reason is kept."""


@dataclass(slots=True, frozen=True)
class GroupInfo:
    """What the buffer must know of a group to choose it; its tokens stay where they are."""

    index: int
    versions: VersionSpan
    has_signal: bool
    reward: float | None
    """Mean over its attempts that have one; None where all failed."""

    @staticmethod
    def of(group: TrajectoryGroup) -> GroupInfo:
        return GroupInfo(group.index, group.versions, group.has_signal, group.reward)


class GroupStore(Protocol):
    """Remembers every index that was given out, and what became of it."""

    @property
    def next_index(self) -> int:
        """The smallest index that was never given out."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Groups in each `GroupState`."""
        ...

    @property
    def dropped(self) -> Mapping[str, int]:
        """Groups that were dropped, by the reason."""
        ...

    def begin(self, indices: Sequence[int], version: int) -> None:
        """These are being attempted, from policy `version` on."""
        ...

    def add(self, *groups: TrajectoryGroup) -> None:
        """in_flight → ready, and safe from a kill when it returns. A kill, or a disk that is full, in the middle of it leaves a
        first part of them ready. Together they take less time than one by one."""
        ...

    def ready(self) -> list[GroupInfo]:
        """By index."""
        ...

    def lease(self, indices: Sequence[int], version: int) -> None:
        """ready → leased, for the batch of `version`."""
        ...

    def trained(self, indices: Sequence[int], version: int) -> None:
        """leased → trained, by the step from `version` to the next."""
        ...

    def drop(self, indices: Sequence[int], reason: str) -> None:
        """in_flight or ready → dropped."""
        ...

    def read(self, indices: Sequence[int]) -> StoredGroups | Sequence[TrajectoryGroup]:
        """In the order asked, leased now or trained within the lag budget: what `pack_stored` or `pack` makes a batch of."""
        ...

    def arrived_after(self, count: int) -> list[TrajectoryGroup]:
        """Groups of an earlier process that came after its first `count`, in their order."""
        ...

    def lengths_before(self, version: int, most: int, without: Container[int] = ()) -> Iterable[tuple[str, Sequence[int]]]:
        """The last `most` groups of an earlier process that were sampled before `version`, oldest first: the id of the task
        and the tokens that the policy chose in each attempt. Those that are kept no longer are left out, and the indices
        `without`."""
        ...

    def groups_before(self, version: int, most: int) -> Iterable[TrajectoryGroup]:
        """The same groups themselves, the newest first, each read when it is asked for."""
        ...

    def resume(self, version: int) -> list[int]:
        """Back to a checkpoint of `version`, from where the same steps are taken again.

        Trained before it: stays trained. Newest token sampled after it: forgotten, to be attempted again, and so is everything
        in flight. Everything else that was leased or trained since then is ready again; so is what was dropped, if its newest
        token is of this very version, since the drop then came after the checkpoint. Returns what to attempt again, in rising
        order.
        """
        ...

    def flush(self) -> None:
        """Everything up to here survives a power cut too, where anything survives at all."""
        ...

    def close(self) -> None: ...
