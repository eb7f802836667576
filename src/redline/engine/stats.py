"""What an engine says of itself after every step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class EngineStats:
    """Now, and since the engine was made."""

    running: int = 0
    """Sequences that hold a row."""
    waiting: int = 0
    kv_blocks_used: int = 0
    """Held by sequences; cached blocks that no sequence holds are free."""
    kv_blocks_total: int = 1
    kv_blocks_peak: int = 0
    """Most held at once since the last weight update."""
    batch_size: int = 0
    """Sequences that decoded in the last step."""
    tokens_per_s: float = 0.0
    """Sampled, over the last second or so of steps."""
    version: int = 0
    steps: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    """Computed; those found in the prefix cache are not among them."""
    generated_tokens: int = 0
    requests: int = 0
    """Finished, aborted ones included."""
    adapters: int = 0
    """Resident LoRA adapters."""
    decode_steps: int = 0
    """In which sequences decoded; a launch of several counts as several."""
    decoded_rows: int = 0
    """The sum of those steps' batch sizes."""
    kv_blocks_peak_before: int = 0
    """Most held at once between the last two weight updates."""

    @property
    def kv_use(self) -> float:
        """kv_blocks_used / kv_blocks_total."""
        return self.kv_blocks_used / self.kv_blocks_total

    @property
    def prefix_hit_rate(self) -> float:
        """prefix_hit_tokens / prefix_query_tokens."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


def metrics_between(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """What happened in between, as the row of a training step has it. Such a step ends with a weight update."""
    queried = after.prefix_query_tokens - before.prefix_query_tokens
    hits = after.prefix_hit_tokens - before.prefix_hit_tokens
    decode_steps = after.decode_steps - before.decode_steps
    return {
        "engine/steps": after.steps - before.steps,
        "engine/batch_size_mean": (after.decoded_rows - before.decoded_rows) / max(1, decode_steps),
        "engine/running": after.running,
        "engine/waiting": after.waiting,
        "engine/prompt_tokens": after.prompt_tokens - before.prompt_tokens,
        "engine/generated_tokens": after.generated_tokens - before.generated_tokens,
        "engine/prefix_hit_rate": hits / max(1, queried),
        "engine/preemptions": after.preemptions - before.preemptions,
        "engine/kv_use": after.kv_use,
        "engine/kv_use_peak": after.kv_blocks_peak_before / after.kv_blocks_total,
    }


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
