"""What an engine says of itself after every step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class EngineStats:
    """Now, and since the engine was made."""

    running: int
    """Sequences that hold a row."""
    waiting: int
    kv_blocks_used: int
    """Held by sequences; cached blocks nobody holds are free."""
    kv_blocks_total: int
    batch_size: int
    """Sequences that decoded in the last step."""
    tokens_per_s: float
    """Sampled, over the last second or so of steps."""
    version: int
    steps: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prompt_tokens: int
    """Computed; those found in the prefix cache are not among them."""
    generated_tokens: int
    requests: int
    """Finished, aborted ones included."""
    adapters: int = 0
    """Resident LoRA adapters."""

    @property
    def kv_use(self) -> float:
        """kv_blocks_used / kv_blocks_total."""
        return self.kv_blocks_used / self.kv_blocks_total

    @property
    def prefix_hit_rate(self) -> float:
        """prefix_hit_tokens / prefix_query_tokens."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


class Rate:
    """Events per second over a sliding window of about a second."""

    def __init__(self, window_s: float = 1.0) -> None:
        self._window_s = window_s
        self._marks: list[tuple[float, int]] = []

    def add(self, now: float, total: int) -> None:
        """`total` counts all events so far."""
        self._marks.append((now, total))
        while len(self._marks) > 2 and self._marks[1][0] < now - self._window_s:
            self._marks.pop(0)

    @property
    def per_s(self) -> float:
        if len(self._marks) < 2:
            return 0.0
        (begin, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - begin) if end > begin else 0.0
