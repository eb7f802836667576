"""From what the policy said to one number."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from redline.errors import TaskError
from redline.ports import TaskSource
from redline.say_arguments import MAX_NAME
from redline.types.numbers import LARGEST, in_float32

Extract = Literal["last_number", "text", "answer_tag"]

# A minus that follows a digit, a letter or a bracket is an operator or a hyphen (3-5, x-5, step-2), not a sign. A comma
# belongs to the number only where it separates thousands. A point begins a number where no word or other point is before it,
# and 1e5 ends where a word would.
_NUMBER = re.compile(
    r"(?:(?<![\w)])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.)])\.\d+)(?:[eE][+-]?\d{1,3}(?!\w))?", re.ASCII
)

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

REWARD_WORKERS = 8
"""Threads that may score at once where the task source says that they may, and the recipe says nothing."""
REWARD_MODEL_PART = "reward_model"
"""What a reward model's score is called among the parts of a reward, and in `rollouts.reward_weights`."""
OVERLONG_PART = "overlong"
"""What the penalty of `rollouts.overlong_fraction` is called among them."""
NUMBER_PART = "reward"
"""What a `score` that is one number is called among them."""
MAX_PARTS = 64
"""Named parts of one reward: each is a metric."""
EXPECTED = 'end `{}` with `return 1.0`, or with `return {{"correct": 1.0, "format": 0.5}}`'
"""`{}` is the function that returned something else."""


def extract_answer(text: str, how: Extract) -> str | None:
    """The part of an answer that is scored; None when the text has no such part."""
    if how == "last_number":
        numbers = find_numbers(text)
        return numbers[-1] if numbers else None
    if how == "text":
        return text.strip()
    if how == "answer_tag":
        tagged = _ANSWER_TAG.findall(text)
        return tagged[-1].strip() if tagged else None
    raise TaskError(f"extract = {how!r}: no such way to read an answer", "one of last_number, text, answer_tag")


def find_numbers(text: str) -> list[str]:
    """Every number in a text, without commas: -1,234.5, .5 and 1e5 are one each, 1/2 and 3:30 are two."""
    return [number.replace(",", "") for number in _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))]


def max_reward_workers(wanted: int | None, tasks: TaskSource) -> int:
    """Threads that may call `tasks.score` at once, or wait for it. A source says what it can bear with `score_is_thread_safe`,
    True or False; one that says nothing is called by one thread, unless the recipe has a number."""
    is_safe = getattr(tasks, "score_is_thread_safe", None)
    if wanted is None:
        return REWARD_WORKERS if is_safe else 1
    if wanted > 1 and is_safe is not None and not is_safe:
        raise TaskError(
            f"rollouts.max_reward_workers = {wanted}: {type(tasks).__name__} says that its `score` is not thread-safe",
            "leave the key out, or set it to 1",
        )
    return wanted


def reward_parts(score: object, what: str = "score") -> dict[str, float]:
    """The named parts of what `score`, or the function called `what`, returned, as floats; a number by itself is the part
    `reward`. Raises TaskError where it is neither, has no parts, or holds what the trainer's float32 has no number for: a NaN
    would reach every weight."""
    if isinstance(score, Mapping):
        if not score:
            raise TaskError(f"`{what}` returned {{}}, a reward without parts", EXPECTED.format(what))
        if len(score) > MAX_PARTS:
            raise TaskError(f"`{what}` returned {len(score)} named parts; {MAX_PARTS} are the most", "add some of them up")
        return {_part_name(name, what): _part_value(name, value, what) for name, value in score.items()}
    if not _is_number(score):
        raise TaskError(f"`{what}` returned {_shown(score)}; it must return a number, or named numbers", EXPECTED.format(what))
    return {NUMBER_PART: _part_value(NUMBER_PART, score, what)}


def _part_name(name: object, what: str) -> str:
    if isinstance(name, str) and len(name) <= MAX_NAME:
        return name
    if isinstance(name, str):
        hint = f"a name has at most {MAX_NAME} characters: it is that of a metric"
        raise TaskError(f"`{what}` returned a part whose name has {len(name):,} characters: {name[:60]!r}…", hint)
    raise TaskError(f"`{what}` returned a part called {_shown(name)}; names are texts", EXPECTED.format(what))


def _part_value(name: object, value: Any, what: str) -> float:
    if not _is_number(value):
        raise TaskError(f"`{what}` returned {name} = {_shown(value)}; each part must be a number", EXPECTED.format(what))
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except OverflowError:  # a whole number of hundreds of digits
        number = math.inf if value > 0 else -math.inf
    return finite(f"reward part {name}", number, what)


def with_part(parts: Mapping[str, float], name: str, value: float, whose: str) -> dict[str, float]:
    """The parts of a task's reward and one of ours. Raises TaskError where the task has one of that name."""
    if name in parts:
        raise TaskError(f"`score` returned a part called {name}, which is the name of {whose}", "call that part something else")
    return {**parts, name: finite(f"reward part {name}", value)}


def finite(what: str, value: float, function: str = "score") -> float:
    """The value as it is stored and trained on. Raises TaskError where float32 has no number for it."""
    if not abs(value) <= LARGEST:  # a NaN is not
        small = "" if math.isnan(value) or math.isinf(value) else f", too large for float32, which ends at {LARGEST:.3g}"
        raise TaskError(f"{what} = {value!r}: not a finite number{small}", f"make `{function}` return finite numbers")
    return in_float32(value)


def _is_number(value: object) -> bool:
    """Numbers of Python and NumPy, and tensors and arrays that hold a single one."""
    return hasattr(type(value), "__float__") and math.prod(getattr(value, "shape", ())) == 1


def _shown(value: object) -> str:
    """`None`, or `'a text', a str`; short."""
    if value is None:
        return "None"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'}, a {type(value).__name__}"


def overlong_penalty(length: int, max_new_tokens: int, fraction: float) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), with L_max = max_new_tokens and L_cache = fraction · L_max:

    0                                       |y| ≤ L_max - L_cache
    ((L_max - L_cache) - |y|) / L_cache     in between, down to -1 at |y| = L_max
    """
    cache = fraction * max_new_tokens
    return min(0.0, (max_new_tokens - cache - length) / cache)


def total_reward(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Σ weight · part; a part without a weight weighs 1. Raises TaskError where a part is missing that has one."""
    unknown = [name for name in weights if name not in parts]
    if unknown:
        raise TaskError(
            f"rollouts.reward_weights.{unknown[0]}: the task's reward has no such part",
            f"its parts: {', '.join(parts) or 'none'}; every score must name all of them",
        )
    return finite("the weighted sum of the reward", float(sum(weights.get(name, 1.0) * value for name, value in parts.items())))
