"""What callers get of a sequence."""

from __future__ import annotations

import time

import numpy as np

from redline.engine.native.sequence import Sampled, Sequence
from redline.types import Completion, Delta, TopLogprobs, VersionSpan

NOTHING = Sampled.nothing()


def delta_of(sequence: Sequence, sampled: Sampled, completion: Completion | None) -> Delta:
    """What it sampled since the last piece; only the completion where no caller streams."""
    if not sequence.streaming:
        return Delta(sequence.index, NOTHING.token_ids, NOTHING.logprobs, None, completion)
    begin, sequence.streamed = sequence.streamed, len(sampled.token_ids)
    top = _top(sequence.top[begin : sequence.streamed])
    return Delta(sequence.index, sampled.token_ids[begin:], sampled.logprobs[begin:], top, completion)


def completion_of(sequence: Sequence, version: int, routing: np.ndarray | None = None) -> Completion:
    """The whole of a sequence that has left its row. `version` is for one that sampled nothing, `routing` as in
    `Completion`."""
    assert sequence.finish_reason is not None
    sampled, sampling = sequence.sampled or NOTHING, sequence.request.sampling
    count, started = len(sampled.token_ids), sequence.started or time.perf_counter()
    first, last = sequence.first_token or started, sequence.last_token or sequence.first_token or started
    oldest = sequence.oldest_version if sequence.oldest_version >= 0 else version
    return Completion(
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        finish_reason=sequence.finish_reason,
        versions=VersionSpan(oldest, max(oldest, sequence.newest_version)),
        queue_s=started - sequence.submitted,
        prefill_s=first - started,
        decode_s=last - first,
        cached_tokens=sequence.cached_tokens,
        stop=sequence.stop,
        raw_logprobs=np.array(sequence.raw[:count], np.float32) if sampling.raw_logprobs else None,
        top_logprobs=_top(sequence.top[:count]) if sampling.top_logprobs else None,
        prompt_logprobs=sequence.prompt_logprobs.copy() if sampling.prompt_logprobs else None,
        switches=tuple(switch for switch in sequence.switches if switch[0] < count),
        routing=routing,
    )


def _top(positions: list[tuple[np.ndarray, np.ndarray]]) -> TopLogprobs | None:
    if not positions:
        return None
    ids, logprobs = zip(*positions, strict=True)
    return TopLogprobs(np.stack(ids).astype(np.int32), np.stack(logprobs).astype(np.float32))
