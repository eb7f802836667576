"""The requests of a session: who receives their pieces, and what the engine calls them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from redline.errors import EngineError, boundary
from redline.ports import Receiver, SteppedEngine
from redline.types import Completion, Delta, GenerateRequest


@dataclass(slots=True, eq=False)
class Submission:
    """One request, and who receives its pieces."""

    request: GenerateRequest
    receiver: Receiver
    streaming: int
    """Tokens of a piece at least; 0 where only the whole is wanted."""
    number: int
    """The session's name for it."""
    request_id: int = -1
    """The engine's name for it, once the engine has it."""
    missing: int = field(init=False)
    """Completions that were not delivered yet."""

    def __post_init__(self) -> None:
        self.missing = self.request.sampling.n


class Requests:
    """What was submitted and has not ended. Methods that take the engine's part are for the thread that may touch it."""

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._open: dict[int, Submission] = {}
        """By the session's number."""
        self._in_engine: dict[int, Submission] = {}
        """By the engine's."""

    # ── from any thread ────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, request: GenerateRequest, receiver: Receiver, *, streaming: int) -> Submission:
        submission = Submission(request, receiver, streaming, next(self._numbers))
        self._open[submission.number] = submission
        return submission

    def find(self, number: int) -> Submission | None:
        """None where it has ended."""
        return self._open.get(number)

    def remove(self, number: int) -> None:
        """Tell its receiver nothing more at the end. One that has ended is ignored."""
        self._open.pop(number, None)

    def sampled_tokens(self, number: int) -> Mapping[int, int]:
        submission = self._open.get(number)
        if submission is None or submission.request_id < 0:
            return {}
        return self._engine.sampled_tokens(submission.request_id)

    # ── from the thread that may touch the engine ──────────────────────────────────────────────────────────────────────

    def submit(self, submission: Submission) -> None:
        """Hand it to the engine. Raises what the engine has against it."""
        submission.request_id = self._engine.submit(submission.request, streaming=submission.streaming)
        self._in_engine[submission.request_id] = submission

    def submit_queued(self, submission: Submission) -> None:
        """The same later, unless it was removed meanwhile; a refusal goes to the receiver, since its caller has gone on."""
        if submission.number not in self._open:
            return
        with boundary() as caught:
            self.submit(submission)
        if caught.error is not None:
            self.remove(submission.number)
            submission.receiver.receive([(submission.number, caught.error)])

    def abort(self, submission: Submission) -> None:
        if self._in_engine.pop(submission.request_id, None) is not None:
            self._engine.abort(submission.request_id)

    def end(self, submission: Submission, index: int) -> None:
        """Sample no more of one of its completions; its whole is delivered as ever."""
        if submission.request_id in self._in_engine:
            self._engine.end(submission.request_id, index)

    def deliver(self, events: Sequence[tuple[int, Delta | EngineError]]) -> None:
        """Hand out what a step brought, with one call of each receiver: to wake an event loop for each of a thousand pieces
        would keep it from all else. Raises what a receiver raises, once each of them was called: none hears of them again."""
        by_receiver: dict[Receiver, list[tuple[int, Delta | Exception]]] = {}
        for request_id, piece in events:
            submission = self._in_engine.get(request_id)
            if submission is None:  # what is left of one that was aborted
                continue
            by_receiver.setdefault(submission.receiver, []).append((submission.number, piece))
            if isinstance(piece, Delta) and piece.completion is None:  # most are
                continue
            submission.missing -= 1
            if isinstance(piece, EngineError) or submission.missing == 0:
                del self._in_engine[request_id]
                self.remove(submission.number)
        errors: list[BaseException] = []
        for receiver, received in by_receiver.items():
            try:
                receiver.receive(received)
            except BaseException as error:  # an interrupt too: it is raised below
                errors.append(error)
        if errors:
            raise errors[0]

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def abort_all(self) -> None:
        """Also where the engine is in no state to be asked anything."""
        for request_id in self._in_engine:
            with boundary():
                self._engine.abort(request_id)

    def tell_all(self, error: EngineError) -> None:
        """Everybody who still waits hears why nothing more comes."""
        while self._open:
            number, submission = self._open.popitem()
            with boundary():
                submission.receiver.receive([(number, error)])


@dataclass(slots=True, eq=False)
class Answers:
    """Receives the completions of some requests. Implements `ports.Receiver`."""

    missing: int
    found: dict[int, dict[int, Completion]] = field(default_factory=dict)

    def receive(self, pieces: Sequence[tuple[int, Delta | Exception]]) -> None:
        for number, piece in pieces:
            if isinstance(piece, Exception):
                raise piece
            if piece.completion is not None:
                self.found[number][piece.index] = piece.completion
                self.missing -= 1
