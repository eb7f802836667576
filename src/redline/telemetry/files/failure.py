"""`failure.json`: why the last process of a run ended with an error, for those who look at the folder later."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from redline.errors import RedlineError
from redline.telemetry.files.durable import write_json
from redline.telemetry.files.metrics import MetricsLog
from redline.telemetry.files.run_folder import RunFolder


@dataclass(slots=True, frozen=True)
class RunFailure:
    """What ended a run."""

    error: str
    """The name of the exception's class."""
    message: str
    hint: str
    """What to do about it; empty where redline does not know."""
    traceback: str
    step: int
    """Steps in `metrics.jsonl` when it happened."""
    time: float
    """Seconds since 1970."""

    @property
    def line(self) -> str:
        """One line for a person."""
        first = self.message.strip().partition("\n")[0]
        named = first if self.hint else f"{self.error}: {first}" if first else self.error
        return f"failed {f'after step {self.step}' if self.step else 'before its first step'}: {named}"


@contextmanager
def recording_failure(folder: RunFolder, *, is_resumed: bool = False) -> Iterator[Callable[[], None]]:
    """Forget an earlier failure, and write down the exception that leaves the block. The exception goes on; an interrupt is no
    failure. A folder that has no config.json and no step by then is no run: it is removed. A disk that takes no record does not
    hide the exception.

    A run that `is_resumed` is only looked at until the block calls the function that it gets: up to there a `RedlineError` is a
    refusal, and the folder stays as it is, with the failure that an earlier process recorded."""
    is_taken_up = False

    def take_up() -> None:
        nonlocal is_taken_up
        folder.failure.unlink(missing_ok=True)
        is_taken_up = True

    if not is_resumed:
        take_up()
    try:
        yield take_up
    except BaseException as error:
        if not folder.config.exists() and not folder.has_steps:
            shutil.rmtree(folder.path, ignore_errors=True)
        elif isinstance(error, RedlineError) and not is_taken_up:
            pass
        elif isinstance(error, Exception):
            record_failure(folder, error)
        raise


@contextmanager
def recording_at_once(folder: RunFolder) -> Iterator[None]:
    """Write down the exception that leaves the block before anything is closed: a launcher may end the process meanwhile."""
    try:
        yield
    except Exception as error:
        record_failure(folder, error)
        raise


def record_failure(folder: RunFolder, error: Exception) -> None:
    """Write down what ends the process. A disk that takes no record changes nothing."""
    with suppress(OSError, ValueError):
        write_json(folder.failure, asdict(_described(error, folder)))


def read_failure(folder: RunFolder) -> RunFailure | None:
    """What the last process of the run recorded; None where it recorded nothing, or nothing that can be read."""
    try:
        found = json.loads(folder.failure.read_text())
        return RunFailure(**found)
    except (OSError, ValueError, TypeError):
        return None


def steps_logged(folder: RunFolder) -> int:
    """The last step in `metrics.jsonl`; 0 where there is none."""
    with suppress(OSError):
        return MetricsLog.last_step(folder.metrics)
    return 0


def _described(error: Exception, folder: RunFolder) -> RunFailure:
    known = error if isinstance(error, RedlineError) else None
    return RunFailure(
        error=type(error).__name__,
        message=known.message if known else str(error),
        hint=known.hint if known else "",
        traceback="".join(traceback.format_exception(error)),
        step=steps_logged(folder),
        time=time.time(),
    )
