"""A task of your own: spell a made-up word backwards. Any class with these three methods will do.

In a recipe, in place of the demo's task:

    rollouts:
      task:
        kind: import
        path: custom_task:ReverseWord
        params: {length: 4, held_out_fraction: 0.1}

Start redline in the folder that holds this file (or install it as a package). Without a recipe of your own:

    cd examples
    ../.venv/bin/redline train ../recipes/demo.yaml 'rollouts.task={kind: import, path: custom_task:ReverseWord}'
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from random import Random

from redline import Task, split_held_out


class ReverseWord:
    """Called with the run's seed and the recipe's `params`."""

    def __init__(self, seed: int, length: int = 4, held_out_fraction: float = 0.1) -> None:
        letters = ["bcdfghjklmnpqrstvwxz" if i % 2 == 0 else "aeiou" for i in range(length)]
        words = ["".join(word) for word in product(*letters)]
        # By content, so that no evaluation asks what training has shown.
        self._train, self._held_out = split_held_out(words, held_out_fraction)
        Random(seed).shuffle(self._train)

    def train(self, index: int) -> Task:
        """Number `index` of an endless supply; the same index gives the same task, or a resumed run would go astray."""
        return self._task(self._train[index % len(self._train)])

    def held_out(self, count: int) -> Sequence[Task]:
        return [self._task(word) for word in self._held_out[:count]]

    def score(self, task: Task, text: str) -> Mapping[str, float]:
        """The share of letters in their place: partial credit lets a group differ before any attempt is right."""
        words = re.findall("[a-z]+", text.lower())
        answer = words[-1] if words else ""
        in_place = sum(ours == right for ours, right in zip(answer, task.answer, strict=False))
        return {"letters_in_place": in_place / max(len(answer), len(task.answer))}

    def _task(self, word: str) -> Task:
        question = f"Spell the word '{word}' backwards. Answer with the reversed word only."
        return Task(id=word, messages=[{"role": "user", "content": question}], answer=word[::-1])
