"""What `/metrics` says, in Prometheus' text format 0.0.4: the engine's counts, and histograms of what clients saw.

Everything but the engine's counts is written and read on the event loop, so nothing here locks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from redline.types import Completion, EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
TOKENS = tuple(float(2**power) for power in range(18))

ENGINE = {
    "running": ("gauge", "running", "Sequences that hold a row of the batch."),
    "waiting": ("gauge", "waiting", "Sequences that wait for a row or for blocks."),
    "batch_size": ("gauge", "batch_size", "Sequences that decoded in the last step."),
    "tokens_per_s": ("gauge", "tokens_per_second", "Tokens sampled per second, lately."),
    "kv_blocks_used": ("gauge", "kv_blocks_used", "Blocks of the key-value cache that sequences hold."),
    "kv_blocks_peak": ("gauge", "kv_blocks_peak", "Most blocks held at once since the last weight update."),
    "kv_blocks_peak_before": ("gauge", "kv_blocks_peak_before", "Most blocks held between the last two weight updates."),
    "kv_blocks_total": ("gauge", "kv_blocks", "Blocks of the key-value cache."),
    "version": ("gauge", "version", "Version of the weights."),
    "adapters": ("gauge", "adapters", "Resident LoRA adapters."),
    "steps": ("counter", "steps_total", "Steps of the engine."),
    "decode_steps": ("counter", "decode_steps_total", "Steps in which sequences decoded."),
    "decoded_rows": ("counter", "decoded_rows_total", "Sequences in those steps, summed."),
    "requests": ("counter", "requests_total", "Requests finished, aborted ones included."),
    "preemptions": ("counter", "preemptions_total", "Sequences put back because blocks ran out."),
    "prefix_query_tokens": ("counter", "prefix_query_tokens_total", "Prompt tokens looked up in the prefix cache."),
    "prefix_hit_tokens": ("counter", "prefix_hit_tokens_total", "Prompt tokens found in the prefix cache."),
    "prompt_tokens": ("counter", "prompt_tokens_total", "Prompt tokens computed."),
    "drafted_tokens": ("counter", "drafted_tokens_total", "Tokens guessed and verified."),
    "accepted_tokens": ("counter", "accepted_tokens_total", "Guessed tokens that were what was sampled."),
    "speculation_saved_s": ("gauge", "speculation_saved_seconds", "Seconds that guessed tokens saved, less what they took."),
    "generated_tokens": ("counter", "generated_tokens_total", "Tokens sampled."),
}
"""Field of the engine's stats → type, name after `redline_engine_`, meaning."""


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, name: str, meaning: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._meaning = meaning
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self) -> Iterator[str]:
        yield from _header(self._name, "histogram", self._meaning)
        below = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            below += count
            yield f'{self._name}_bucket{{le="{_number(bound)}"}} {below}'
        yield f"{self._name}_sum {_number(self._sum)}"
        yield f"{self._name}_count {below}"


class ServerMetrics:
    """What the server counts itself."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._finished: Counter[str] = Counter()
        self._first_token = Histogram(
            "redline_time_to_first_token_seconds", "From submission to the first token of a completion.", SECONDS
        )
        self._between_tokens = Histogram(
            "redline_inter_token_latency_seconds",
            "Between two tokens: a completion's mean, counted once per gap.",
            SECONDS,
        )
        self._request = Histogram("redline_request_seconds", "From the arrival of a served request to its last byte.", SECONDS)
        self._prompt_tokens = Histogram("redline_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._generation_tokens = Histogram("redline_generation_tokens", "Tokens of a completion.", TOKENS)

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """A request is over; 499 is a client that left early."""
        self._requests[endpoint, status] += 1
        if status == 200:
            self._request.observe(seconds)

    def generated(self, num_prompt_tokens: int, completions: Sequence[Completion]) -> None:
        """A prompt has all its completions."""
        self._prompt_tokens.observe(num_prompt_tokens)
        for completion in completions:
            tokens = len(completion.token_ids)
            self._finished[str(completion.finish_reason)] += 1
            self._generation_tokens.observe(tokens)
            self._first_token.observe(completion.first_token_s)
            if tokens > 1:
                self._between_tokens.observe(completion.decode_s / (tokens - 1), times=tokens - 1)

    def text(self, engine_stats: EngineStats) -> str:
        return "\n".join([*_engine_lines(engine_stats), *self._lines()]) + "\n"

    def _lines(self) -> Iterator[str]:
        by_request = {f'endpoint="{endpoint}",status="{status}"': n for (endpoint, status), n in self._requests.items()}
        by_reason = {f'finish_reason="{reason}"': n for reason, n in self._finished.items()}
        yield from _counter("redline_requests_total", "Requests by endpoint and HTTP status.", by_request)
        yield from _counter("redline_completions_total", "Completions by what ended them.", by_reason)
        for histogram in (
            self._first_token,
            self._between_tokens,
            self._request,
            self._prompt_tokens,
            self._generation_tokens,
        ):
            yield from histogram.lines()


def _engine_lines(stats: EngineStats) -> Iterator[str]:
    for field, (kind, name, meaning) in ENGINE.items():
        yield from _header(f"redline_engine_{name}", kind, meaning)
        yield f"redline_engine_{name} {_number(getattr(stats, field))}"


def _counter(name: str, meaning: str, values: Mapping[str, int]) -> Iterator[str]:
    yield from _header(name, "counter", meaning)
    for labels, value in sorted(values.items()):
        yield f"{name}{{{labels}}} {value}"


def _header(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(value)
