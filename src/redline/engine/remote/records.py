"""Requests, pieces and statistics as frames: fields that JSON holds, and one buffer for each type of array."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from redline.errors import BrokenModelError, EngineError, EngineMemoryError
from redline.types import Completion, Delta, FinishReason, GenerateRequest, SamplingParams, TopLogprobs, VersionSpan
from redline.wire import error_fields

Fields = dict[str, Any]
Piece = Delta | Exception
ERRORS = {"BrokenModelError": BrokenModelError, "EngineMemoryError": EngineMemoryError}
"""Errors of a request whose class means something to a caller; any other arrives as an EngineError."""


class ArrayWriter:
    """Collects the arrays of a frame, int32 and float32, each type laid end to end in a buffer."""

    def __init__(self) -> None:
        self._parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])

    def put(self, array: np.ndarray | None) -> list[int] | None:
        """Append an array and return its shape, by which the reader takes it; None where there is none."""
        if array is None:
            return None
        is_float = array.dtype.kind == "f"
        self._parts[is_float].append(np.ascontiguousarray(array, np.float32 if is_float else np.int32).ravel())
        return list(array.shape)

    def buffers(self) -> list[np.ndarray]:
        """The int32 buffer and the float32 buffer."""
        return [
            np.concatenate(parts) if parts else np.empty(0, kind)
            for parts, kind in zip(self._parts, (np.int32, np.float32), strict=True)
        ]


class ArrayReader:
    """Takes the arrays of a frame in the order in which they were put. Raises ValueError where there are not so many."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        if len(buffers) != 2:
            raise ValueError("a frame of arrays has two buffers")
        self._int32, self._float32 = np.frombuffer(buffers[0], np.int32), np.frombuffer(buffers[1], np.float32)

    def int32(self, shape: Sequence[int]) -> np.ndarray:
        taken, self._int32 = _split(self._int32, shape)
        return taken

    def float32(self, shape: Sequence[int]) -> np.ndarray:
        taken, self._float32 = _split(self._float32, shape)
        return taken


def _split(values: np.ndarray, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    count = int(np.prod(shape, dtype=np.int64))
    return values[:count].reshape(tuple(shape)), values[count:]


# ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def request_fields(request: GenerateRequest) -> tuple[Fields, list[np.ndarray]]:
    """A request as the fields and buffers of a frame."""
    sampling = asdict(request.sampling)
    sampling["logit_bias"] = [[token, bias] for token, bias in request.sampling.logit_bias.items()]
    fields = {"sampling": sampling, "adapter": request.adapter, "order": list(request.order), "task": request.task}
    return fields, [np.ascontiguousarray(request.prompt_ids, np.int32)]


def request_from(fields: Mapping[str, Any], buffers: Sequence[memoryview]) -> GenerateRequest:
    """The request of a frame. Raises ValueError, TypeError, LookupError or AttributeError where it is none."""
    sampling = dict(fields["sampling"])
    sampling["logit_bias"] = {int(token): float(bias) for token, bias in sampling["logit_bias"]}
    sampling["stop_token_ids"], sampling["stop"] = tuple(sampling["stop_token_ids"]), tuple(sampling["stop"])
    if sampling["allowed_token_ids"] is not None:
        sampling["allowed_token_ids"] = tuple(sampling["allowed_token_ids"])
    version, less = fields["order"]
    prompt_ids = np.frombuffer(buffers[0], np.int32)
    order = (int(version), float(less))
    return GenerateRequest(prompt_ids, SamplingParams(**sampling), fields["adapter"], order, fields["task"])


# ── pieces ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pieces_fields(pieces: Iterable[tuple[int, Piece]]) -> tuple[list[Fields], list[np.ndarray]]:
    """Pieces by the numbers of their requests as fields and buffers of a frame."""
    arrays = ArrayWriter()
    fields = [{"id": number, **_piece_fields(piece, arrays)} for number, piece in pieces]
    return fields, arrays.buffers()


def pieces_from(fields: Iterable[Mapping[str, Any]], buffers: Sequence[memoryview]) -> list[tuple[int, Delta | EngineError]]:
    """The pieces of a frame."""
    arrays = ArrayReader(buffers)
    return [(piece["id"], _piece_from(piece, arrays)) for piece in fields]


def _piece_fields(piece: Piece, arrays: ArrayWriter) -> Fields:
    if isinstance(piece, Exception):
        return {"error": error_fields(piece)}
    return {
        "index": piece.index,
        "tokens": arrays.put(piece.token_ids),
        "logprobs": arrays.put(piece.logprobs),
        "top": _top_fields(piece.top_logprobs, arrays),
        "completion": None if piece.completion is None else _completion_fields(piece.completion, arrays),
    }


def _piece_from(fields: Mapping[str, Any], arrays: ArrayReader) -> Delta | EngineError:
    if "error" in fields:
        return engine_error(fields["error"])
    return Delta(
        index=fields["index"],
        token_ids=arrays.int32(fields["tokens"]),
        logprobs=arrays.float32(fields["logprobs"]),
        top_logprobs=_top_from(fields["top"], arrays),
        completion=None if fields["completion"] is None else _completion_from(fields["completion"], arrays),
    )


def engine_error(fields: Mapping[str, str]) -> EngineError:
    """The error of a request as its caller gets it from an engine in its own process."""
    return ERRORS.get(fields["type"], EngineError)(fields["message"], fields["hint"])


def _completion_fields(completion: Completion, arrays: ArrayWriter) -> Fields:
    return {
        "tokens": arrays.put(completion.token_ids),
        "logprobs": arrays.put(completion.logprobs),
        "finish_reason": completion.finish_reason.value,
        "versions": [completion.versions.oldest, completion.versions.newest],
        "seconds": [completion.queue_s, completion.prefill_s, completion.decode_s],
        "cached_tokens": completion.cached_tokens,
        "stop": completion.stop,
        "raw": arrays.put(completion.raw_logprobs),
        "top": _top_fields(completion.top_logprobs, arrays),
        "prompt": arrays.put(completion.prompt_logprobs),
        "switches": list(completion.switches),
        "routing": _bytes_fields(completion.routing, arrays),
    }


def _completion_from(fields: Mapping[str, Any], arrays: ArrayReader) -> Completion:
    queue_s, prefill_s, decode_s = fields["seconds"]
    return Completion(
        token_ids=arrays.int32(fields["tokens"]),
        logprobs=arrays.float32(fields["logprobs"]),
        finish_reason=FinishReason(fields["finish_reason"]),
        versions=VersionSpan(*fields["versions"]),
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        cached_tokens=fields["cached_tokens"],
        stop=fields["stop"],
        raw_logprobs=None if fields["raw"] is None else arrays.float32(fields["raw"]),
        top_logprobs=_top_from(fields["top"], arrays),
        prompt_logprobs=None if fields["prompt"] is None else arrays.float32(fields["prompt"]),
        switches=tuple((token, version) for token, version in fields["switches"]),
        routing=_bytes_from(fields["routing"], arrays),
    )


def _top_fields(top: TopLogprobs | None, arrays: ArrayWriter) -> list[int] | None:
    if top is None:
        return None
    arrays.put(top.token_ids)
    return arrays.put(top.logprobs)


def _top_from(shape: Sequence[int] | None, arrays: ArrayReader) -> TopLogprobs | None:
    return None if shape is None else TopLogprobs(arrays.int32(shape), arrays.float32(shape))


def _bytes_fields(values: np.ndarray | None, arrays: ArrayWriter) -> list[int] | None:
    """A uint8 array, four values to an int32; returns its shape."""
    if values is None:
        return None
    arrays.put(np.pad(values.ravel(), (0, -values.size % 4)).view(np.int32))
    return list(values.shape)


def _bytes_from(shape: Sequence[int] | None, arrays: ArrayReader) -> np.ndarray | None:
    if shape is None:
        return None
    size = int(np.prod(shape, dtype=np.int64))
    return arrays.int32([-(-size // 4)]).view(np.uint8)[:size].reshape(tuple(shape))
