"""An engine behind a connection answers as one in this process does. Both sides are here; only the wire lies between them."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from support.eventually import eventually
from support.fakes import completion
from support.standing import standing
from support.tiny_engines import MIXED, Letters, Model, ask, assert_same, make_model

from redline.engine import EngineSession, NativeEngine
from redline.engine.remote import client, service
from redline.engine.remote.client import RemoteEngine, open_engine
from redline.engine.remote.patience import Patience
from redline.engine.remote.records import pieces_fields, pieces_from, request_fields, request_from
from redline.engine.remote.service import RequestService
from redline.errors import BrokenModelError, EngineError, EngineLostError
from redline.types import Completion, Delta, FinishReason, GenerateRequest, SamplingParams, WeightUpdate
from redline.wire import Listener, connect, listen, make_token

TOKEN = make_token()
SOON_S = 300


@dataclass
class Far:
    """The other side, in threads of this process."""

    engine: NativeEngine
    session: EngineSession
    listener: Listener

    services: list[RequestService] = field(default_factory=list)

    def accept(self) -> None:
        connection = self.listener.accept(SOON_S)
        service = RequestService(self.session, connection)
        self.services.append(service)
        about = {"limits": asdict(self.engine.limits), "adapters": []}
        threading.Thread(target=service.serve, args=(about,), daemon=True).start()

    def open(self, **options: Any) -> RemoteEngine:
        threading.Thread(target=self.accept, daemon=True).start()
        return open_engine(self.listener.address, TOKEN, "engine 0", **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def far(model: Model) -> Iterator[Far]:
    engine = model.engine(tokenizer=Letters(), max_num_seqs=16)
    with EngineSession(engine) as session, listen(token=TOKEN) as listener:
        yield Far(engine, session, listener)


@pytest.fixture
def remote(far: Far) -> Iterator[RemoteEngine]:
    engine = far.open()
    yield engine
    engine.close()


def completed(engine: RemoteEngine, requests: list[GenerateRequest]) -> list[list[Completion]]:
    found: dict[int, dict[int, Completion]] = {engine.submit(request): {} for request in requests}
    for number, piece in pieces(engine):
        assert isinstance(piece, Delta), piece
        if piece.completion is not None:
            found[number][piece.index] = piece.completion
    return [[one[index] for index in sorted(one)] for one in found.values()]


def pieces(engine: RemoteEngine) -> Iterator[tuple[int, Delta | EngineError]]:
    until = time.monotonic() + SOON_S
    while engine.has_work:
        assert time.monotonic() < until, "nothing more came"
        yield from engine.step()


def test_completions_are_those_of_an_engine_in_this_process_bit_for_bit(remote: RemoteEngine, model: Model) -> None:
    for got, expected in zip(completed(remote, MIXED), model.generate(MIXED, max_num_seqs=16), strict=True):
        assert_same(got, expected)
    assert remote.stats.requests == len(MIXED)
    assert not remote.has_work


def test_a_session_owns_it_like_any_other_engine(remote: RemoteEngine, model: Model) -> None:
    session = EngineSession(remote)
    for got, expected in zip(session.generate(MIXED[:3]), map(model.alone, MIXED[:3]), strict=True):
        assert_same(got, expected)


def test_samples_of_its_machine_come_between_completions_and_are_let_go_where_nobody_takes_them(far: Far) -> None:
    taken: list[tuple[str, dict[str, Any]]] = []
    engine = far.open(take_sample=lambda machine, sample: taken.append((machine, sample)))
    far.services[0].send_sample("node-7", {"time": 1.5, "host": "node-7"})
    completed(engine, MIXED[:2])
    eventually(lambda: taken == [("node-7", {"time": 1.5, "host": "node-7"})])
    engine.close()
    deaf = far.open()
    far.services[1].send_sample("node-7", {"time": 2.5, "host": "node-7"})
    completed(deaf, MIXED[:1])
    deaf.close()
    for number in range(2 * service.OUTBOX_FRAMES):  # the other side is gone: nothing is taken, and nothing blocks
        far.services[1].send_sample("node-7", {"time": float(number), "host": "node-7"})
    assert len(taken) == 1


def test_every_field_of_a_request_and_of_a_completion_crosses_the_wire(remote: RemoteEngine, far: Far) -> None:
    request = ask(
        7,
        9,
        n=2,
        first_index=3,
        raw_logprobs=True,
        top_logprobs=3,
        prompt_logprobs=True,
        stop=("zz",),
        logit_bias={5: 1.5, 6: -np.inf},
        allowed_token_ids=tuple(range(2, 50)),
    )
    [[one, two]] = completed(remote, [request])
    [expected] = far.session.generate([request])
    assert_same([one, two], expected)
    assert one.raw_logprobs is not None
    assert one.top_logprobs is not None
    assert one.prompt_logprobs is not None
    assert expected[0].top_logprobs is not None
    np.testing.assert_array_equal(one.top_logprobs.token_ids, expected[0].top_logprobs.token_ids)
    np.testing.assert_allclose(one.prompt_logprobs, expected[0].prompt_logprobs, atol=1e-5)
    again = request_from(*_sent(request_fields(replace(request, order=(3, -2.5), task="sum/7"))))
    assert (again.sampling, again.order, again.task) == (request.sampling, (3, -2.5), "sum/7")
    assert again.prompt_ids.tolist() == request.prompt_ids.tolist()


def _sent(fields_and_buffers: tuple[Any, list[np.ndarray]]) -> tuple[Any, list[memoryview]]:
    fields, buffers = fields_and_buffers
    return json.loads(json.dumps(fields)), [memoryview(bytearray(buffer.tobytes())) for buffer in buffers]


def test_experts_cross_the_wire_a_byte_each() -> None:
    routing = np.arange(7 * 3, dtype=np.uint8).reshape(7, 3)
    whole = replace(completion([5, 6, 7]), routing=routing)
    nothing = Delta(0, np.empty(0, np.int32), np.empty(0, np.float32), completion=replace(whole, routing=None))
    fields, buffers = _sent(pieces_fields([(4, replace(nothing, completion=whole)), (5, nothing)]))
    (_, found), (_, without) = pieces_from(fields, buffers)
    assert isinstance(found, Delta)
    assert isinstance(without, Delta)
    assert found.completion is not None
    assert without.completion is not None
    assert found.completion.routing is not None
    assert found.completion.routing.dtype == np.uint8
    np.testing.assert_array_equal(found.completion.routing, routing)
    assert without.completion.routing is None
    assert without.completion.token_ids.tolist() == found.completion.token_ids.tolist() == [5, 6, 7]


def test_errors_keep_the_class_that_means_something_to_a_caller() -> None:
    fields, buffers = _sent(pieces_fields([(1, BrokenModelError("NaN", "look")), (2, ValueError("odd"))]))
    (one, broken), (two, odd) = pieces_from(fields, buffers)
    assert (one, type(broken), two, type(odd)) == (1, BrokenModelError, 2, EngineError)
    assert isinstance(broken, BrokenModelError)
    assert broken.hint == "look"


def test_streamed_pieces_come_in_order_and_make_the_whole(remote: RemoteEngine) -> None:
    remote.submit(ask(4, 30), streaming=True)
    tokens: list[int] = []
    whole = None
    for _, piece in pieces(remote):
        assert isinstance(piece, Delta)
        tokens += piece.token_ids.tolist()
        whole = piece.completion or whole
    assert whole is not None
    assert whole.token_ids.tolist() == tokens


def test_one_completion_can_be_ended_and_the_others_go_on(far: Far, remote: RemoteEngine) -> None:
    with far.session.held():  # both orders are there before the engine takes a step
        number = remote.submit(ask(4, 30, n=2), streaming=4)
        remote.flush()
        remote.end(number, 1)
        eventually(lambda: len(far.session._inbox) == 2)
    found = {piece.index: piece.completion for _, piece in pieces(remote) if isinstance(piece, Delta) and piece.completion}
    remote.end(number, 1)
    assert {index: len(completion.token_ids) for index, completion in found.items()} == {0: 30, 1: 0}
    assert found[1].finish_reason == FinishReason.ABORT


def test_what_cannot_be_served_is_refused_here_and_what_only_the_engine_knows_comes_with_a_step(far: Far) -> None:
    engine = far.open()
    with pytest.raises(EngineError, match="a prompt has no tokens"):
        engine.submit(ask(0))
    engine.limits = None
    engine.submit(ask(0))
    [(_, error)] = list(pieces(engine))
    assert isinstance(error, EngineError)
    assert "a prompt has no tokens" in error.message
    engine.close()


def test_what_was_submitted_together_begins_in_one_step(remote: RemoteEngine, far: Far) -> None:
    """Its batches, and so its roundings, are then those of an engine in this process."""
    for seed in range(8):
        remote.submit(ask(4, 20, seed=seed))
    given_up = remote.submit(ask(4, 20, seed=9))
    remote.abort(given_up)
    while remote.has_work:
        remote.step()
    assert far.engine.stats.decoded_rows == 8 * far.engine.stats.decode_steps
    assert far.engine.stats.requests == 8


def test_an_aborted_request_leaves_both_sides(remote: RemoteEngine, far: Far) -> None:
    goes_on = standing(far.engine, lambda stats: stats.running == 1)
    number = remote.submit(ask(4, 240))
    remote.flush()
    _soon(lambda: far.engine.stats.running == 1)
    remote.abort(number)
    assert not remote.has_work
    goes_on.set()
    _soon(lambda: far.engine.stats.running == 0 and far.engine.stats.waiting == 0 and far.engine.stats.requests == 1)


def test_the_end_of_the_connection_aborts_what_is_under_way(remote: RemoteEngine, far: Far) -> None:
    goes_on = standing(far.engine, lambda stats: stats.running + stats.waiting == 4)
    for seed in range(4):
        remote.submit(ask(4, 240, seed=seed))
    remote.flush()
    _soon(lambda: far.engine.stats.running + far.engine.stats.waiting == 4)
    remote.close()
    goes_on.set()
    _soon(lambda: far.engine.stats.requests == 4 and not far.engine.has_work)


def test_a_version_is_that_of_the_samples_after_it(remote: RemoteEngine, far: Far) -> None:
    with pytest.raises(EngineError, match="version 3 never came to this engine; it has version 0"):
        remote.apply(WeightUpdate(3, (), 0))
    assert far.engine.version == 0
    far.session.apply(WeightUpdate(3, (), 0))  # as its weights do
    remote.apply(WeightUpdate(3, (), 0))
    [[one]] = completed(remote, [ask(4, 3)])
    assert (one.versions.oldest, one.finish_reason) == (3, FinishReason.LENGTH)
    remote.reset_prefix_cache()
    assert remote.stats.version == 3


def test_sleep_and_wake_keep_requests_and_their_errors_come_back_in_words(remote: RemoteEngine, model: Model) -> None:
    remote.sleep()
    remote.submit(ask(5, 8))
    with pytest.raises(EngineError, match="asleep already"):
        remote.sleep()
    remote.wake()
    found = [piece.completion for _, piece in pieces(remote) if isinstance(piece, Delta) and piece.completion]
    assert_same(found, model.alone(ask(5, 8)))


def test_progress_is_told_while_a_request_is_under_way(remote: RemoteEngine, far: Far) -> None:
    goes_on = standing(far.engine, lambda stats: stats.running == 2)
    number = remote.submit(ask(4, 250, n=2))
    remote.flush()
    _soon(lambda: far.engine.stats.running == 2)
    goes_on.set()
    far.session.hold()
    try:
        _soon(lambda: set(remote.sampled_tokens(number)) == {0, 1})
    finally:
        far.session.resume()


def test_an_engine_that_is_lost_says_why_in_every_later_call(far: Far) -> None:
    engine = far.open(why_ended=lambda: "its process was ended by SIGKILL")
    engine.submit(ask(4, 250))
    far.session.hold()
    engine._connection._sock.shutdown(2)
    for call in (lambda: [engine.step() for _ in range(1000)], lambda: engine.submit(ask(4)), engine.reset_prefix_cache):
        with pytest.raises(EngineLostError, match=r"engine 0 is lost: .*SIGKILL"):
            call()
    far.session.resume()


def test_a_silent_peer_is_taken_for_lost_after_its_time() -> None:
    with listen(token=TOKEN) as listener:

        def say_hello_and_nothing_more() -> None:
            listener.accept(SOON_S).send("ready", {"limits": None, "adapters": [], "stats": {}})
            time.sleep(SOON_S)

        threading.Thread(target=say_hello_and_nothing_more, daemon=True).start()
        engine = open_engine(listener.address, TOKEN, "engine 7", patience=Patience(silence_s=0.5))
        _soon(lambda: engine.why_lost is not None)
        assert engine.why_lost == "it sent no sign of life for 0.5 s"


def test_what_a_silent_engine_was_asked_is_said_and_part_of_why_it_is_lost() -> None:
    with listen(token=TOKEN) as listener:

        def say_hello_and_nothing_more() -> None:
            listener.accept(SOON_S).send("ready", {"limits": None, "adapters": [], "stats": {}})
            time.sleep(SOON_S)

        threading.Thread(target=say_hello_and_nothing_more, daemon=True).start()
        engine = open_engine(listener.address, TOKEN, "engine 7", patience=Patience(silence_s=1.0))
        for seed in range(3):
            engine.submit(ask(4, seed=seed))
        engine.flush()

        def call() -> None:
            with suppress(EngineLostError):
                engine.reset_prefix_cache()

        asking = threading.Thread(target=call)
        asking.start()
        words = ["heard of", "the oldest of 3 requests was sent", "an answer to 'reset_prefix_cache'"]
        _soon(lambda: all(any(word in what for what in engine.unanswered()) for word in words))
        asking.join(SOON_S)
        assert "no sign of life for 1 s; it had not answered 'reset_prefix_cache' for" in str(engine.why_lost)
        assert "3 requests for" in str(engine.why_lost)


def test_a_large_frame_that_lasts_longer_than_a_look_loses_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LISTEN_S", 0.05)
    fields, buffers = pieces_fields([])
    with listen(token=TOKEN) as listener:
        begun, done = threading.Event(), threading.Event()

        def send_slowly() -> None:
            connection = listener.accept(SOON_S)
            connection.send("ready", {"limits": None, "adapters": [], "stats": {}})
            sent = json.dumps(["pieces", {"pieces": fields}, [buffer.nbytes for buffer in buffers]]).encode()
            whole = struct.pack("!4sIQ", b"RLW1", len(sent), sum(buffer.nbytes for buffer in buffers)) + sent
            begun.wait(SOON_S)
            for start in range(0, len(whole), 8):
                connection._sock.sendall(whole[start : start + 8])
                time.sleep(0.06)
            connection.send("pulse", {"step_s": 0.0, "sampled": [], "stats": {"requests": 7}})
            done.wait(SOON_S)

        threading.Thread(target=send_slowly, daemon=True).start()
        engine = open_engine(listener.address, TOKEN, "engine 7", patience=Patience(silence_s=SOON_S))
        begun.set()
        _soon(lambda: engine.stats.requests == 7)
        assert engine.why_lost is None
        done.set()


def test_where_a_long_step_stands_is_told_with_the_pulse(
    remote: RemoteEngine, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LONG_STEP_S", 0.0)
    monkeypatch.setattr(far.engine, "step", lambda: time.sleep(1.2) or [])
    remote.submit(ask(4, 20))
    remote.flush()
    _soon(lambda: any("in _work" in line for line in remote.stack()))
    assert any(line.startswith("thread ") for line in remote.stack())


def test_an_engine_that_breaks_there_is_lost_here_with_its_words(model: Model) -> None:
    class Breaks(NativeEngine):
        def step(self) -> Any:
            raise RuntimeError("the device is gone")

    broken = model.engine(kind=Breaks)
    session = EngineSession(broken)
    session.start()
    with listen(token=TOKEN) as listener:
        engine = Far(broken, session, listener).open()
        engine.submit(GenerateRequest(np.array([3], np.int32), SamplingParams(max_tokens=2)))
        engine.flush()
        _soon(lambda: engine.why_lost is not None)
        assert "the device is gone" in str(engine.why_lost)


def test_a_request_that_comes_as_the_engine_breaks_has_not_failed_itself(far: Far, remote: RemoteEngine) -> None:
    """Another engine can serve it: it must not come back with an error of its own."""
    with far.session.held():
        for request in MIXED[:3]:
            remote.submit(request)
        remote.flush()
        eventually(lambda: bool(far.session._inbox))
        far.session.fail(EngineLostError("rank 1 of the engine has ended with code -9"))
    found: list[tuple[int, Delta | EngineError]] = []
    with pytest.raises(EngineLostError, match="rank 1 of the engine has ended with code -9"):
        found.extend(pieces(remote))
    assert not found


def test_a_call_of_an_engine_that_broke_says_that_it_is_lost(far: Far, remote: RemoteEngine) -> None:
    far.session.fail(EngineLostError("rank 1 of the engine has ended with code -9"))
    eventually(lambda: not far.session._is_open)
    with pytest.raises(EngineLostError, match="rank 1 of the engine has ended with code -9"):
        remote.reset_prefix_cache()


def test_a_reader_that_takes_nothing_stops_the_engine_and_not_its_memory(model: Model) -> None:
    """The outbox is bounded: pieces that nobody takes keep the engine between two steps."""
    engine = model.engine(max_num_seqs=2)
    with EngineSession(engine) as session, listen(token=TOKEN) as listener:
        mute = connect(listener.address, TOKEN, "requests", SOON_S)
        service = RequestService(session, listener.accept(SOON_S))
        service._connection.send = lambda *frame, **rest: time.sleep(0.01)  # type: ignore[method-assign]
        service._send = lambda: None  # type: ignore[method-assign]
        threading.Thread(target=service.serve, args=({},), daemon=True).start()
        fields, buffers = request_fields(ask(4, 200))
        mute.send("submit", {"requests": [{"id": 1, "streaming": True, **fields}]}, buffers)
        _soon(lambda: service._outbox.full())
        steps = engine.stats.steps
        time.sleep(0.2)
        assert engine.stats.steps <= steps + 1 < 200
        mute.close()
        _soon(lambda: not engine.has_work)


def _soon(holds: Any) -> None:
    until = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)
