"""Where JSON ends in a text that grows."""

from __future__ import annotations

import re

MARKS = re.compile(r'["\\{}\[\]]')
"""All that decides where an object or a list ends."""


NO_SPACE = re.compile(r"\S")


def past_spaces(text: str, place: int) -> int:
    """The first place from `place` on where no space stands."""
    found = NO_SPACE.search(text, place)
    return found.start() if found else len(text)


class JsonEnds:
    """Finds the end of one object or list after the other. Looks at each character once."""

    def __init__(self) -> None:
        self._begin(-1)

    def _begin(self, start: int) -> None:
        self._start = self._place = start
        self._depth, self._in_string = 0, False
        self._end: int | None = None

    def find(self, text: str, start: int) -> int | None:
        """The place behind the object or list that begins at `start`, or after spaces there; None where it goes on, or where
        there is none. `text` has only grown since it was last asked. What is no JSON has an end where its brackets do."""
        start = past_spaces(text, start)
        if text[start : start + 1] not in ("{", "["):
            return None
        if start != self._start:
            self._begin(start)
        if self._end is None:
            self._look_on(text)
        return self._end

    def _look_on(self, text: str) -> None:
        while mark := MARKS.search(text, self._place):
            self._place = mark.end()
            if self._in_string:
                self._in_string = mark[0] != '"'
                self._place += mark[0] == "\\"  # what follows is a part of the string, a quote too
            elif mark[0] == '"':
                self._in_string = True
            elif mark[0] != "\\":
                self._depth += 1 if mark[0] in "{[" else -1
                if not self._depth:
                    self._end = self._place
                    return
        self._place = max(self._place, len(text))
