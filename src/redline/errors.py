"""Every error redline raises on purpose, as one tree.

    RedlineError
    ├── ConfigError        a recipe, an override or a command line asks for something we cannot do
    ├── ModelError         a model folder is missing, damaged, or of a family we do not know
    ├── TaskError          a task source, a task or a reward function is unusable
    │   └── CallError                a call into an environment's code raised elsewhere, lasted too long, or lost its process
    ├── BudgetError        an attempt has no turns or tokens left; raised into the environment, which may catch it
    ├── EngineError        a request cannot be served as asked
    │   ├── BrokenModelError         the model gave numbers that cannot be sampled from
    │   ├── EngineMemoryError        the device had no memory to compute the request
    │   ├── EngineBusyError          others hold what the request needs, and will give it back
    │   └── EngineLostError          the process of an engine has ended, or does not answer
    ├── TrainingError      a step produced numbers that must not be trained on
    │   ├── NoRoomError              the trainer does not fit into the device's memory
    │   └── RankLostError            a process of the trainer was killed, ended with an error, or stands still
    ├── WeightSyncError    weights did not reach an engine, or it could not prove that it has them
    │   ├── ServerAwayError          a server that takes weights is not there, or does not answer
    │   └── TornWeightsError         an engine has part of one version and part of another
    ├── WireError          another process did not do what it was asked over a connection
    │   ├── WireClosed               it has ended the connection, or cannot be reached
    │   ├── WireTimeout              it did not answer in time
    │   └── PeerError                it answered with an error of its own
    ├── CompareError       a side of a comparison cannot be run, or a saved result cannot be read
    │   └── SideError                the process of a side ended without its answer, or gave none in time
    ├── TraceError         a profile of another program cannot be read, or is none
    └── RunFolderError     a run folder is missing, torn, or belongs to another run
        └── DamagedCheckpointError   one checkpoint cannot be read; another may do

A user's mistake reaches the terminal as the message, a blank line and `hint: <the fix>`; the exit code is 2. What is wrong
with us is an assert, and keeps its traceback.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class RedlineError(Exception):
    """A failure we understand: what happened, and what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message


class ConfigError(RedlineError):
    """A recipe, an override or a command line asks for something we cannot do."""


class ModelError(RedlineError):
    """A model folder is missing, damaged, or of a family we do not know."""


class TaskError(RedlineError):
    """A task source, a task or a reward function is unusable."""


class CallError(TaskError):
    """A call into an environment's code raised in another process, lasted too long, or lost the process it ran in."""

    def __init__(self, message: str, hint: str = "", where: str = "") -> None:
        super().__init__(message, hint)
        self.where = where
        """The place in the user's code: `game.py:7, in step: return 1 / 0`; empty where that is not known."""


class BudgetError(RedlineError):
    """An attempt has no turns or tokens left. `policy.say` raises it; an environment may catch it and end with a score."""


class EngineError(RedlineError):
    """A request cannot be served as asked."""


class BrokenModelError(EngineError):
    """The model gave numbers that cannot be sampled from; the request was not at fault."""


class EngineMemoryError(EngineError):
    """The device had no memory to compute the request; other requests go on."""


class EngineBusyError(EngineError):
    """Requests under way hold what this one needs; once they have ended, it can be served as asked."""


class EngineLostError(EngineError):
    """The process of an engine has ended, does not answer, or did not start."""


class GroupsLateError(RedlineError):
    """Every group takes longer than `buffer.group_timeout_s`."""


class TrainingError(RedlineError):
    """A step produced numbers that must not be trained on."""


class NoRoomError(TrainingError):
    """The trainer does not fit into the device's memory, however small its micro-batches are."""


class WeightSyncError(RedlineError):
    """Weights did not reach an engine, or it could not prove that it has them. It samples from its old version."""


class ServerAwayError(WeightSyncError):
    """A server that takes weights is not there, or does not answer. It may come back."""


class TornWeightsError(WeightSyncError):
    """An engine has part of one version and part of another, and cannot go back: it must not sample any more."""


class WireError(RedlineError):
    """Another process did not do what it was asked over a connection, or sent what is no frame."""


class WireClosed(WireError):  # noqa: N818  named for what happened
    """Another process has ended the connection, or cannot be reached."""


class WireTimeout(WireError):  # noqa: N818
    """Another process did not answer in time."""


class PeerError(WireError):
    """Another process answered with an error of its own, whose words it has."""

    def __init__(self, message: str, hint: str = "", kind: str = "") -> None:
        super().__init__(message, hint)
        self.kind = kind
        """The class of the error there."""


class RankLostError(TrainingError):
    """A process of the trainer was killed, ended with an error, or stands still; the message names it."""


class CompareError(RedlineError):
    """A side of a comparison cannot be run, or a saved result cannot be read."""


class SideError(CompareError):
    """The process of one side of a comparison ended without its answer, or gave none in time."""

    def __init__(self, message: str, hint: str = "", *, side: str = "", code: int | None = None) -> None:
        super().__init__(message, hint)
        self.side = side
        """The side's name."""
        self.code = code
        """Its exit code; None where it did not answer in time, and was killed."""


class TraceError(RedlineError):
    """A profile of another program cannot be read, or is none."""


class RunFolderError(RedlineError):
    """A run folder is missing, torn, or belongs to another run."""


class DamagedCheckpointError(RunFolderError):
    """One checkpoint cannot be read; another may do."""


@dataclass(slots=True)
class Caught:
    """What a `boundary` stopped; `error` is None while all is well."""

    error: Exception | None = None


@contextmanager
def boundary(*, lets_close: bool = False) -> Iterator[Caught]:
    """Stop whatever a user's code raises, so that the caller can record it as a `Failure`. The only broad `except` here.

    Not only errors: a `sys.exit()` in a reward, or the panic of a library, would end its thread without a word. Ctrl-C goes
    through; it reaches the main thread alone, so that a KeyboardInterrupt anywhere else is one that somebody raised. With
    `lets_close` a GeneratorExit goes through too: for a coroutine that awaits again after the block, and may be closed in it.
    """
    caught = Caught()
    try:
        yield caught
    except Exception as error:
        caught.error = error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        if isinstance(error, GeneratorExit) and lets_close:
            raise
        caught.error = no_end_of_the_program(error)


def no_end_of_the_program(error: BaseException) -> TaskError:
    """What somebody's code raised to end everything, as an error of that code alone, from the same place."""
    stopped = TaskError(in_words(error), "let it raise an error that is no end of the program")
    return stopped.with_traceback(first_inner(error).__traceback__)


def first_inner(error: BaseException) -> BaseException:
    """The first error of a group of errors (`asyncio.TaskGroup` raises one), and of groups in it; any other error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def for_a_future(error: BaseException) -> BaseException:
    """The error, in a form that a future takes: a StopIteration, which `next` raises at the end, would end the loop of all."""
    if not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError("StopIteration was raised: `next` found nothing more")
    wrapped.__cause__ = error
    return wrapped


def in_words(error: BaseException) -> str:
    """`ValueError: no number`; of an error of ours the message alone, which says it all. A group of errors is followed by the
    first error in it."""
    if isinstance(error, RedlineError):
        return error.message
    text = ""
    with boundary() as caught:  # the words are somebody's code as well
        text = str(error)
    said = f"its message raised {type(caught.error).__name__}" if caught.error else text
    inner = f": {in_words(first_inner(error))}" if isinstance(error, BaseExceptionGroup) else ""
    return f"{type(error).__name__}: {said}".removesuffix(": ") + inner


def shortened(text: str, most: int) -> str:
    """The text; of one that is longer than `most` characters its beginning and its end, and how much is left out between them.
    What no file can hold (half a character) is written as its number."""
    text = (
        text if len(text) <= most else f"{text[: most // 2]} … {len(text) - most:,} characters left out … {text[-most // 2 :]}"
    )
    return text.encode("utf-8", "backslashreplace").decode()
