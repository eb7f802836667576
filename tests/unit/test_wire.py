from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from support.eventually import eventually

from redline import wire
from redline.errors import ConfigError, EngineError, PeerError, WireClosed, WireError, WireTimeout
from redline.wire import Connection, Listener, connect, error_fields, listen, make_token, opening

TOKEN = make_token()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listen(token=TOKEN) as listening:
        yield listening


@pytest.fixture
def ends(listener: Listener) -> Iterator[tuple[Connection, Connection]]:
    """The end that connected, and the one that listened."""
    with connect(listener.address, TOKEN, "test", 60) as ours, listener.accept(60) as theirs:
        yield ours, theirs


def test_a_frame_arrives_as_it_was_sent(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    ours.send("weights", {"name": "embed", "shape": [3, 4], "none": None}, [numbers, b"", b"abc"])
    frame = theirs.receive(60)
    assert (frame.kind, frame.fields) == ("weights", {"name": "embed", "shape": [3, 4], "none": None})
    assert [buffer.nbytes for buffer in frame.buffers] == [48, 0, 3]
    arrived = np.frombuffer(frame.buffers[0], np.float32).reshape(3, 4)
    arrived += 0  # the memory is the receiver's own
    assert np.array_equal(arrived, numbers)
    assert bytes(frame.buffers[2]) == b"abc"


def test_many_buffers_larger_than_the_systems_queues_arrive_in_order(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    buffers = [np.full(40_000 + index, index % 251, np.uint8) for index in range(700)]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(ours.send, "many", {}, buffers)
        frame = theirs.receive(60)
        sending.result()
    assert [len(buffer) for buffer in frame.buffers] == [len(buffer) for buffer in buffers]
    assert all(np.array_equal(np.frombuffer(got, np.uint8), sent) for got, sent in zip(frame.buffers, buffers, strict=True))


def test_a_question_gets_its_reply_and_an_error_the_words_of_the_other_side(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends

    def answer() -> None:
        asked = theirs.receive(60)
        theirs.send("sum", {"value": sum(asked.fields["values"])})
        theirs.receive(60)
        theirs.send("error", error_fields(EngineError("the prompt is too long", "shorten it")))

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(answer)
        assert ours.ask("add", {"values": [1, 2, 3]}, timeout_s=60).fields == {"value": 6}
        with pytest.raises(PeerError, match="the prompt is too long") as caught:
            ours.ask("submit", timeout_s=60)
        done.result()
    assert caught.value.hint == "shorten it"
    assert caught.value.kind == "EngineError"
    assert ours.name in caught.value.message


def test_who_does_not_answer_is_named_with_what_and_how_long_and_its_late_reply_is_nobodys(
    ends: tuple[Connection, Connection],
) -> None:
    ours, theirs = ends
    ours.name = "engine 1 (weights)"
    with pytest.raises(WireTimeout, match=r"engine 1 \(weights\) did not answer 'adopt' within 0.2 s"):
        ours.ask("adopt", timeout_s=0.2)
    assert theirs.receive(60).kind == "adopt"
    with pytest.raises(WireClosed):
        ours.ask("next", timeout_s=1)


def test_waiting_for_a_frame_may_time_out_and_go_on(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    with pytest.raises(WireTimeout):
        theirs.receive(0.05)
    ours.send("late")
    assert theirs.receive(60).kind == "late"


def in_parts(sock: socket.socket, sent: bytes, parts: int, pause_s: float) -> None:
    size = -(-len(sent) // parts)
    for start in range(0, len(sent), size):
        sock.sendall(sent[start : start + size])
        time.sleep(pause_s)


FRAME = struct.pack("!4sIQ", b"RLW1", 15, 40) + b'["a", {}, [40]]' + bytes(40)


def test_a_frame_that_goes_on_may_take_longer_than_the_wait_for_it_and_than_any_pause(
    ends: tuple[Connection, Connection],
) -> None:
    ours, theirs = ends
    theirs.stall_s = 2.4  # longer than a busy machine lets nothing run
    ours._sock.setblocking(True)
    ours._sock.sendall(FRAME[:1])
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(in_parts, ours._sock, FRAME[1:], parts=8, pause_s=0.33)
        assert bytes(theirs.receive(0.1).buffers[0]) == bytes(40)
        sending.result()
    ours._sock.setblocking(False)
    ours.send("next")
    assert theirs.receive(60).kind == "next"


def test_a_frame_that_stands_still_is_given_up_with_who_and_how_long(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    theirs.name, theirs.stall_s = "engine 2", 0.1
    ours._sock.send(FRAME[:30])
    with pytest.raises(WireTimeout, match=r"engine 2 sent part of a frame, and no more of it for 0\.1 s"):
        theirs.receive(60)
    assert theirs.is_closed


def has_failed(sending: Future[None]) -> bool:
    """Whether no more of a frame comes."""
    return sending.done() and sending.exception() is not None


def test_a_frame_that_is_taken_slowly_is_sent_whole(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    ours._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # so that the system keeps little of it
    theirs._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    size, limit_s, taken, pause_s = 8 << 20, 2.4, 0, 0.0
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(ours.send, "weights", {}, [np.zeros(size, np.uint8)], limit_s)
        began = last = time.monotonic()
        while taken < size and not has_failed(sending):
            time.sleep(0.01)
            now = time.monotonic()
            pause_s, last = max(pause_s, now - last), now
            due = int(size * (now - began) / (1.2 * limit_s)) - taken  # so many bytes a second that all of it takes longer
            with suppress(BlockingIOError):
                taken += len(theirs._sock.recv(max(1, due)))
        if has_failed(sending) and pause_s > limit_s / 2:
            pytest.skip(f"this machine let nothing run for {pause_s:.1f} s")
        sending.result()
    assert time.monotonic() - began > limit_s, "it took longer than the limit of a pause"


def test_who_takes_nothing_is_noticed_after_the_time_limit(ends: tuple[Connection, Connection]) -> None:
    ours, _ = ends
    with pytest.raises(WireTimeout, match=r"took nothing of 'weights' for 0\.2 s"):
        ours.send("weights", buffers=[np.zeros(64 << 20, np.uint8)], timeout_s=0.2)
    assert ours.is_closed


def test_the_end_of_the_peer_and_our_own_end_a_wait_at_once(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(theirs.receive)
        time.sleep(0.05)
        ours.close()
        with pytest.raises(WireClosed, match="ended the connection"):
            waiting.result(60)
    with pytest.raises(WireClosed):
        ours.receive(1)


def test_one_thread_closes_while_another_waits(ends: tuple[Connection, Connection]) -> None:
    ours, _ = ends
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ours.receive)
        time.sleep(0.05)
        ours.close()
        with pytest.raises(WireClosed):
            waiting.result(60)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!4sIQ", b"RLW1", 3, 0) + b"[1,",
        struct.pack("!4sIQ", b"RLW1", 13, 0) + b'["a", {}, [9]]'[:13],
        struct.pack("!4sIQ", b"RLW1", 14, 0) + b'["a", {}, [9]]',
        struct.pack("!4sIQ", b"RLW1", 15, 0) + b'["a", {}, [-1]]',
        struct.pack("!4sIQ", b"RLW1", 2, 0) + b"{}",
        struct.pack("!4sIQ", b"RLW1", 2, 1 << 62) + b"{}",
        struct.pack("!4sIQ", b"RLW1", 1 << 31, 0),
    ],
)
def test_what_is_no_frame_ends_the_connection_and_not_the_listener(
    listener: Listener, ends: tuple[Connection, Connection], sent: bytes
) -> None:
    ours, theirs = ends
    ours._sock.send(sent)
    with pytest.raises(WireError, match="what is no frame"):
        theirs.receive(60)
    assert theirs.is_closed
    with connect(listener.address, TOKEN, "another", 60):
        assert listener.accept(60).role == "another"


def test_a_peer_without_the_token_is_turned_away_and_learns_nothing_of_it(listener: Listener) -> None:
    with pytest.raises(WireError, match="does not know the token"):
        connect(listener.address, make_token(), "test", 60)
    host, port = listener.address.split(":")
    with socket.create_connection((host, int(port)), 60) as stranger:
        stranger.sendall(b"x" * 100)
        eventually(lambda: listener.num_refused == 2)
        with pytest.raises(WireTimeout):
            listener.accept(0.05)


@pytest.mark.parametrize("proof", ["\u00e9", "\ud800", 7, None, ["a"]])
def test_a_proof_that_is_none_is_turned_away_whatever_it_is(listener: Listener, proof: object) -> None:
    host, port = listener.address.split(":")
    with Connection(socket.create_connection((host, int(port)), 60), "listener") as stranger:
        stranger.send("hello", {"role": "weights", "challenge": "a"})
        stranger.receive(60)
        stranger.send("proof", {"proof": proof})
        assert stranger.receive(60).kind == "refused"
    with connect(listener.address, TOKEN, "test", 60):
        assert listener.accept(60).role == "test"


def test_a_stranger_who_sends_byte_by_byte_is_turned_away_in_time(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "HELLO_S", 0.2)
    host, port = listener.address.split(":")
    with socket.create_connection((host, int(port)), 60) as stranger:

        def is_turned_away() -> bool:
            try:
                stranger.send(FRAME[:1])
            except OSError:
                return True
            time.sleep(0.05)
            return False

        eventually(is_turned_away)


@pytest.mark.parametrize(
    "address", ["", "10.0.0.1", "host:", ":80", "host:http", "host:99999", "a..b:80", f"{'x' * 64}:80", "\udcff:80"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="no address to connect to") as refused:
        connect(address, TOKEN, "test", 1)
    assert "HOST:PORT" in refused.value.hint


@pytest.mark.parametrize("host", ["a..b", "x" * 64, ""])
def test_what_is_no_hosts_name_is_refused_by_a_listener(host: str) -> None:
    with pytest.raises(ConfigError, match="it is no host's name"):
        listen(host, token=TOKEN)


def test_a_listener_that_does_not_know_the_token_is_found_out(listener: Listener) -> None:
    """It gets no proof of the token either: the caller leaves first."""
    with pytest.raises(WireError, match="does not know the token of this run"):
        connect(listener.address, "another token", "test", 60)


def test_a_stranger_who_says_nothing_keeps_nobody_waiting(listener: Listener) -> None:
    host, port = listener.address.split(":")
    with socket.create_connection((host, int(port)), 60), connect(listener.address, TOKEN, "test", 60):
        assert listener.accept(60).role == "test"


def test_strangers_who_say_nothing_keep_nobody_out_however_many_they_are(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "MAX_HELLOS", 3)
    host, port = listener.address.split(":")
    strangers = [socket.create_connection((host, int(port)), 5) for _ in range(5)]
    with connect(listener.address, TOKEN, "test", 5):
        assert listener.accept(5).role == "test"
    for stranger in strangers[:3]:
        assert stranger.recv(1) == b"", "the oldest made room"
    for stranger in strangers:
        stranger.close()


def test_a_machine_with_many_silent_connections_makes_room_before_others_do(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "MAX_HELLOS", 3)
    host, port = listener.address.split(":")
    first = socket.create_connection((host, int(port)), 5)
    crowd = [socket.create_connection((host, int(port)), 5, ("127.0.0.2", 0)) for _ in range(8)]
    assert [stranger.recv(1) for stranger in crowd[:6]] == [b""] * 6
    first.setblocking(False)
    with pytest.raises(BlockingIOError):
        first.recv(1)
    for stranger in (first, *crowd):
        stranger.close()


def test_a_stranger_may_not_send_large_frames(listener: Listener) -> None:
    host, port = listener.address.split(":")
    with socket.create_connection((host, int(port)), 60) as stranger:
        stranger.sendall(struct.pack("!4sIQ", b"RLW1", 100_000, 0))
        stranger.settimeout(60)
        assert stranger.recv(1) == b""


def test_a_listener_is_on_loopback_and_an_address_that_is_taken_is_refused(listener: Listener) -> None:
    host, port = listener.address.split(":")
    assert host == "127.0.0.1"
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        listen(port=int(port), token=TOKEN)


def test_nobody_at_an_address_is_said_with_the_address(listener: Listener) -> None:
    listener.close()
    with pytest.raises(WireClosed, match=rf"{listener.address} \(weights\) cannot be reached"):
        connect(listener.address, TOKEN, "weights", 2)
    with pytest.raises(WireClosed):
        listener.accept(1)


def test_frames_of_several_threads_do_not_mix(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    threads = [
        threading.Thread(
            target=lambda n=n: [ours.send("n", {"n": n}, [np.full(50_000, n, np.uint8)]) for _ in range(20)]  # type: ignore[misc]
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in range(80):
        frame = theirs.receive(60)
        assert set(bytes(frame.buffers[0])) == {frame.fields["n"]}
    for thread in threads:
        thread.join()


def test_the_token_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.TOKEN_VARIABLE, TOKEN)
    assert wire.token_from_environment() == TOKEN
    assert wire.TOKEN_VARIABLE not in os.environ
    with pytest.raises(ConfigError, match=wire.TOKEN_VARIABLE):
        wire.token_from_environment()


def test_frames_need_neither_torch_nor_pickle() -> None:
    program = "import sys; import redline.wire; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    assert "pickle" not in vars(wire)
