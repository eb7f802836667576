"""What `OpenAIServerEngine` says to a server, and makes of what it hears. Real servers are in `test_engine.py`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from support.fakes import FakeTasks

from redline.config.schema import RolloutsConfig
from redline.engine import EngineSession
from redline.engine.adapters import json_client
from redline.engine.adapters.openai_server import OpenAIServerEngine
from redline.errors import EngineError, EngineLostError, WeightSyncError
from redline.models.files.tiny import tiny_tokenizer
from redline.ports import Policy
from redline.rollouts import Chat, Dispatcher, RolloutSetup
from redline.types import Delta, FinishReason, GenerateRequest, SamplingParams, Task, TrajectoryGroup, WeightUpdate

Json = dict[str, Any]
Answer = tuple[int, Any]
"""Status and content; a status of 0 drops the connection."""


def choice(tokens: list[int], logprob: float = -0.5, **fields: Any) -> Answer:
    """What vLLM would answer."""
    logprobs = {"tokens": ["x"] * len(tokens), "token_logprobs": [logprob] * len(tokens)}
    plain = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": "length", "stop_reason": None}
    return 200, {"choices": [plain | fields], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}


@dataclass
class Events:
    """A stream, event by event, until nobody listens any more."""

    answers: Iterable[Json]
    num_sent: int = 0
    is_closed: threading.Event = field(default_factory=threading.Event)
    """Set when the other side has closed it before the end."""

    def send(self, file: Any) -> None:
        try:
            for answer in self.answers:
                file.write(f"data: {json.dumps(answer)}\n\n".encode())
                file.flush()
                self.num_sent += 1
            file.write(b"data: [DONE]\n\n")
        except OSError:
            self.is_closed.set()


def events(tokens: list[int], pause_s: float = 0.0, **last: Any) -> Iterator[Json]:
    """A completion token by token, as vLLM streams it, and what was used."""
    for place, token in enumerate(tokens):
        time.sleep(pause_s)
        is_last = place == len(tokens) - 1
        yield choice([token], **{"finish_reason": "length" if is_last else None, **(last if is_last else {})})[1] | {
            "usage": None
        }
    yield {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}


@dataclass
class FakeServer:
    """Answers /v1/completions with what `answer` makes of a request, and remembers all requests."""

    answer: Callable[[Json], Answer] = lambda body: choice([7] * body["max_tokens"])
    models: Answer = (200, {"data": [{"id": "policy", "max_model_len": 64}, {"id": "lora", "max_model_len": 64}]})
    bodies: list[Json] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    url: str = ""

    def engine(self, **options: Any) -> OpenAIServerEngine:
        return OpenAIServerEngine(self.url, **{"num_retries": 0, "timeout_s": 300.0, **options})

    def respond(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        self.headers.append(headers)
        if (method, path) == ("GET", "/v1/models"):
            return self.models
        assert (method, path) == ("POST", "/v1/completions")
        asked = json.loads(body)
        self.bodies.append(asked)
        return self.answer(asked)


class Listener(ThreadingHTTPServer):
    request_queue_size = 128  # or connections beyond the fifth wait for a second


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = fake.respond(self.command, self.path, body, dict(self.headers))
            if status and isinstance(content, Events):
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                content.send(self.wfile)
            elif status:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

        do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    with Listener(("127.0.0.1", 0), Handler) as listener:
        fake.url = f"http://127.0.0.1:{listener.server_address[1]}/v1"
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        yield fake
        listener.shutdown()
        thread.join()


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_client, "FIRST_PAUSE_S", 0.001)


def ask(**sampling: Any) -> GenerateRequest:
    return GenerateRequest(np.array([3, 4, 5], np.int32), SamplingParams(**{"max_tokens": 2, **sampling}))


def failing(times: int, status: int, content: Any = None) -> Callable[[Json], Answer]:
    """Fails that many times before it answers."""
    left = iter(range(times))
    return lambda body: (status, content) if next(left, None) is not None else choice([7, 7])


# ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_plain_request_leaves_nothing_to_the_models_generation_config(server: FakeServer) -> None:
    server.engine().generate([ask()])
    [body] = server.bodies
    assert body.pop("seed") >= 0
    assert body == {
        "model": "policy",
        "prompt": [3, 4, 5],
        "max_tokens": 2,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def test_everything_a_request_asks_for_reaches_the_server(server: FakeServer) -> None:
    server.answer = lambda body: choice([7], logprob=0.0)
    sampling = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "stop": ("end",),
        "stop_token_ids": (1, 2),
        "min_tokens": 3,
        "logit_bias": {8: 1.5, 9: -np.inf},
        "allowed_token_ids": (7, 8, 9),
    }
    server.engine().generate([ask(**sampling)])
    sent = server.bodies[-1]
    expected = json.loads(json.dumps({**sampling, "logit_bias": {"8": 1.5, "9": -100.0}}))
    assert {name: sent[name] for name in sampling} == expected


def test_every_completion_is_asked_for_with_a_seed_of_its_own(server: FakeServer) -> None:
    server.engine().generate([ask(n=4, seed=seed) for seed in range(4)])
    assert len({body["seed"] for body in server.bodies}) == 16
    assert all("n" not in body for body in server.bodies)


def test_an_adapter_is_a_model_of_the_server(server: FakeServer) -> None:
    server.engine(model="policy").generate([replace(ask(), adapter="lora")])
    assert server.bodies[0]["model"] == "lora"


def test_extra_fields_go_into_every_request(server: FakeServer) -> None:
    server.engine(extra={"ignore_eos": False, "priority": 3}).generate([ask()])
    assert (server.bodies[0]["ignore_eos"], server.bodies[0]["priority"]) == (False, 3)


def test_requests_are_under_way_at_the_same_time(server: FakeServer) -> None:
    together = threading.Barrier(6, timeout=300)

    def answer(body: Json) -> Answer:
        together.wait()
        return choice([7, 7])

    server.answer = answer
    server.engine(max_concurrent=6).generate([ask(n=6)])


def test_completions_come_in_the_order_asked_for(server: FakeServer) -> None:
    def answer(body: Json) -> Answer:
        time.sleep(0.05 if body["prompt"] == [1] else 0)
        return choice(body["prompt"])

    server.answer = answer
    requests = [replace(ask(n=2), prompt_ids=np.array([token], np.int32)) for token in (1, 2, 3)]
    found = server.engine().generate(requests)
    assert [[c.token_ids.tolist() for c in group] for group in found] == [[[1]] * 2, [[2]] * 2, [[3]] * 2]


# ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_completion_is_what_the_server_says(server: FakeServer) -> None:
    server.answer = lambda body: choice([7, 8], finish_reason="stop", stop_reason="end")
    [[completion]] = server.engine().generate([ask()])
    assert completion.token_ids.tolist() == [7, 8]
    assert completion.logprobs.tolist() == [-0.5, -0.5]
    assert completion.finish_reason == FinishReason.STOP
    assert completion.stop == "end"
    assert completion.cached_tokens == 2


def test_a_stop_token_is_no_stop_string(server: FakeServer) -> None:
    server.answer = lambda body: choice([7], finish_reason="stop", stop_reason=7)
    assert server.engine().generate([ask()])[0][0].stop is None


def test_token_ids_may_come_in_the_names_of_tokens(server: FakeServer) -> None:
    named = {"tokens": ["token_id:12", "token_id:3"], "token_logprobs": [-1.0, -2.0]}
    server.answer = lambda body: choice([], token_ids=None, logprobs=named)
    [[completion]] = server.engine().generate([ask()])
    assert completion.token_ids.tolist() == [12, 3]


def test_tokens_that_are_named_by_their_text_are_refused(server: FakeServer) -> None:
    server.answer = lambda body: choice([7, 7], token_ids=None)
    with pytest.raises(EngineError, match="by their text") as caught:
        server.engine().generate([ask()])
    assert "return_token_ids" in caught.value.hint


def test_an_answer_without_logprobs_is_refused(server: FakeServer) -> None:
    server.answer = lambda body: choice([7], logprobs=None)
    with pytest.raises(EngineError, match="no logprobs"):
        server.engine().generate([ask()])


def test_the_sampled_token_is_not_counted_among_the_likeliest(server: FakeServer) -> None:
    likeliest = {"token_id:9": -4.0, "token_id:1": -0.1, "token_id:2": -2.0}
    logprobs = {"tokens": ["token_id:9"], "token_logprobs": [-4.0], "top_logprobs": [likeliest]}
    server.answer = lambda body: choice([9], logprobs=logprobs)
    [[completion]] = server.engine().generate([ask(top_logprobs=2)])
    assert completion.top_logprobs is not None
    assert completion.top_logprobs.token_ids.tolist() == [[1, 2]]
    assert server.bodies[-1]["return_tokens_as_token_ids"]


def test_another_end_than_those_we_know_is_an_error(server: FakeServer) -> None:
    server.answer = lambda body: choice([7], finish_reason="content_filter")
    with pytest.raises(EngineError, match="content_filter"):
        server.engine().generate([ask()])


MALFORMED: dict[str, Answer] = {
    "fewer logprobs than tokens": choice([7, 7], logprobs={"token_logprobs": [-0.1]}),
    "more logprobs than tokens": choice([7], logprobs={"token_logprobs": [-0.1, -0.2]}),
    "a logprob that is null": choice([7, 7], logprobs={"token_logprobs": [-0.1, None]}),
    "a logprob that is no number": choice([7], logprobs={"token_logprobs": [float("nan")]}),
    "a probability above one": choice([7], logprobs={"token_logprobs": [0.5]}),
    "no list of logprobs": choice([7], logprobs={"tokens": ["x"]}),
    "a token that is none": choice([7], token_ids=["7"]),
    "a token below zero": choice([7], token_ids=[-1]),
    "more tokens than were asked for": choice([7, 7, 7]),
    "no token": choice([]),
    "an end that is an abort": choice([7], finish_reason="abort"),
    "no end": (200, {"choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [-0.1]}}]}),
    "no choice": (200, {"choices": []}),
    "two choices": (200, {"choices": [{}, {}]}),
    "a choice that is a text": (200, {"choices": ["hello"]}),
    "no likeliest tokens": choice([7], logprobs={"token_logprobs": [-0.1], "top_logprobs": [{}]}),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_answer_is_an_error_that_names_the_server(server: FakeServer, what: str) -> None:
    server.answer = lambda body: MALFORMED[what]
    with pytest.raises(EngineError, match=rf"the server {server.url} "):
        server.engine().generate([ask(top_logprobs=1 if "likeliest" in what else 0)])


@pytest.mark.parametrize("content", [{}, {"data": None}, {"data": ["policy"]}, {"data": [{"name": "policy"}]}])
def test_a_list_of_models_that_is_none_is_refused(server: FakeServer, content: Json) -> None:
    server.models = (200, content)
    with pytest.raises(EngineError, match="does not list its models"):
        server.engine()


# ── logprobs that nothing was sampled with ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sampling", "kind"),
    [({"temperature": 0.5}, "temperature"), ({"top_p": 0.9}, "top_p"), ({"logit_bias": {8: 1.0}}, "logit_bias")],
    ids=["temperature", "filter", "bias"],
)
def test_a_server_whose_logprobs_are_the_models_own_is_found_out(server: FakeServer, sampling: Json, kind: str) -> None:
    with pytest.raises(EngineError, match=kind) as caught:
        server.engine().generate([ask(**sampling)])
    assert "--logprobs-mode processed_logprobs" in caught.value.hint
    assert len(server.bodies) == 1


def test_a_server_is_examined_once_for_each_kind_of_request(server: FakeServer) -> None:
    server.answer = lambda body: choice([7], logprob=0.0)
    engine = server.engine()
    engine.generate([ask(temperature=0.5)])
    engine.generate([ask(temperature=0.7)])
    assert len(server.bodies) == 3
    engine.generate([ask(top_k=3)])
    assert server.bodies[3]["top_k"] == 1
    assert len(server.bodies) == 5


def test_at_temperature_one_both_are_the_same_and_nothing_is_examined(server: FakeServer) -> None:
    server.engine().generate([ask(), ask(temperature=0.0)])
    assert len(server.bodies) == 2


# ── failures ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_server_that_is_not_there_is_said_to_be_unreachable(server: FakeServer) -> None:
    with pytest.raises(EngineError, match=r"cannot reach http://127\.0\.0\.1:1/v1") as caught:
        OpenAIServerEngine("http://127.0.0.1:1/v1", num_retries=0)
    assert "start the server" in caught.value.hint


def test_a_page_that_is_not_json_is_no_server(server: FakeServer) -> None:
    server.models = (200, b"<html>")
    with pytest.raises(EngineError, match="does not answer in JSON"):
        server.engine()


def test_an_unknown_model_is_refused_with_those_there_are(server: FakeServer) -> None:
    with pytest.raises(EngineError, match="'other'") as caught:
        server.engine(model="other")
    assert "policy, lora" in caught.value.hint


def test_a_server_without_models_is_refused(server: FakeServer) -> None:
    server.models = (200, {"data": []})
    with pytest.raises(EngineError, match="does not serve") as caught:
        server.engine()
    assert "no model at all" in caught.value.hint


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("status", [0, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(server: FakeServer, status: int) -> None:
    server.answer = failing(2, status)
    [[completion]] = server.engine(num_retries=2).generate([ask()])
    assert completion.token_ids.tolist() == [7, 7]
    assert len(server.bodies) == 3


@pytest.mark.usefixtures("no_pauses")
def test_what_does_not_pass_is_told_in_the_servers_words(server: FakeServer) -> None:
    server.answer = failing(9, 503, {"error": {"message": "too many requests in the queue"}})
    with pytest.raises(EngineError, match="status 503: too many requests in the queue"):
        server.engine(num_retries=2).generate([ask()])
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("status", "content", "message", "hint"),
    [
        (400, {"error": {"message": "top_k is too large"}}, "refuses the request: top_k is too large", ""),
        (422, {"detail": "no such field"}, "refuses the request: no such field", ""),
        (401, {"error": "no key"}, "API key: no key", "api_key_env"),
        (404, {"object": "error", "message": "no model"}, "no model", "model's name"),
        (405, b"plain words", "plain words", ""),
    ],
    ids=["refused", "detail", "key", "unknown", "text"],
)
def test_a_refusal_is_final_and_in_the_servers_words(
    server: FakeServer, status: int, content: Any, message: str, hint: str
) -> None:
    server.answer = failing(1, status, content)
    with pytest.raises(EngineError, match=message) as caught:
        server.engine(num_retries=3).generate([ask()])
    assert hint in caught.value.hint
    assert len(server.bodies) == 1


def test_a_server_that_takes_too_long_is_not_asked_again(server: FakeServer) -> None:
    released = threading.Event()
    server.answer = lambda body: (released.wait(300), choice([7]))[1]
    with pytest.raises(EngineError, match=r"within 0\.5 s") as caught:
        server.engine(num_retries=3, timeout_s=0.5).generate([ask()])
    released.set()
    assert "timeout_s" in caught.value.hint
    assert len(server.bodies) == 1


def test_the_first_failure_ends_the_call_without_waiting_for_the_others(server: FakeServer) -> None:
    released = threading.Event()

    def answer(body: Json) -> Answer:
        if body["prompt"] == [1]:
            return 400, {"error": {"message": "not this one"}}
        released.wait(300)
        return choice([7])

    server.answer = answer
    requests = [replace(ask(), prompt_ids=np.array([token], np.int32)) for token in (2, 3, 1, *range(4, 50))]
    with pytest.raises(EngineError, match="not this one"):
        server.engine(max_concurrent=4).generate(requests)
    assert len(server.bodies) < 10
    released.set()


# ── keys and weights ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_key_comes_from_the_environment(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "secret")
    server.engine(api_key_env="THE_KEY").generate([ask()])
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}


def test_a_key_that_is_not_there_is_refused_by_the_name_of_its_variable(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THE_KEY", raising=False)
    with pytest.raises(EngineError, match="THE_KEY is not set"):
        server.engine(api_key_env="THE_KEY")


def test_a_server_cannot_take_new_weights_by_itself(server: FakeServer) -> None:
    engine = server.engine()
    engine.apply(WeightUpdate(0, ("w",), 0))
    with pytest.raises(EngineError, match="version 1") as caught:
        engine.apply(WeightUpdate(1, ("w",), 0))
    assert "push_weights" in caught.value.hint
    assert engine.version == 0


def test_weights_are_pushed_before_their_version_counts(server: FakeServer) -> None:
    pushed: list[tuple[int, int]] = []
    engine = server.engine(push_weights=lambda update: pushed.append((update.version, engine.version)))
    engine.apply(WeightUpdate(1, ("w",), 0))
    engine.apply(WeightUpdate(1, (), 0))
    assert pushed == [(1, 0)]
    assert engine.generate([ask()])[0][0].versions.oldest == 1


def test_a_key_with_a_line_break_is_refused_without_showing_it(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "se-cret\n")
    with pytest.raises(EngineError, match="THE_KEY has a character") as caught:
        server.engine(api_key_env="THE_KEY")
    assert "se-cret" not in str(caught.value)


def test_what_is_sampled_while_the_server_adopts_a_version_may_be_of_it(server: FakeServer) -> None:
    asked, released = threading.Semaphore(0), threading.Semaphore(0)

    def answer(body: Json) -> Answer:
        asked.release()
        released.acquire(timeout=300)
        return choice([7, 7])

    server.answer = answer
    engine = server.engine(push_weights=lambda update: None, max_concurrent=1)
    engine.submit(ask(n=3))
    asked.acquire(timeout=300)
    engine.adopting(1)  # the server may have version 1 from here on
    released.release()  # the first ends before we know
    asked.acquire(timeout=300)
    engine.apply(WeightUpdate(1, ("w",), 0))
    released.release(2)
    found = {}
    while engine.has_work:
        found |= {piece.index: piece.completion.versions for _, piece in engine.step()}  # type: ignore[union-attr]
    assert [(found[i].oldest, found[i].newest) for i in range(3)] == [(0, 1), (0, 1), (1, 1)]


def test_threads_that_wait_for_a_server_do_not_hold_up_the_end_of_the_process(server: FakeServer) -> None:
    released = threading.Event()
    server.answer = lambda body: (released.wait(300), choice([7]))[1]
    engine, before = server.engine(), set(threading.enumerate())
    engine.submit(ask(n=3))
    waiting = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("openai-server")]
    assert len(waiting) == 3
    assert all(thread.daemon for thread in waiting)
    engine.close()
    released.set()


# ── weights that get lost ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Weights:
    """The weights of a server. Implements `openai_server.WeightsThere`."""

    server: FakeServer
    num_losses: int = 0
    are_lost: bool = False
    restored: int = 0
    fails: bool = False
    answer: Callable[[Json], Answer] = lambda body: choice([7, 7])
    """Of the server that has its weights again."""
    missed: threading.Event = field(default_factory=threading.Event)
    """Set when somebody waits for them."""
    released: threading.Event = field(default_factory=threading.Event)

    def lose(self) -> None:
        """The server is started again: it answers 9 until its weights are back."""
        self.are_lost = True
        self.server.answer = lambda body: choice([9, 9])

    def are_there(self) -> bool:
        self.num_losses += self.are_lost
        return not self.are_lost

    def restore(self) -> None:
        self.missed.set()
        self.released.wait(300)
        if self.fails:
            raise WeightSyncError("it has another model", "serve the run's")
        self.restored += 1
        self.are_lost = False
        self.server.answer = self.answer


def drained(engine: OpenAIServerEngine) -> list[list[int]]:
    found: list[list[int]] = []
    while engine.has_work:
        for _, event in engine.step():
            if isinstance(event, EngineError):
                raise event
            found += [event.completion.token_ids.tolist()] if event.completion else []
    return found


def test_what_a_server_sampled_without_our_weights_is_asked_again(server: FakeServer) -> None:
    weights, engine = Weights(server), server.engine()
    engine.watch(weights)
    weights.lose()
    all_asked = threading.Barrier(4, timeout=300)
    server.answer = lambda body: (all_asked.wait(), choice([9, 9]))[1]
    engine.submit(ask(n=4))
    while not weights.num_losses:
        assert engine.step() == []
    other = engine.submit(ask())  # while it has not got them back
    dropped = engine.submit(ask())
    engine.abort(dropped)
    assert engine.step() == []
    asked = len(server.bodies)
    time.sleep(0.02)
    assert len(server.bodies) == asked, "nobody is asked meanwhile"
    weights.released.set()
    assert drained(engine) == [[7, 7]] * 5
    assert weights.restored == 1
    assert not engine.sampled_tokens(other)


def test_what_was_under_way_when_an_update_found_the_weights_lost_is_asked_again(server: FakeServer) -> None:
    weights, engine = Weights(server), server.engine()
    engine.watch(weights)
    weights.released.set()
    late = threading.Event()
    server.answer = lambda body: (late.wait(300), choice([9, 9]))[1]
    engine.submit(ask(n=2))
    weights.num_losses += 1  # the transport has noticed, and has sent everything
    server.answer = lambda body: choice([7, 7])
    assert drained(engine) == [[7, 7]] * 2
    late.set()


@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_was_away_is_asked_again_when_it_is_back(server: FakeServer) -> None:
    weights, engine = Weights(server), server.engine()
    engine.watch(weights)
    weights.released.set()
    server.answer = lambda body: (0, None)
    engine.submit(ask(n=2))
    assert drained(engine) == [[7, 7]] * 2
    assert weights.restored == 1


def test_a_new_kind_of_request_waits_for_a_server_that_is_away_and_is_examined_when_it_is_back(server: FakeServer) -> None:
    weights, engine = Weights(server, answer=lambda body: choice([7] * body["max_tokens"], logprob=0.0)), server.engine()
    engine.watch(weights)
    server.answer = lambda body: (0, None)
    engine.submit(ask(temperature=0.5))
    while not weights.missed.is_set():
        assert engine.step() == []
    engine.submit(ask(top_p=0.9))  # of another kind, while it has not got them back
    before = len(server.bodies)
    weights.released.set()
    assert drained(engine) == [[7, 7]] * 2
    examined = [body for body in server.bodies[before:] if body["max_tokens"] == 1]
    assert {"logit_bias" in body for body in examined} == {True, False}, "for both kinds"


def test_a_server_that_comes_back_with_the_models_own_logprobs_is_found_out(server: FakeServer) -> None:
    weights, engine = Weights(server), server.engine()
    engine.watch(weights)
    weights.released.set()
    server.answer = lambda body: choice([7] * body["max_tokens"], logprob=0.0)
    engine.generate([ask(temperature=0.5)])
    weights.lose()
    engine.submit(ask(temperature=0.5))
    with pytest.raises(EngineError, match="they leave out temperature"):
        drained(engine)


def test_a_server_that_is_not_trained_and_away_is_not_waited_for(server: FakeServer) -> None:
    engine = server.engine()
    server.answer = lambda body: (0, None)
    with pytest.raises(EngineLostError, match="cannot reach"):
        engine.submit(ask(temperature=0.5))


def test_a_server_that_does_not_get_its_weights_back_ends_everything_with_the_reason(server: FakeServer) -> None:
    weights, engine = Weights(server, fails=True), server.engine()
    engine.watch(weights)
    weights.released.set()
    weights.lose()
    engine.submit(ask())
    with pytest.raises(EngineLostError, match=r"has lost the weights that it was sent.*another model") as caught:
        drained(engine)
    assert caught.value.hint == "serve the run's"


def test_a_server_that_loses_its_weights_over_and_over_ends_everything(server: FakeServer) -> None:
    weights, engine = Weights(server), server.engine()
    engine.watch(weights)
    weights.released.set()
    server.answer = lambda body: (0, None)
    weights.restore = lambda: None  # type: ignore[method-assign]
    engine.submit(ask())
    with pytest.raises(EngineLostError, match="5 times in a row"):
        drained(engine)


# ── SGLang's server ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sglang(server: FakeServer) -> FakeServer:
    entries = [{"id": "policy", "parent": None}, {"id": "poet", "parent": "policy"}]
    server.models = (200, {"data": [{"owned_by": "sglang", "max_model_len": 64, **entry} for entry in entries]})
    return server


def test_sglang_is_not_told_to_ignore_ends_where_there_are_stop_tokens(sglang: FakeServer) -> None:
    sglang.engine().generate([ask(stop_token_ids=(5,))])
    sglang.engine().generate([ask()])
    assert [body["ignore_eos"] for body in sglang.bodies] == [False, True]


def test_sglang_echoes_logprobs_only_where_it_is_asked_for_more_than_none(sglang: FakeServer) -> None:
    sglang.answer = lambda body: choice([7], logprobs={"token_logprobs": [None, -1.0, -2.0, -0.5]})
    assert sglang.engine().prompt_logprobs([3, 4, 5]) == [-1.0, -2.0]
    assert sglang.bodies[0]["logprobs"] == 1


def test_sglang_has_an_adapter_behind_the_name_of_its_base(sglang: FakeServer) -> None:
    engine = sglang.engine(model="poet")
    assert engine.base_of_adapter == "policy"
    engine.generate([ask()])
    assert sglang.bodies[0]["model"] == "policy:poet"


def test_a_server_that_echoes_no_prompt_is_said_to_be_one(server: FakeServer) -> None:
    with pytest.raises(EngineError, match="does not echo a prompt"):
        server.engine().prompt_logprobs([3, 4, 5])


# ── replies that an environment ends ───────────────────────────────────────────────────────────────────────────────────


class FirstLine:
    async def play(self, task: Task, policy: Policy) -> float:
        return float(len((await policy.say(task.messages, until=lambda reply: "\n" in reply.text)).text))


def first_lines(server: FakeServer, max_tokens: int, beside: bool, group_size: int = 2) -> TrajectoryGroup:
    config = RolloutsConfig(
        task={"kind": "import", "path": "tests:Fake"},  # type: ignore[arg-type]
        environment={"name": "tests:Fake"},  # type: ignore[arg-type]
        group_size=group_size,
        max_new_tokens=max_tokens,
    )
    setup = RolloutSetup(FakeTasks(), lambda score: FirstLine(), Chat(TOKENIZER, None, ""), config, (), 5)
    rollouts = Dispatcher(EngineSession(server.engine()), setup, beside=beside)
    rollouts.begin([0], 0)
    [group] = rollouts.finished(300.0)
    rollouts.close()
    return group


def is_first_line(group: TrajectoryGroup) -> None:
    for t in group.trajectories:
        assert (t.failure, t.text, t.finish_reason) == (None, "ab\n", FinishReason.STOP)
        assert t.token_ids[t.loss_mask].tolist() == SAID[:3]
        assert t.logprobs[t.loss_mask].tolist() == [-0.5] * 3


TOKENIZER = tiny_tokenizer()
SAID = TOKENIZER.encode("ab\ncd\n", add_special_tokens=False)


@pytest.mark.parametrize("beside", [False, True], ids=["lockstep", "beside"])
def test_a_reply_that_the_environment_ends_is_cut_from_the_whole_answer(server: FakeServer, beside: bool) -> None:
    server.answer = lambda body: choice(SAID)
    is_first_line(first_lines(server, len(SAID), beside))


@pytest.mark.parametrize("beside", [False, True], ids=["lockstep", "beside"])
def test_a_server_that_streams_hears_that_a_reply_has_ended(server: FakeServer, beside: bool) -> None:
    streams: list[Events] = []
    endless = [*SAID, *[7] * 8000]
    server.models = (200, {"data": [{"id": "policy", "max_model_len": 10_000}]})

    def answer(body: Json) -> Answer:
        streams.append(Events(events(endless, pause_s=0.005)))
        return 200, streams[-1]

    server.answer = answer
    is_first_line(first_lines(server, len(endless), beside, group_size=3))
    assert all(body["stream"] for body in server.bodies)
    assert len(streams) == 3
    for stream in streams:
        assert stream.is_closed.wait(300), "the connection"


def test_a_stream_that_nobody_ends_is_the_completion_that_would_have_come_whole(server: FakeServer) -> None:
    server.answer = lambda body: (200, Events(events([7, 8, 9], stop_reason="x", finish_reason="stop")))
    engine = server.engine()
    number = engine.submit(ask(max_tokens=3), streaming=4)
    found = [event for _, event in stepped(engine)]
    assert [token for piece in found for token in piece.token_ids.tolist()] == [7, 8, 9]
    whole = found[-1].completion
    assert whole is not None
    assert (whole.token_ids.tolist(), whole.logprobs.tolist()) == ([7, 8, 9], [-0.5] * 3)
    assert (whole.finish_reason, whole.stop, whole.cached_tokens) == (FinishReason.STOP, "x", 3)
    assert engine.sampled_tokens(number) == {}


@pytest.mark.parametrize(
    "broken",
    [
        [{"error": {"message": "out of memory"}}],
        [choice([7], finish_reason=None)[1], {"choices": [{"text": "x", "logprobs": None, "finish_reason": None}]}],
        [choice([7], finish_reason=None)[1]],
        [
            *({"usage": None} | choice(ids, finish_reason=end)[1] for ids, end in (([7], None), ([7, 8], "length"))),
            {"choices": [], "usage": {"completion_tokens": 2}},
        ],
    ],
    ids=["error", "text alone", "cut", "from the beginning each time"],
)
def test_what_cannot_be_read_from_a_stream_is_asked_for_whole(server: FakeServer, broken: list[Json]) -> None:
    server.answer = lambda body: (200, Events(broken)) if body.get("stream") else choice([5, 6])
    engine = server.engine()
    engine.submit(ask(), streaming=4)
    [whole] = [event.completion for _, event in stepped(engine) if event.completion]
    assert whole.token_ids.tolist() == [5, 6]


def test_a_server_that_does_not_stream_tokens_is_asked_so_once(server: FakeServer) -> None:
    text = {"choices": [{"text": "x", "logprobs": None, "finish_reason": None}]}
    server.answer = lambda body: (200, Events([text])) if body.get("stream") else choice([5, 6])
    engine = server.engine()
    for _ in range(3):
        engine.submit(ask(), streaming=4)
        stepped(engine)
    assert [bool(body.get("stream")) for body in server.bodies] == [True, False, False, False]


def test_pieces_of_many_tokens_are_not_worth_an_event_for_each(server: FakeServer) -> None:
    engine = server.engine()
    engine.submit(ask(), streaming=16)
    [(_, whole)] = stepped(engine)
    assert whole.token_ids.tolist() == [7, 7]
    assert "stream" not in server.bodies[0]


def test_a_stream_of_an_aborted_request_is_closed(server: FakeServer) -> None:
    stream = Events(events([7] * 2000, pause_s=0.005))
    server.answer = lambda body: (200, stream)
    engine = server.engine()
    number = engine.submit(ask(max_tokens=50), streaming=4)
    while not engine.step():
        pass
    engine.abort(number)
    assert stream.is_closed.wait(300)
    assert not engine.has_work


def stepped(engine: OpenAIServerEngine) -> list[tuple[int, Delta]]:
    found: list[tuple[int, Delta]] = []
    while engine.has_work:
        for number, event in engine.step():
            assert isinstance(event, Delta)
            found.append((number, event))
    return found
