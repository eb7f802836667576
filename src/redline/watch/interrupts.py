"""Signals that end a run: Ctrl-C, SIGTERM, a terminal that was closed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from redline.telemetry import RunFolder
from redline.watch.awake import staying_awake
from redline.watch.checkpoints import checkpoints


class Interrupts:
    """Remembers the first signal that asks the run to stop."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.requested = False
        self._is_told = False
        self._listened_to: list[signal.Signals] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block the first Ctrl-C, SIGTERM or SIGHUP (its terminal was closed) asks the run to end after the step in
        flight; the second, of any kind, ends the process at once. A run under nohup, which ignores SIGHUP, still ignores it."""
        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            wanted.append(signal.SIGHUP)
        self._listened_to = wanted
        before = {number: signal.signal(number, self._request_stop) for number in wanted}
        try:
            with staying_awake(self._tell_once):
                yield
        finally:
            self._tell_once()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        """Prints nothing: the main thread may be in the middle of a line."""
        self.requested = True
        for each in self._listened_to:
            signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)

    def _tell_once(self) -> None:
        if self.requested and not self._is_told:
            self._is_told = True
            self._tell("stopping after this step; once more stops at once")


@contextmanager
def saying_how_to_continue(folder: RunFolder) -> Iterator[None]:
    """Print the command that continues the run when a second Ctrl-C, or one during the set-up, ends it at once. What the disk
    refuses gets it as a note. A run that comes to a stop by itself says it in its summary."""
    try:
        yield
    except KeyboardInterrupt:
        if folder.config.exists():
            Console(stderr=True, highlight=False).print(
                f"stopped at once; continue {_where(folder)} with: redline train {folder.shown} --resume", soft_wrap=True
            )
        raise
    except OSError as error:
        if folder.config.exists():
            error.add_note(f"then go on {_where(folder)} with: redline train {folder.shown} --resume")
        raise


def _where(folder: RunFolder) -> str:
    newest = next(iter(checkpoints(folder)), None)
    return f"after {newest.name}" if newest else "at its first step"
