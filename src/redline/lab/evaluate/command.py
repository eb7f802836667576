"""`redline eval`: find the models and the questions, ask, and keep what was found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from redline.errors import ConfigError
from redline.lab.evaluate.asked import asked_of, divide
from redline.lab.evaluate.policy import find_policy
from redline.launch.preflight import check_writable
from redline.telemetry import write_json
from redline.telemetry.files.durable import replace_file

if TYPE_CHECKING:
    from redline.lab.evaluate.figures import Document

DOCUMENT, ANSWERS = "eval.json", "answers.jsonl"


def evaluate(
    model: str, words: Sequence[str], against: str | None, tell: Callable[[str], None], saved_in: Path | None = None
) -> Document:
    """Ask one model, or two, the tasks that `words` name. What is wrong with the words, or with the folder that the document is
    to be `saved_in`, is said before torch is loaded; what is wrong with a task, before its model is."""
    if saved_in is not None:
        _refuse_taken(saved_in)
        check_writable(saved_in, "--save")
    tasks, overrides = divide(words)
    first = find_policy(model)
    policies = [first, *([find_policy(against)] if against is not None else [])]
    asked = [(policy, asked_of(policy, tasks, overrides, first)) for policy in policies]
    from redline.lab.evaluate.answers import Answering  # loads torch
    from redline.lab.evaluate.figures import Document

    answered = []
    for policy, recipes in asked:
        answering = Answering(policy, tell)
        answered.append([answering.answer(recipe) for recipe in recipes])
        del answering  # its memory, before the next is loaded
    document = Document.of(answered[0], answered[1] if len(answered) > 1 else [])
    if against is not None and (alone := len(answered[0]) - len(document.differences)):
        tell(f"{alone} task(s) without a difference: no question has a score of both models")
    return document


def save(document: Document, folder: Path) -> Path:
    """Write eval.json, and answers.jsonl with a row for each answer. Returns the first."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in document.answer_rows())
    replace_file(folder / ANSWERS, rows.encode())
    write_json(folder / DOCUMENT, document.as_json())
    return folder / DOCUMENT


def _refuse_taken(folder: Path) -> None:
    for name in (DOCUMENT, ANSWERS):
        if os.path.lexists(folder / name):
            raise ConfigError(
                f"--save = {str(folder)!r}: {folder / name} is there already, and is not overwritten",
                "give another folder, or remove it",
            )
