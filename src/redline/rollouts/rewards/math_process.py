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
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""Braces, and what a backslash makes no brace."""


@lru_cache(maxsize=256)
def read(text: str) -> list[Any]:
    """The expressions that math-verify finds in the last box after the thoughts; without a box, in what follows `####`, as in
    GSM8K. A text without words is an expression as it stands, also without dollar signs. An equation between numbers that does
    not hold says nothing: 6 = 7 is not 7."""
    found = _parsed(_said_last(text))
    return [] if found and _is_false(found[0]) else found


def _said_last(text: str) -> str:
    r"""math-verify would read two boxes as a set, and \boxed{8}, no, \boxed{7} is not {7, 8}."""
    text = text.rpartition("</think>")[2]
    start = text.rfind("\\boxed{")
    while start >= 0:
        if end := _closing(text, start + len("\\boxed")):
            return text[start : end + 1]
        start = text.rfind("\\boxed{", 0, start)  # a reply may be cut off in the middle of its last box
    return text.rpartition("####")[2].strip()


def _closing(text: str, start: int) -> int:
    """Where the brace closes that opens at `start`; 0 where it does not."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.start()
    return 0


def _is_false(found: Any) -> bool:
    is_equation = getattr(found, "rel_op", None) == "==" and not found.free_symbols
    return is_equation and not verify([found.lhs], [found.rhs], timeout_seconds=None)


def _parsed(text: str) -> list[Any]:
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
    if sys.platform != "darwin":  # which refuses every limit on addresses
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
