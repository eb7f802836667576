"""What is too much is refused before any work, streamed or not, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from support.paths import ROOT
from support.scripted_server import TOKENIZER, ScriptedEngine, Site, ids, refusal, site

from redline.serve.pace import Pace
from redline.serve.requests import bodies, uploads
from redline.serve.requests.admission import Admission, Place
from redline.serve.requests.calls import Served, make_call
from redline.serve.requests.limits import ServeLimits, check_structure
from redline.serve.requests.protocol import ApiError, CompletionRequest
from redline.serve.vocabulary import Vocabulary

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DIGITS = int("9" * 4300)
"""The longest number that Python prints; twice as much is too long."""
LIMITS = ServeLimits(max_body_bytes=300_000, max_body_values=20_000, client_timeout_s=300.0)


@pytest.fixture(scope="module")
def here() -> Iterator[Site]:
    with site(ScriptedEngine(), limits=LIMITS, rows=16) as running:
        yield running


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} | fields


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"prompt": "hi", "max_tokens": 1} | fields


TOO_MUCH = {
    "n": (chat(n=400_000), 400, "n", "too_many_choices"),
    "n without end": (chat(n=10**18), 400, "n", "too_many_choices"),
    "n as a float": (chat(n=4e5), 400, "n", None),
    "n as a text": (text(n="400000"), 400, "n", None),
    "one choice more than rows": (text(n=17), 400, "n", "too_many_choices"),
    "prompts": (text(prompt=["hi"] * 17), 400, "prompt", "too_many_choices"),
    "prompts times n": (text(prompt=["hi"] * 3, n=6), 400, "n", "too_many_choices"),
    "lists of ids": (text(prompt=[[1]] * 17), 400, "prompt", "too_many_choices"),
    "a long prompt": (text(prompt="word " * 50_000), 400, "prompt", "context_length_exceeded"),
    "many ids": (text(prompt=[1] * 15_000), 400, "prompt", "context_length_exceeded"),
    "a long conversation": (
        chat(messages=[{"role": "user", "content": "word " * 50_000}]),
        400,
        "messages",
        "context_length_exceeded",
    ),
    "many messages": (chat(messages=[{"role": "user", "content": ""}] * 1025), 400, "messages", "array_above_max_length"),
    "many parts": (
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]),
        400,
        "messages",
        "array_above_max_length",
    ),
    "five stops": (chat(stop=list("abcde")), 400, "stop", "array_above_max_length"),
    "a long stop": (chat(stop=["x" * 257]), 400, "stop", "string_above_max_length"),
    "a long stop alone": (chat(stop="x" * 257), 400, "stop", "string_above_max_length"),
    "many biases": (text(logit_bias={str(i): 1 for i in range(4097)}), 400, "logit_bias", "array_above_max_length"),
    "many allowed tokens": (text(allowed_token_ids=[1] * 4097), 400, "allowed_token_ids", "array_above_max_length"),
    "tokens": (chat(max_tokens=10**9), 400, "messages", "context_length_exceeded"),
    "n of thousands of digits": (text(prompt=["hi"] * 16, n=DIGITS), 400, "n", "too_many_choices"),
    "tokens of thousands of digits": (text(max_tokens=DIGITS), 400, "max_tokens", None),
    "logprobs of thousands of digits": (text(max_tokens=DIGITS, logprobs=20), 400, "logprobs", "too_many_logprobs"),
    "bytes": (chat(user="a" * 400_000), 413, None, "request_too_large"),
    "values": (chat(metadata=[[]] * 20_000), 413, None, "request_too_large"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", TOO_MUCH)
def test_what_is_too_much_never_reaches_the_engine(here: Site, what: str, stream: bool) -> None:
    (path, body), status, param, code = TOO_MUCH[what]
    asked = len(here.engine.requests)
    answer = here.post(path, body | {"stream": stream})
    assert refusal(answer) == (status, param, code)
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(here.engine.requests) == asked


def test_the_logprobs_of_an_answer_are_bounded() -> None:
    with site(ScriptedEngine(), limits=ServeLimits(max_logprobs=1000)) as strict:
        for path, body in (chat(logprobs=True, top_logprobs=9, n=2, max_tokens=51), text(logprobs=9, n=2, max_tokens=51)):
            assert refusal(strict.post(path, body)) == (400, "logprobs", "too_many_logprobs")
        path, body = chat(logprobs=True, top_logprobs=9, max_tokens=None)
        assert refusal(strict.post(path, body)) == (400, "logprobs", "too_many_logprobs"), "as many as there is room for"
        assert strict.post(*chat(logprobs=True, top_logprobs=9, n=2, max_tokens=50)).status_code == 200


def test_the_tokens_of_a_choice_can_be_bounded() -> None:
    with site(ScriptedEngine(), limits=ServeLimits(max_new_tokens=7)) as strict:
        assert refusal(strict.post(*text(max_tokens=8))) == (400, "max_tokens", "integer_above_max_value")
        assert strict.post(*chat(max_tokens=None)).status_code == 200
        assert strict.engine.requests[0].sampling.max_tokens == 7


def test_the_logprobs_of_an_echo_count() -> None:
    with site(ScriptedEngine(), limits=ServeLimits(max_logprobs=1000)) as strict:
        echo = {"prompt": "a" * 150, "echo": True, "logprobs": 0}
        assert refusal(strict.post(*text(n=7, **echo))) == (400, "logprobs", "too_many_logprobs")
        assert strict.post(*text(n=6, **echo)).status_code == 200


def test_a_prompt_that_every_choice_shows_makes_the_answer_large() -> None:
    served = Served("m", Vocabulary(TOKENIZER), (), 200)
    sizes = {
        name: make_call(CompletionRequest(prompt="a" * 100, n=3, max_tokens=2, **{name: True}), served, ServeLimits()).num_shown
        for name in ("echo", "return_token_ids", "ignore_eos")
    }
    assert sizes == {"echo": 306, "return_token_ids": 306, "ignore_eos": 6}


def test_a_prompt_never_asks_for_more_choices_than_there_are_rows() -> None:
    """Nobody could ever give it that many at once, and whoever came later would wait behind it."""
    with site(ScriptedEngine(), limits=ServeLimits(max_choices=50), rows=4) as few:
        for stream in (False, True):
            answer = few.post(*text(n=5, stream=stream))
            assert refusal(answer) == (400, "n", "too_many_choices")
            assert "a prompt may have 4" in answer.json()["error"]["message"]
        assert few.post(*text(prompt=["hi"] * 5, n=4)).status_code == 200


def test_a_request_that_could_never_wait_is_not_told_to_come_again() -> None:
    with site(ScriptedEngine(), limits=ServeLimits(max_choices=50, max_queued_choices=2), rows=4) as few:
        assert refusal(few.post(*text(prompt=["hi"] * 7))) == (400, "prompt", "too_many_choices")
        assert few.post(*text(prompt=["hi"] * 6)).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b'{"prompt": "' + rb"\"," * 90_000, 400, id="a string of quotation marks without an end"),
        pytest.param(b'{"prompt": "hi", "x": ["' + b'","' * 90_000 + b'"]}', 413, id="many strings"),
        pytest.param(b'{"prompt": "hi", "x": "' + rb'\\",[' * 15_000, 400, id="escapes of escapes"),
        pytest.param(b'{"prompt": "hi", "x": "' + rb"\"[," * 60_000 + b'"}', 200, id="separators in one string"),
    ],
)
def test_a_body_is_looked_at_in_one_pass(here: Site, body: bytes, status: int) -> None:
    began = time.perf_counter()
    answer = httpx2.post(here.url + TEXT, content=body, headers={"content-type": "application/json"}, timeout=300)
    assert answer.status_code == status
    assert time.perf_counter() - began < 100


def test_what_is_just_not_too_much_is_answered(here: Site) -> None:
    assert here.post(*text(prompt=["hi"] * 4, n=4)).status_code == 200
    assert here.post(*chat(stop=["a" * 256, "b", "c", "d"])).status_code == 200
    assert here.post(*text(prompt="a, b, [c], {d}, " * 10)).status_code == 200
    assert here.post(*chat(user="," * 100_000)).status_code == 200, "commas in a string are no values"


def test_a_body_without_an_announced_length_is_bounded_too(here: Site) -> None:
    parts = (b"x" * 50_000 for _ in range(20))
    answer = httpx2.post(here.url + TEXT, content=parts, headers={"content-type": "application/json"}, timeout=300)
    assert refusal(answer) == (413, None, "request_too_large")


def test_a_body_within_a_limit_beyond_what_we_would_drop_is_read(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "DRAINED_BYTES", 1000)
    assert here.post(*chat(user="a" * 100_000)).status_code == 200
    assert refusal(here.post(*chat(user="a" * 400_000))) == (413, None, "request_too_large")


def test_a_body_that_does_not_arrive_is_not_waited_for() -> None:
    with site(ScriptedEngine(), limits=ServeLimits(client_timeout_s=1.0)) as here, slow_upload(here) as slow:
        assert b" 408 " in slow.recv(1000).splitlines()[0]


def test_a_client_that_reads_nothing_is_given_up() -> None:
    with site(ScriptedEngine(is_endless=True), limits=ServeLimits(client_timeout_s=0.5), send_bytes=4096) as endless:
        body = json.dumps({"prompt": "hi", "stream": True, "logprobs": 20}).encode()
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", int(endless.url.rpartition(":")[2])))
            head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            deaf.sendall(f"{head}\r\n\r\n".encode() + body)
            endless.wait_until(lambda: len(endless.engine.requests) == 1)
            endless.wait_until(lambda: endless.engine.num_open == 0)


def test_every_limit_is_in_the_manual_with_its_default() -> None:
    manual = (ROOT / "docs" / "serve.md").read_text()
    rows = dict(re.findall(r"^\| `serve\.(\w+)` \| ([^|]*) \|", manual, re.MULTILINE))
    assert rows.keys() == ServeLimits.model_fields.keys()
    for name, field in ServeLimits.model_fields.items():
        assert field.default is None or rows[name].startswith(
            f"{field.default:g}" if field.default < 1e5 else f"{field.default}"
        )


def slow_upload(running: Site) -> socket.socket:
    """A request whose body never comes whole. Blocks until the server waits for it, which it says to who asks."""
    slow = socket.create_connection(("127.0.0.1", httpx2.URL(running.url).port or 0))
    slow.settimeout(300)
    slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    slow.sendall(b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n")
    assert b" 100 " in slow.recv(1000)
    slow.sendall(b"{")
    return slow


def test_slow_uploads_hold_no_place_of_requests_that_are_ready() -> None:
    limits = ServeLimits(max_queued_choices=1, max_uploads=100, client_timeout_s=300.0)
    with site(ScriptedEngine(), limits=limits, rows=4) as few:
        slow = [slow_upload(few) for _ in range(20)]
        assert few.chat().choices[0].message.content == "hello", "20 bodies are on their way, and there are 5 places"
        for one in slow:
            one.close()


def test_beyond_the_most_uploads_the_one_begun_first_is_given_up_and_a_burst_is_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uploads, "GRACE_S", 600.0)
    limits = ServeLimits(max_uploads=3, client_timeout_s=300.0)
    with site(ScriptedEngine(), limits=limits, rows=4) as few:
        slow = [slow_upload(few) for _ in range(3)]
        assert refusal(few.post(*chat())) == (429, None, "rate_limit_exceeded")
        monkeypatch.setattr(uploads, "GRACE_S", 0.0)
        began = time.monotonic()
        assert few.chat().choices[0].message.content == "hello"
        assert b" 408 " in slow[0].recv(1000).splitlines()[0]
        assert time.monotonic() - began < 200, "it did not wait for the limit of a body"
        for one in slow:
            one.close()


# ── the queue ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_server_answers_429_and_says_when_to_come_again() -> None:
    with site(ScriptedEngine(is_endless=True), limits=ServeLimits(max_queued_choices=1), rows=4) as full:
        streams = [full.chat(stream=True, n=2) for _ in range(2)]
        for stream in streams:
            next(iter(stream))
        for extra in ({}, {"stream": True}):
            answer = full.post(*chat(n=2, **extra))
            assert refusal(answer) == (429, None, "rate_limit_exceeded")
            assert answer.json()["error"]["type"] == "requests"
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        with pytest.raises(openai.RateLimitError):
            full.chat(n=2)
        assert httpx2.get(f"{full.url}/health").status_code == 200
        for stream in streams:
            stream.close()
        full.wait_until(lambda: full.engine.num_open == 0)
        full.engine.is_endless = False
        assert full.chat().choices[0].message.content == "hello"


def test_places_are_given_back_however_a_request_ends() -> None:
    with site(ScriptedEngine(fail_after=2), limits=ServeLimits(max_queued_choices=1), rows=1) as small:
        for _ in range(4):
            assert small.post(*chat(stream=True, max_tokens=9)).status_code == 200
            assert small.post(*chat(max_tokens=9)).status_code == 400
            assert small.post(*chat(n=2)).status_code == 400
            assert small.post(TEXT, []).status_code == 400
        small.engine.fail_after = None
        assert small.chat().choices[0].message.content == "hello"


def test_a_prompt_with_more_choices_than_free_rows_begins_with_those_and_keeps_no_newcomer_waiting() -> None:
    with site(ScriptedEngine(is_endless=True), limits=ServeLimits(), rows=4) as few:
        long = few.chat(stream=True, n=3)
        next(iter(long))
        few.engine.is_endless = False
        few.engine.script = lambda request, index: f"{index}"
        for stream in (False, True):
            few.engine.requests.clear()
            with ThreadPoolExecutor() as threads:
                many = threads.submit(few.complete, "hi", n=4, max_tokens=9, stream=stream)
                few.wait_until(lambda: len(few.engine.requests) > 0)
                assert few.chat().choices[0].message.content == "0", "three rows of four are taken for good"
                answer = many.result(20)
            found = {choice.index: choice.text for choice in answer.choices} if not stream else {}
            for chunk in answer if stream else ():
                for choice in chunk.choices:
                    found[choice.index] = found.get(choice.index, "") + choice.text
            assert found == {index: str(index) for index in range(4)}
            assert {index for request in few.engine.requests for index in request.sampling.indices} == set(range(4))
            assert max(request.sampling.n for request in few.engine.requests) == 1
        long.close()


def test_many_prompts_share_the_rows_there_are() -> None:
    """And each is answered, in order."""
    with site(ScriptedEngine(), limits=ServeLimits(max_choices=50), rows=4) as few:
        few.engine.script = lambda request, index: f"{request.prompt_ids[0]}"
        letters = "abcdefghijklmnopqrstuvwxyz"
        for stream in (False, True):
            answer = few.complete(list(letters), max_tokens=9, stream=stream)
            found = {choice.index: choice.text for choice in answer.choices} if not stream else {}
            for chunk in answer if stream else ():
                for choice in chunk.choices:
                    found[choice.index] = found.get(choice.index, "") + choice.text
            assert found == {index: str(ids(letter)[0]) for index, letter in enumerate(letters)}


def turns(admission: Admission, *requests: tuple[int, int]) -> list[int]:
    """Requests of (prompts, n) come one after the other; the order in which their prompts get rows, which are given back one
    prompt at a time."""

    async def run() -> list[int]:
        order: list[int] = []
        done: asyncio.Queue[asyncio.Event] = asyncio.Queue()

        async def prompt(place: Place, number: int, n: int) -> None:
            while n:
                n -= (count := await place.take(n))
                portions.append(asyncio.create_task(portion(place, number, count)))

        async def portion(place: Place, number: int, count: int) -> None:
            order.extend([number] * count)
            finish = asyncio.Event()
            done.put_nowait(finish)
            await finish.wait()
            place.give(count)

        tasks, portions = [], list[asyncio.Task[None]]()
        for number, (prompts, n) in enumerate(requests):
            place = admission.enter()
            tasks += [asyncio.create_task(prompt(place, number, n)) for _ in range(prompts)]
            await asyncio.sleep(0)
        while not all(task.done() for task in (*tasks, *portions)):
            (await asyncio.wait_for(done.get(), 300)).set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return order

    return asyncio.run(run())


def test_requests_with_many_prompts_take_turns() -> None:
    order = turns(Admission(4, 100), (8, 1), (4, 1), (1, 1))
    assert order[:4] == [0] * 4, "nobody else was there"
    assert sorted(order[4:7]) == [0, 1, 2], "then each in turn"


def test_a_request_that_has_rows_leaves_some_to_those_that_have_none() -> None:
    order = turns(Admission(32, 100), (40, 1), (1, 1))
    assert order.index(1) == 30, "one row in sixteen was kept"


def test_a_request_that_needs_many_rows_is_not_overtaken_for_ever() -> None:
    order = turns(Admission(4, 100), (4, 1), (1, 4), (3, 1))
    assert order[:5] == [0, 0, 0, 0, 1], "it gets the first row that comes free"
    assert order[5:9] == [2, 1, 2, 1], "and then each in turn"


def test_a_prompt_that_is_given_up_while_it_waits_or_runs_leaves_its_rows() -> None:
    async def run() -> None:
        admission = Admission(2, 10)
        first, second = admission.enter(), admission.enter()

        async def hold(place: Place, n: int) -> None:
            count = await place.take(n, n)
            try:
                await asyncio.sleep(60)
            finally:
                place.give(count)

        tasks = [
            asyncio.create_task(hold(first, 2)),
            asyncio.create_task(hold(second, 1)),
            asyncio.create_task(hold(second, 2)),
        ]
        await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[0].cancel()
        await asyncio.gather(*tasks[:2], return_exceptions=True)
        await asyncio.sleep(0)
        assert (first.held, second.held) == (0, 2)
        tasks[2].cancel()
        await asyncio.gather(tasks[2], return_exceptions=True)
        assert await first.take(2) == first.held == 2
        first.give(2)
        assert first.held == 0
        first.leave()
        first.leave()
        second.leave()
        assert admission.inside == 0

    asyncio.run(run())


def test_a_place_that_cannot_grow_says_when_there_may_be_room() -> None:
    admission = Admission(2, 2)
    place = admission.enter()
    with pytest.raises(ApiError) as caught:
        place.grow(5)
    assert caught.value.headers == {"retry-after": "2"}
    place.grow(4)
    with pytest.raises(ApiError):
        admission.enter()


# ── pace ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("body", [b'{"prompt": "' + b"word " * 800_000 + b'"}', b"[" + b"[]," * 1_300_000 + b"1]"])
def test_a_look_at_the_structure_of_a_large_body_is_many_short_ones(body: bytes) -> None:
    looking, num_pieces = check_structure(body, 2**17), 0
    with contextlib.suppress(ApiError):
        for _ in looking:
            num_pieces += 1
    assert num_pieces > 50


@pytest.mark.slow  # a processor that is slow for a while holds it for longer
@pytest.mark.parametrize("body", [b'{"prompt": "' + b"word " * 800_000 + b'"}', b"[" + b"[]," * 1_300_000 + b"1]"])
def test_a_look_at_the_structure_of_a_large_body_never_holds_pythons_lock_for_long(body: bytes) -> None:
    """In seconds of the processor, which others on this machine do not change."""
    held, looking = [], check_structure(body, 2**17)
    with contextlib.suppress(ApiError):
        began = time.thread_time()
        for _ in looking:
            held.append(time.thread_time() - began)
            began = time.thread_time()
    assert len(held) > 50
    assert max(held) < 0.006, "all at once takes 10 ms"


def test_long_work_leaves_the_event_loop_to_others() -> None:
    """Half a second of work for two requests; another task gets its turns all the while."""

    def work() -> Iterator[int]:
        for number in range(250):
            until = time.perf_counter() + 0.001
            while time.perf_counter() < until:
                pass
            yield number

    async def run() -> tuple[list[int], int]:
        pace, ticks, found = Pace(), 0, []

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        async def items() -> None:
            async for some in pace.items(work()):  # type: ignore[arg-type]
                found.extend(some)

        ticking = asyncio.create_task(tick())
        await pace.finish(work(), is_small=True)  # type: ignore[arg-type]
        assert ticks > 100, "small work, too, is not done at once"
        await asyncio.gather(items(), pace.finish(work()))  # type: ignore[arg-type]
        ticking.cancel()
        return found, ticks

    found, ticks = asyncio.run(run())
    assert found == list(range(250))
    assert ticks > 1000
