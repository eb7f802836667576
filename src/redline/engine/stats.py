"""What an engine did between two moments, and how fast it is."""

from __future__ import annotations

from redline.types import EngineStats


def metrics_between(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Metrics of what an engine did from `before` to `after`: from the end of one training step to that of the next. An engine
    beside a trainer works on between the update of its weights and the step's end, so that the peak covers both sides of it."""
    queried = after.prefix_query_tokens - before.prefix_query_tokens
    hits = after.prefix_hit_tokens - before.prefix_hit_tokens
    decode_steps = after.decode_steps - before.decode_steps
    drafted = after.drafted_tokens - before.drafted_tokens
    guessed = {
        "engine/drafted_tokens": drafted,
        "engine/accepted_rate": (after.accepted_tokens - before.accepted_tokens) / max(1, drafted),
        "engine/speculation_saved_s": after.speculation_saved_s - before.speculation_saved_s,
    }
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
        "engine/kv_use_peak": max(after.kv_blocks_peak_before, after.kv_blocks_peak) / after.kv_blocks_total,
        **(guessed if after.drafted_tokens else {}),
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
