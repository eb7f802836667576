"""What is attempted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Message = Mapping[str, Any]
"""One message of a conversation: {"role": ..., "content": ...}, and `tool_calls` where the assistant called tools."""


@dataclass(slots=True, frozen=True)
class Task:
    """One problem to attempt."""

    id: str
    """Unique within its source; names the task in files and logs."""
    messages: Sequence[Message]
    """The conversation so far; the chat template renders it into the prompt."""
    answer: str = ""
    """The reference answer, where the task has one."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else its reward needs."""

    def own_copy(self) -> Task:
        """The task for one try at it, which may change its messages and data. Objects in them are shared (`plain_copy`)."""
        return replace(self, messages=plain_copy(self.messages), data=plain_copy(self.data))


def plain_copy(value: Any) -> Any:
    """The value with lists, dicts, sets and tuples copied at every depth. Texts, arrays and all other objects are shared, and
    so is a tuple of nothing else."""
    kind = type(value)
    if kind is dict:
        return {key: part if type(part) is str else plain_copy(part) for key, part in value.items()}
    if kind is list:
        return [plain_copy(part) if type(part) in _COPIED else part for part in value]
    if kind is tuple:
        copied = tuple([plain_copy(part) for part in value])
        return copied if any(new is not old for new, old in zip(copied, value, strict=True)) else value
    return set(value) if kind is set else value


_COPIED = frozenset((dict, list, tuple, set))
