"""redline: reinforcement-learning post-training for language models, as fast as the hardware allows.

    run = redline.train("recipes/demo.yaml", {"run.steps": 20})    # as `redline train`, with the same checks and files
    run.metrics().to_pandas()                                      # also: Run.open("runs/demo-001")

    with redline.Engine.load(run.model) as engine:
        print(engine.chat([{"role": "user", "content": "What is 2 + 3?"}]).text)

    with redline.span("my part"):                                  # in the ledger and the trace of the run it belongs to
        ...

Everything is loaded when it is first used: `import redline` by itself imports nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redline.api.engine import Engine, Reply
    from redline.api.train import train
    from redline.environments.schemas import schema_of
    from redline.environments.tools import ToolEnvironment, tool
    from redline.errors import BudgetError, RedlineError
    from redline.ports import Environment, Game, Policy, TaskSource
    from redline.rollouts.tasks.held_out import split_held_out
    from redline.runs import Run
    from redline.telemetry.spans import user_span as span
    from redline.types import Reaction, ReplySoFar, Task, ToolCall, Turn

__version__ = "0.1.0"
__all__ = [
    "BudgetError",
    "Engine",
    "Environment",
    "Game",
    "Policy",
    "Reaction",
    "RedlineError",
    "Reply",
    "ReplySoFar",
    "Run",
    "Task",
    "TaskSource",
    "ToolCall",
    "ToolEnvironment",
    "Turn",
    "__version__",
    "schema_of",
    "span",
    "split_held_out",
    "tool",
    "train",
]

_HOME = {
    "BudgetError": ("redline.errors", "BudgetError"),
    "Engine": ("redline.api.engine", "Engine"),
    "Environment": ("redline.ports", "Environment"),
    "Game": ("redline.ports", "Game"),
    "Policy": ("redline.ports", "Policy"),
    "Reaction": ("redline.types", "Reaction"),
    "RedlineError": ("redline.errors", "RedlineError"),
    "Reply": ("redline.api.engine", "Reply"),
    "ReplySoFar": ("redline.types", "ReplySoFar"),
    "Run": ("redline.runs", "Run"),
    "Task": ("redline.types", "Task"),
    "TaskSource": ("redline.ports", "TaskSource"),
    "ToolCall": ("redline.types", "ToolCall"),
    "ToolEnvironment": ("redline.environments.tools", "ToolEnvironment"),
    "Turn": ("redline.types", "Turn"),
    "schema_of": ("redline.environments.schemas", "schema_of"),
    "span": ("redline.telemetry.spans", "user_span"),
    "split_held_out": ("redline.rollouts.tasks.held_out", "split_held_out"),
    "tool": ("redline.environments.tools", "tool"),
    "train": ("redline.api.train", "train"),
}
"""Public name → the module that has it, and its name there."""


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'redline' has no attribute {name!r}")
    module, inside = _HOME[name]
    globals()[name] = found = getattr(importlib.import_module(module), inside)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
