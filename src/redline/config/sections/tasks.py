"""Section `rollouts.task`: where tasks and their rewards come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from redline.config.section import FreeMapping, LocalPath, Section


class ReasoningGymTask(Section):
    kind: Literal["reasoning_gym"]
    """Procedural puzzles with checkable answers."""
    dataset: str
    """A data set of the reasoning_gym package, such as `chain_sum`."""
    params: FreeMapping = Field(default_factory=dict)
    """Its own parameters, such as `{min_terms: 2, max_terms: 2}`."""
    extract: Literal["auto", "last_number", "text", "answer_tag"] = "auto"
    """What of the answer is scored: all of it, the last number, or what is inside the last `<answer>` tag. auto is the last
    number for a data set whose answers are numbers, else all of it."""
    held_out_fraction: float = Field(0.2, gt=0, lt=1)
    """Share of the distinct questions kept for evaluation, chosen by a hash of the question."""


class FileTask(Section):
    kind: Literal["file"]
    """Prompts and reference answers from files."""
    path: LocalPath
    """A file (.jsonl, .parquet, .arrow), a folder of such files, or a folder that `datasets` has saved (`save_to_disk`)."""
    split: str | None = None
    """Which split of a folder is trained on; null is `train`, or the only one."""
    held_out_split: str | None = None
    """Which split is kept for evaluation; null keeps `held_out_fraction` of the one that is trained on."""
    prompt_field: str = "prompt"
    """Holds a string, or a list of chat messages. A field inside another is `outer.inner`."""
    answer_field: str | None = "answer"
    """Holds the reference answer, a string or a number. null: rows have none, and the environment, or a reward model, says what
    a reply is worth."""
    extract: Literal["last_number", "text", "answer_tag", "math"] = "text"
    """What of the answer must equal the reference: all of it, the last number, what is inside the last `<answer>` tag, or by
    value what math-verify finds in it, such as `\\boxed{\\frac{1}{2}}` (extra `math`)."""
    held_out_fraction: float = Field(0.1, gt=0, le=1)
    """Share of the distinct prompts kept for evaluation, chosen by a hash of the prompt. 1 keeps all, for `redline eval`: there
    is nothing to train on then."""


class ImportTask(Section):
    kind: Literal["import"]
    """A task source of your own."""
    path: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """`package.module:ClassOrFunction`; called with `params` and `seed`, gives an object with `train`, `held_out` and
    `score` (see `redline.ports.TaskSource`)."""
    folder: LocalPath | None = None
    """Where the module is looked for when it is not an installed package; null is the folder in which redline is called."""
    params: FreeMapping = Field(default_factory=dict)
    """Keyword arguments for it."""


TaskConfig = Annotated[ReasoningGymTask | FileTask | ImportTask | None, Field(discriminator="kind")]
