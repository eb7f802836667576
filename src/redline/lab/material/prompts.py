"""What the engines are asked: random tokens of a given length, or short questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from redline.rollouts import Chat
from redline.types import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = (
    "What is {}?",
    "Tell me one surprising fact about {}.",
    "Explain {} to a child in three sentences.",
    "Who made {} popular, and when?",
    "Write a short poem about {}.",
    "List five words that have to do with {}.",
    "Why do people care about {}?",
    "How would you describe {} to somebody who has never heard of it?",
)
SUBJECTS = ("the sea", "bicycles", "photosynthesis", "chess", "the French Revolution", "bread", "prime numbers", "jazz music")


def random_prompts(count: int, length: int, vocab_size: int, key: Sequence[int]) -> list[np.ndarray]:
    """int32[length] each, the same for the same `key`. The lowest ids, often special tokens, are left out."""
    lowest = min(10, vocab_size - 1)
    drawn = np.random.default_rng(list(key)).integers(lowest, vocab_size, (count, length), dtype=np.int32)
    return list(drawn)


def question_prompts(count: int, tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """`count` different questions in the model's own chat template."""
    chat = Chat(tokenizer, None, "")
    return [chat.prompt_ids(Task(f"question/{i}", [{"role": "user", "content": question(i)}])) for i in range(count)]


def question(index: int) -> str:
    form, subject = FORMS[index % len(FORMS)], SUBJECTS[index // len(FORMS) % len(SUBJECTS)]
    again = index // (len(FORMS) * len(SUBJECTS))
    return form.format(subject) + (f" (Answer number {again + 1}.)" if again else "")
