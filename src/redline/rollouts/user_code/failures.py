"""What the user's code raises, as a `Failure` with the place in that code."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

from redline.errors import CallError, RedlineError, first_inner, in_words, shortened
from redline.telemetry.stalls.stacks import place_of, users_place
from redline.types import Failure

MAX_REASON = 2000
"""Characters of a failure's reason: it is stored with every attempt that failed so."""
MAX_PLACE = 500


def failure_of(stage: str, error: BaseException, function: Callable[..., Any] | None = None) -> Failure:
    """The failure that an error becomes, with the place in the user's code where it was raised; where that is none of theirs,
    the place of `function`. A group of errors has the place of the first in it. A long reason is shortened."""
    reason, error = shortened(in_words(error), MAX_REASON), first_inner(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = error.where if isinstance(error, CallError) and error.where else users_place(frames)
    if not where and isinstance(error, RedlineError):
        where = defined_at(function) if function else ""
    elif not where:
        where = place_of(frames)
    return Failure(stage, reason, shortened(where, MAX_PLACE), error.hint if isinstance(error, RedlineError) else "")


def defined_at(function: Callable[..., Any]) -> str:
    """`rewards.py:7, in score`; empty where it is not written in Python."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    if code is None:
        return ""
    frame = traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name, line="")
    return users_place(traceback.StackSummary.from_list([frame]))
