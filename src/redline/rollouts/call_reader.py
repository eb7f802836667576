"""Calls of tools in a text that grows."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from redline.rollouts.call_formats import CallFormat, FoundCalls, PublishedFormat, RawCall, UnreadableError, joined
from redline.rollouts.json_ends import JsonEnds


class CallReader(Protocol):
    """Reads calls from a text that grows: on any way of cutting it into pieces, what the format reads from the whole."""

    @property
    def calls(self) -> list[RawCall]:
        """Those that are complete so far; none where one cannot be read."""
        ...

    def push(self, text: str) -> None:
        """The text goes on."""
        ...

    def finish(self) -> tuple[str, list[RawCall]]:
        """The text is whole: what it says beside its calls, and the calls. Raises UnreadableError."""
        ...


def reader_of(format: CallFormat | PublishedFormat) -> CallReader:
    """What reads calls of a format."""
    return PublishedReader(format) if isinstance(format, PublishedFormat) else FindingReader(format)


class FindingReader:
    """Asks the format for the next call whenever the text has grown. Implements `CallReader`."""

    def __init__(self, format: CallFormat) -> None:
        self._format = format
        self._text = ""
        self._place = 0
        """Behind the last call that is settled."""
        self._ends = JsonEnds()
        self._outside: list[str] = []
        self._settled: list[RawCall] = []
        self._unsettled: list[RawCall] = []
        self._error: UnreadableError | None = None

    @property
    def calls(self) -> list[RawCall]:
        return [] if self._error else [*self._settled, *self._unsettled]

    def push(self, text: str) -> None:
        self._text += text
        self._unsettled = []
        try:
            while not self._error and (found := self._format.find(self._text, self._place, self._ends)):
                if not found.is_settled:
                    self._unsettled = found.calls
                    return
                self._take(found)
        except UnreadableError as error:
            self._error = error

    def finish(self) -> tuple[str, list[RawCall]]:
        if self._error is not None:
            raise self._error
        if not self._settled:
            return self._format.read(self._text)
        while found := self._format.find(self._text, self._place):
            self._take(found)
        return joined([*self._outside, self._text[self._place :]]), self._settled

    def _take(self, found: FoundCalls) -> None:
        self._outside.append(found.before)
        self._settled += found.calls
        self._place = found.place


class PublishedReader:
    """Has the tokenizer read the text whenever a further call is complete in the template's format, and at the end: only the
    whole is read for certain. Implements `CallReader`."""

    def __init__(self, format: PublishedFormat) -> None:
        self._format, self._written = format, FindingReader(format.written)
        self._text = ""
        self._num_written = 0
        self.calls: list[RawCall] = []

    def push(self, text: str) -> None:
        self._text += text
        self._written.push(text)
        count = len(self._written.calls)
        if count != self._num_written:
            self._num_written, self.calls = count, []
            with suppress(UnreadableError):
                self.calls = self._format.read(self._text)[1][:count]

    def finish(self) -> tuple[str, list[RawCall]]:
        return self._format.read(self._text)
