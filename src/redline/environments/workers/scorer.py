"""Scores replies in a worker process, with the user's task source, which is made there once, before the first call.

ProcessWorkers.call("…scorer:score", source, task, text, first=("…scorer:make", source)) ──► what its `score` returns
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from redline.environments.workers.plain import as_floats
from redline.environments.workers.program import imported, load
from redline.types import Task


def make(source: Mapping[str, Any]) -> None:
    """Import the source's module and make the source, so that no call has to."""
    _made(json.dumps(source))


def score(source: Mapping[str, Any], task: Task, text: str) -> Any:
    """What the source's `score` returns, awaited where it is a coroutine, and its numbers as floats. `source` has its `path`,
    `folder` and `keywords`."""
    value = _made(json.dumps(source)).score(task, text)
    return as_floats(_loop().run_until_complete(value) if inspect.isawaitable(value) else value)


@lru_cache(maxsize=4)
def _made(source: str) -> Any:
    about = json.loads(source)
    load(about["path"], about["folder"])
    return imported(about["path"], about["folder"])(**about["keywords"])


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    """One for all calls: a client that was opened in a loop works in no other."""
    return asyncio.new_event_loop()
