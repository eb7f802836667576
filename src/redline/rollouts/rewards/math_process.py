"""The process that compares mathematical answers: a question per line of its input, a verdict per line of its output.

    {"reference": "1/2", "answer": "so \\boxed{0.5}"}  →  {"equal": true}, or {"unread": true} where the reference is none

Run as `python -m redline.rollouts.rewards.math_process SECONDS BYTES`. A question that takes longer ends the process.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

_COMMAND = re.compile(r"\\(?:text|mathrm|begin|end)\{[^}]*\}|\\[A-Za-z]+")
_WORDS = re.compile(r"[A-Za-z]{3,}|[A-Za-z]\s+[A-Za-z\d]")
"""Prose: `the`, `it is`, `is 5`; not `xy + 1`."""
_ARITHMETIC = re.compile(r"[-\d.,+*/% ]*")
"""math-verify reads it as it stands; between dollar signs 1,000 would be a pair."""


@lru_cache(maxsize=256)
def read(text: str) -> list[Any]:
    """The expressions that math-verify finds. A text without words is one as it stands, also without dollar signs; of a
    solution as GSM8K has it, what follows `####` counts."""
    text = text.rpartition("####")[2].strip()
    is_marked = "$" in text or "\\boxed" in text
    is_formula = not is_marked and not _ARITHMETIC.fullmatch(text) and not _WORDS.search(_COMMAND.sub("", text))
    found: list[Any] = parse(f"${text}$", parsing_timeout=None) if is_formula else []
    return found or parse(text, parsing_timeout=None)


def verdict(reference: str, answer: str) -> dict[str, bool]:
    """What is written to the output."""
    expected = read(reference)
    if not expected:
        return {"unread": True}
    return {"equal": verify(expected, read(answer), timeout_seconds=None)}


def main(limit_s: int, limit_bytes: int) -> None:
    logging.disable()  # math-verify warns that it has no limit of its own
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        # The default action of SIGALRM ends the process, also in the middle of one long multiplication.
        signal.alarm(limit_s)
        try:
            found = verdict(question["reference"], question["answer"])
        except RecursionError:  # brackets in brackets in brackets
            found = {"equal": False}
        signal.alarm(0)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
