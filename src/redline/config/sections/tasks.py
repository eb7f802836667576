"""Section `rollouts.task`: where tasks and their rewards come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from redline.config.section import LocalPath, Section


class ReasoningGymTask(Section):
    kind: Literal["reasoning_gym"]
    """Procedural puzzles with checkable answers."""
    dataset: str
    """A data set of the reasoning_gym package, such as `chain_sum`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Its own parameters, such as `{min_terms: 2, max_terms: 2}`."""
    extract: Literal["last_number", "text"] = "last_number"
    """What of the answer is scored."""
    held_out_fraction: float = Field(0.2, gt=0, lt=1)
    """Share of the distinct questions kept for evaluation, chosen by a hash of the question."""


class JsonlTask(Section):
    kind: Literal["jsonl"]
    """Prompts and reference answers from a file."""
    path: LocalPath
    """A file with one JSON object per line."""
    prompt_field: str = "prompt"
    """Holds a string, or a list of chat messages."""
    answer_field: str = "answer"
    """Holds the reference answer, a string or a number."""
    extract: Literal["last_number", "text"] = "text"
    """What of the answer must equal the reference, after trimming."""
    held_out_fraction: float = Field(0.1, gt=0, lt=1)
    """Share of the distinct prompts kept for evaluation, chosen by a hash of the prompt."""


class ImportTask(Section):
    kind: Literal["import"]
    """A task source of your own."""
    path: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """`package.module:ClassOrFunction`; called with `params` and `seed`, gives an object with `train`, `held_out` and
    `score` (see `redline.ports.TaskSource`)."""
    folder: LocalPath | None = None
    """Where the module is looked for when it is not an installed package; null is the folder in which redline is called."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""


TaskConfig = Annotated[ReasoningGymTask | JsonlTask | ImportTask, Field(discriminator="kind")]
