"""A request until all its completions are delivered, whichever engines it was in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from redline.engine.replicas.slots import Slot
from redline.errors import EngineError
from redline.types import Delta, GenerateRequest


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request until all its completions are delivered."""

    number: int
    request: GenerateRequest
    streaming: int
    blocks: list[int]
    delivered: set[int] = field(default_factory=set)
    """Indices of completions that are delivered."""
    sent: dict[int, list[int]] = field(default_factory=dict)
    """Tokens that were streamed, by index of the completion."""
    again: dict[int, int] = field(default_factory=dict)
    """Tokens that the engine which has it now has sent, by index."""
    slot: Slot | None = None
    inner: int = -1
    """Its number in the engine that has it."""
    losses: list[Slot] = field(default_factory=list)
    company: int | None = None
    """Most requests that may be in an engine together with it, itself included."""

    @property
    def missing(self) -> int:
        """Completions that are not delivered."""
        return self.request.sampling.n - len(self.delivered)

    def rest(self) -> GenerateRequest:
        """What is to be sampled yet: from the first index that is missing to the last."""
        left = [index for index in self.request.sampling.indices if index not in self.delivered]
        sampling = replace(self.request.sampling, first_index=left[0], n=left[-1] - left[0] + 1)
        return replace(self.request, sampling=sampling)

    def only_new(self, piece: Delta) -> Delta | EngineError | None:
        """What of a streamed piece was not streamed before another engine was lost; None where that is nothing. An error where
        the engine that has it now samples other tokens than were streamed."""
        sent = self.sent.setdefault(piece.index, [])
        begin, tokens = self.again.get(piece.index, 0), piece.token_ids.tolist()
        self.again[piece.index] = begin + len(tokens)
        old = max(0, min(len(sent) - begin, len(tokens)))
        if tokens[:old] != sent[begin : begin + old]:
            why = "the engine that had begun to stream it was lost, and the weights have changed since"
            return EngineError(why, "ask again")
        sent += tokens[old:]
        if old == len(tokens) and old and piece.completion is None:
            return None
        top = piece.top_logprobs
        if top is not None:
            top = replace(top, token_ids=top.token_ids[old:], logprobs=top.logprobs[old:])
        return replace(piece, token_ids=piece.token_ids[old:], logprobs=piece.logprobs[old:], top_logprobs=top)
