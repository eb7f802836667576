"""What a power may order in a phase, in the forms that prompts and parsing need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

WAIVE = "WAIVE"


@dataclass(frozen=True)
class Options:
    """The legal orders of one power in one phase."""

    kind: str
    """move, retreat, build or disband."""
    due: int
    """Orders that are expected: one per unit that may act, or as many builds or disbands as are due."""
    by_subject: Mapping[str, Sequence[str]] = field(hash=False)
    """Subject → its legal orders, both sorted. The subject is a unit (`A PAR`), for builds a site (`PAR`). `WAIVE` is legal
    beside them where there is something to build."""

    @cached_property
    def subject_of(self) -> Mapping[str, str]:
        """Legal order → its subject."""
        return {order: subject for subject, orders in self.by_subject.items() for order in orders}

    def orders(self) -> Iterator[str]:
        """Every legal order."""
        for orders in self.by_subject.values():
            yield from orders
        if self.kind == "build":
            yield WAIVE


Legal = Mapping[str, Options]
"""Power → its options; powers with nothing to order are left out."""
