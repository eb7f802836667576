"""The server over a scripted engine, through real sockets and the real client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from support.scripted_server import END, MAX_POSITIONS, TOKENIZER, ScriptedEngine, Site, ids, refusal, site

from redline.errors import EngineBusyError
from redline.serve import app
from redline.serve.answers import documents, generation
from redline.serve.answers.documents import Choice
from redline.serve.requests.calls import Served, make_call
from redline.serve.requests.limits import ServeLimits
from redline.serve.requests.protocol import CompletionRequest, read_request
from redline.serve.vocabulary import Vocabulary
from redline.types import Completion, FinishReason, VersionSpan


@pytest.fixture(scope="module")
def shared() -> Iterator[Site]:
    """One server for every test that scripts nothing but what is said."""
    with site(ScriptedEngine(), adapters=("poet",)) as running:
        yield running


@pytest.fixture
def here(shared: Site) -> Iterator[Site]:
    untouched = ScriptedEngine()
    shared.engine.__dict__.update(untouched.__dict__)
    yield shared
    shared.wait_until(lambda: shared.engine.num_open == 0)


def streamed(chunks: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
    return texts


# ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_chat_is_answered(here: Site) -> None:
    answer = here.chat(max_tokens=5)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello", "length")
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "m", "chatcmpl-")
    prompt = TOKENIZER.decode(here.engine.requests[0].prompt_ids)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_text_is_completed(here: Site) -> None:
    answer = here.complete("well, ")
    assert (answer.choices[0].text, answer.object, answer.id[:5]) == ("hello", "text_completion", "cmpl-")
    assert here.engine.requests[0].prompt_ids.tolist() == ids("well, ")


def test_the_four_shapes_of_a_prompt_are_the_same_to_the_engine(here: Site) -> None:
    for prompt in ("ab", ["ab"], ids("ab"), [ids("ab")]):
        here.complete(prompt)
    assert [request.prompt_ids.tolist() for request in here.engine.requests] == [ids("ab")] * 4


def test_choices_of_several_prompts_are_numbered_through(here: Site) -> None:
    here.engine.script = lambda request, index: f"{TOKENIZER.decode(request.prompt_ids)}{index}"
    answer = here.complete(["a", "b"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert streamed(here.complete(["a", "b"], n=2, stream=True)) == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


def test_a_content_of_several_parts_is_their_texts(here: Site) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    here.client.chat.completions.create(model="m", messages=[{"role": "user", "content": parts}])
    assert "user\none\ntwo<" in TOKENIZER.decode(here.engine.requests[0].prompt_ids)


def test_usage_counts_a_prompt_once_and_says_what_was_cached(here: Site) -> None:
    here.engine.cached_tokens = 2
    usage = here.complete("four", n=3, max_tokens=5).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 15, 19)
    assert usage.prompt_tokens_details.cached_tokens == 2


def test_sampling_reaches_the_engine(here: Site) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "min_tokens": 2, "stop_token_ids": [7], "allowed_token_ids": [1, 2]}
    here.complete(n=2, temperature=0.5, top_p=0.9, seed=3, max_tokens=9, logit_bias={"4": -1.5}, stop="x", extra_body=extra)
    sampling = here.engine.requests[0].sampling
    assert (sampling.n, sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (2, 0.5, 0.9, 3, 9)
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens, sampling.stop) == (5, 0.1, 2, ("x",))
    assert (sampling.stop_token_ids, sampling.allowed_token_ids, sampling.logit_bias) == ((7, END), (1, 2), {4: -1.5})


def test_requests_without_a_seed_draw_different_numbers(here: Site) -> None:
    here.complete()
    here.complete()
    first, second = here.engine.requests
    assert first.sampling.seed != second.sampling.seed


def test_a_chat_may_be_as_long_as_the_model_has_positions(here: Site) -> None:
    here.chat()
    request = here.engine.requests[0]
    assert len(request.prompt_ids) + request.sampling.max_tokens == MAX_POSITIONS


def test_ignore_eos_leaves_only_the_stop_tokens_of_the_request(here: Site) -> None:
    here.chat(extra_body={"ignore_eos": True, "stop_token_ids": [7]})
    assert here.engine.requests[0].sampling.stop_token_ids == (7,)


def test_an_adapter_is_a_model(here: Site) -> None:
    here.client.completions.create(model="poet", prompt="hi")
    here.client.completions.create(model="m", prompt="hi")
    assert [request.adapter for request in here.engine.requests] == ["poet", None]


def test_the_text_ends_before_a_stop_string_and_says_which(here: Site) -> None:
    here.engine.script = lambda request, index: "one two three"
    choice = here.chat(stop=["three", "two"]).choices[0]
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == ("one ", "stop", "two")


def test_the_end_of_the_model_is_no_text(here: Site) -> None:
    here.engine.script = lambda request, index: "bye<|im_end|>"
    choice = here.chat(extra_body={"return_token_ids": True}).choices[0]
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == ("bye", "stop", None)
    assert choice.token_ids == [*ids("bye"), END]


# ── streams ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("said", ["hello", "h€llo w\N{GRINNING FACE}rld", "one STOP two", "bye<|im_end|>"])
def test_a_stream_says_what_the_whole_answer_says(here: Site, said: str) -> None:
    here.engine.script = lambda request, index: said[index:]
    whole = here.chat(n=2, stop="STOP", max_tokens=50)
    expected = {choice.index: choice.message.content for choice in whole.choices}
    assert streamed(here.chat(n=2, stop="STOP", max_tokens=50, stream=True)) == expected


def test_a_stream_of_chat_begins_with_the_role_and_ends_with_the_reason(here: Site) -> None:
    chunks = list(here.chat(stream=True, max_tokens=5))
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None, None, None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_is_server_sent_events_and_ends_with_done(here: Site) -> None:
    answer = here.post("/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 2})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:2]] == ["h", "e"]
    assert events[2:] == ["data: [DONE]", ""]


def test_a_line_separator_of_unicode_does_not_end_an_event(here: Site) -> None:
    here.engine.script = lambda request, index: "a\u2028b\u0085c"
    assert streamed(here.complete(stream=True)) == {0: "a\u2028b\u0085c"}


def test_usage_comes_last_where_asked_for(here: Site) -> None:
    *before, last = here.complete("four", stream=True, max_tokens=3, stream_options={"include_usage": True})
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 3)
    assert all(chunk.usage is None for chunk in before)


def test_tokens_whose_text_is_held_back_are_streamed_all_the_same(here: Site) -> None:
    here.engine.script = lambda request, index: "€STOP"
    options = {"stop": "STOP", "max_tokens": 9, "extra_body": {"return_token_ids": True}}
    chunks = list(here.chat(stream=True, logprobs=True, **options))
    tokens = [token for chunk in chunks for token in chunk.choices[0].token_ids]
    scored = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    whole = here.chat(logprobs=True, **options).choices[0]
    assert tokens == whole.token_ids == ids("€STOP")
    assert scored == whole.logprobs.content
    assert chunks[0].prompt_token_ids == here.engine.requests[0].prompt_ids.tolist()


def test_an_engine_that_fails_in_the_middle_says_so_in_the_stream(here: Site) -> None:
    here.engine.fail_after = 2
    with pytest.raises(openai.APIError, match="NaN") as caught:
        list(here.chat(stream=True))
    assert caught.value.type == "server_error"


# ── token ids and logprobs ─────────────────────────────────────────────────────────────────────────────────────────────


def test_token_ids_come_where_asked_for(here: Site) -> None:
    asked = {"extra_body": {"return_token_ids": True}}
    chat, text = here.chat(max_tokens=2, **asked), here.complete("hi", max_tokens=2, **asked)
    assert chat.choices[0].token_ids == text.choices[0].token_ids == ids("he")
    assert chat.prompt_token_ids == here.engine.requests[0].prompt_ids.tolist()
    assert text.choices[0].prompt_token_ids == ids("hi")
    assert not hasattr(here.chat().choices[0], "token_ids")


def test_logprobs_of_a_chat(here: Site) -> None:
    here.engine.script = lambda request, index: "a€"
    content = here.chat(logprobs=True, top_logprobs=2, max_tokens=2).choices[0].logprobs.content
    assert [(entry.token, entry.logprob, entry.bytes) for entry in content] == [
        ("a", -0.25, [97]),
        ("bytes:\\xe2", -0.5, [0xE2]),
    ]
    assert [entry.logprob for entry in content[0].top_logprobs] == [-0.25, -9999.0]
    assert [entry.token for entry in content[0].top_logprobs] == ["a", "b"]


def test_logprobs_of_a_completion(here: Site) -> None:
    logprobs = here.complete(logprobs=2, max_tokens=2).choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (["h", "e"], [-0.25, -0.5], [0, 1])
    assert logprobs.top_logprobs == [{"h": -0.25, "i": -9999.0}, {"e": -0.5, "f": -9999.0}]


def test_tokens_may_be_named_by_their_ids(here: Site) -> None:
    """Two tokens may have the same text; a trainer must tell them apart."""
    asked = {"extra_body": {"return_tokens_as_token_ids": True}, "max_tokens": 1}
    first = ids("h")[0]
    assert here.complete(logprobs=1, **asked).choices[0].logprobs.top_logprobs == [{f"token_id:{first}": -0.25}]
    assert here.chat(logprobs=True, **asked).choices[0].logprobs.content[0].token == f"token_id:{first}"


def test_no_logprobs_unless_asked_for(here: Site) -> None:
    assert here.complete().choices[0].logprobs is None
    assert here.chat().choices[0].logprobs is None


def test_an_echo_is_the_prompt_with_its_logprobs_before_the_answer(here: Site) -> None:
    choice = here.complete("abc", echo=True, logprobs=1, max_tokens=1).choices[0]
    assert choice.text == "abch"
    assert choice.logprobs.tokens == ["a", "b", "c", "h"]
    assert choice.logprobs.token_logprobs == [None, -1.0, -2.0, -0.25]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert choice.logprobs.top_logprobs == [None, None, None, {"h": -0.25}]


def test_an_echo_without_an_answer_scores_the_prompt_alone(here: Site) -> None:
    answer = here.complete(ids("abc"), echo=True, logprobs=0, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].logprobs.token_logprobs) == ("abc", [None, -1.0, -2.0])
    assert answer.usage.completion_tokens == 0


def test_an_echo_can_be_streamed(here: Site) -> None:
    assert streamed(here.complete("abc", echo=True, stream=True, n=2)) == {0: "abchello", 1: "abchello"}


def test_a_long_answer_is_made_in_parts_and_says_the_same(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    here.engine.script = lambda request, index: f"{index} says h€llo w\N{GRINNING FACE}rld STOP"
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": ["abc", "de"], "n": 2, "logprobs": 2, "max_tokens": 30, "return_token_ids": True}),
        ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 20}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stop": "STOP", "return_token_ids": True}),
    ]
    at_once = [here.post(path, body).json() for path, body in asked]
    for module in (app, generation):
        monkeypatch.setattr(module, "SMALL_ANSWER", 0)
    monkeypatch.setattr(documents, "PART_LOGPROBS", 9)
    for (path, body), expected in zip(asked, at_once, strict=True):
        answer = here.post(path, body)
        assert answer.headers["content-type"] == "application/json"
        found = answer.json()
        assert found["choices"] == expected["choices"]
        assert found["usage"] == expected["usage"]
    assert streamed(here.complete("abc", echo=True, stream=True, n=2, max_tokens=8)) == {0: "abc0 says h", 1: "abc1 says h"}


def test_the_places_of_many_tokens_are_not_looked_for_at_once() -> None:
    served = Served("m", Vocabulary(TOKENIZER), (), 2000)
    call = make_call(CompletionRequest(prompt="hi", logprobs=0, max_tokens=1000), served, ServeLimits())
    said = np.full(1000, ids("a")[0], np.int32)
    reason = FinishReason.LENGTH
    whole = Completion(said, np.zeros(1000, np.float32), reason, VersionSpan(0, 0), queue_s=0, prefill_s=0, decode_s=0)
    parts = list(Choice(call, 0, 0, served.vocabulary).whole(whole))
    assert len(parts) >= 1000 // 64


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_that_is_not_served_is_not_found(here: Site) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt' does not exist"):
        here.client.completions.create(model="gpt", prompt="hi")
    error = here.post("/v1/completions", {"model": "gpt", "prompt": "hi"}).json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")


def test_what_the_engine_refuses_is_the_clients_mistake(here: Site) -> None:
    here.engine.refuse = lambda request: "n = 9 does not fit"
    for options in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match="n = 9 does not fit; ask otherwise"):
            here.chat(**options)


def test_one_refused_prompt_of_several_ends_the_others(here: Site) -> None:
    here.engine.is_endless = True
    here.engine.refuse = lambda request: "no" if request.prompt_ids[0] == ids("b")[0] else None
    for options in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError):
            here.complete(["a", "b"], **options)
        here.wait_until(lambda: here.engine.num_open == 0)


def test_a_prompt_without_room_for_the_answer_is_refused(here: Site) -> None:
    too_long = here.post("/v1/completions", {"prompt": "x" * MAX_POSITIONS})
    assert refusal(too_long) == (400, "prompt", "context_length_exceeded")
    too_much = here.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": MAX_POSITIONS})
    assert refusal(too_much) == (400, "messages", "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "hi", "temperature": -1}, "temperature"),
        ({"prompt": "hi", "temperature": "warm"}, "temperature"),
        ({"prompt": "hi", "n": 0}, "n"),
        ({"prompt": "hi", "max_tokens": 0}, None),
        ({"prompt": "hi", "stop": ""}, "stop.0"),
        ({"prompt": "hi", "logprobs": 21}, "logprobs"),
        ({"prompt": "hi", "seed": 2**63}, "seed"),
        ({"prompt": "hi", "echo": True, "logprobs": 1, "stream": True}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": "\ud800"}, None),
        ({}, "prompt"),
        ([], None),
    ],
)
def test_bad_input_is_refused_with_the_name_of_the_field(here: Site, body: Any, param: str | None) -> None:
    status, named, _ = refusal(here.post("/v1/completions", body))
    assert (status, named) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "json_object"}},
        {"audio": {"voice": "alloy"}},
        {"frequency_penalty": 0.5},
        {"reasoning_effort": "high"},
    ],
)
def test_what_we_know_and_cannot_do_is_refused(here: Site, fields: dict[str, Any]) -> None:
    answer = here.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **fields})
    assert refusal(answer) == (400, next(iter(fields)), "unsupported_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "frequency_penalty": 0.0},
        {"temperature": None, "stop": None, "n": None, "max_tokens": None, "seed": None, "tools": None},
        {"user": "me", "metadata": {"a": "b"}, "nobody_knows": [1, 2, 3]},
    ],
)
def test_what_asks_for_nothing_is_ignored(here: Site, fields: dict[str, Any]) -> None:
    answer = here.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **fields})
    assert answer.json()["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize(
    ("field", "meant"),
    [("temperture", "temperature"), ("max_tokns", "max_tokens"), ("stops", "stop"), ("top_logprob", "top_logprobs")],
)
def test_an_option_with_a_slip_of_the_pen_is_refused(here: Site, field: str, meant: str) -> None:
    """Ignored, it would give another answer than was asked for."""
    answer = here.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], field: 1})
    assert refusal(answer)[:2] == (400, field)
    assert f"did you mean {meant}?" in answer.json()["error"]["message"]


def test_looking_for_slips_of_the_pen_takes_no_time_of_others() -> None:
    """However many fields a body has, and however long their names are."""
    values = {f"max_tokens_{number}".ljust(size, "x"): 1 for number in range(20_000) for size in (32, 4096)}
    begun = time.process_time()
    read_request(CompletionRequest, {"prompt": "hi", **values})
    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "contnt": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {"content": "x"},
        "x",
    ],
)
def test_a_message_that_is_not_text_is_refused(here: Site, message: Any) -> None:
    status, named, _ = refusal(here.post("/v1/chat/completions", {"messages": [message]}))
    assert (status, named is not None and named.startswith("messages.0")) == (400, True)


def test_alternatives_without_logprobs_are_refused(here: Site) -> None:
    with pytest.raises(openai.BadRequestError, match="needs logprobs"):
        here.chat(top_logprobs=3)


def test_a_body_that_is_not_json_is_refused(here: Site) -> None:
    as_json = {"content-type": "application/json"}
    assert refusal(httpx2.post(f"{here.url}/v1/completions", content=b"{", headers=as_json))[0] == 400
    deep = b'{"prompt":' + b"[" * 10_000
    assert refusal(httpx2.post(f"{here.url}/v1/completions", content=deep, headers=as_json))[0] == 400
    form = httpx2.post(f"{here.url}/v1/completions", data={"prompt": "hi"})
    assert refusal(form)[0] == 415


def test_paths_and_methods_that_do_not_exist_are_refused_in_the_same_shape(here: Site) -> None:
    assert refusal(httpx2.get(f"{here.url}/v1/nothing"))[0] == 404
    assert refusal(httpx2.get(f"{here.url}/v1/completions"))[0] == 405


# ── clients that leave ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_client_that_leaves_a_stream_ends_its_request(here: Site) -> None:
    here.engine.is_endless = True
    left = 'redline_requests_total{endpoint="chat",status="499"}'
    chunks = here.chat(stream=True)
    next(iter(chunks))
    assert here.engine.num_open == 1
    chunks.close()
    here.wait_until(lambda: here.engine.num_open == 0)
    here.wait_until(lambda: here.metric(left) >= 1)


def test_a_client_that_leaves_while_it_waits_ends_its_request(here: Site) -> None:
    here.engine.is_endless = True
    with pytest.raises(httpx2.TimeoutException):
        here.post("/v1/completions", {"prompt": ["a", "b"]}, timeout=1.0)
    here.wait_until(lambda: here.engine.num_open == 0)


# ── the rest of the surface ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_models_are_the_base_and_its_adapters(here: Site) -> None:
    models = here.client.models.list().data
    assert [(model.id, model.object, model.parent) for model in models] == [("m", "model", None), ("poet", "model", "m")]


def test_a_model_is_found_by_its_name(here: Site) -> None:
    assert here.client.models.retrieve("poet").parent == "m"
    with pytest.raises(openai.NotFoundError) as caught:
        here.client.models.retrieve("gpt/4")
    assert (caught.value.code, caught.value.type) == ("model_not_found", "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_finds_no_place_for_its_adapter_is_told_to_come_again(stream: bool) -> None:
    busy = EngineBusyError("unfinished requests use all 1 adapters that fit", "wait for them")
    with site(ScriptedEngine(refuse=lambda request: busy if request.adapter else None), adapters=("poet",)) as there:
        answer = there.post("/v1/completions", {"prompt": "hi", "model": "poet", "stream": stream})
        assert refusal(answer) == (429, None, "rate_limit_exceeded")
        assert int(answer.headers["retry-after"]) >= 1
        assert there.post("/v1/completions", {"prompt": "hi", "stream": stream}).status_code == 200


def test_health_says_that_a_step_lasts_too_long(here: Site) -> None:
    here.engine.step_s = 119.0
    assert httpx2.get(f"{here.url}/health").status_code == 200
    here.engine.step_s = 121.0
    answer = httpx2.get(f"{here.url}/health")
    assert answer.status_code == 503
    assert "has lasted 121 s" in answer.json()["reason"]
    assert "120 s (serve.step_timeout_s)" in answer.json()["reason"]


def test_health_says_why_the_engine_is_gone(here: Site) -> None:
    assert httpx2.get(f"{here.url}/health").status_code == 200
    here.engine.is_alive, here.engine.failure = False, RuntimeError("out of memory")
    answer = httpx2.get(f"{here.url}/health")
    assert (answer.status_code, answer.json()["reason"]) == (503, "the engine has stopped: out of memory")
    assert refusal(here.post("/v1/completions", {"prompt": "hi"}))[0] == 503


def test_metrics_count_what_was_answered() -> None:
    with site(ScriptedEngine()) as fresh:
        fresh.complete("four", n=2, max_tokens=4)
        fresh.post("/v1/completions", {"prompt": []})
        assert fresh.metric('redline_requests_total{endpoint="completions",status="200"}') == 1
        assert fresh.metric('redline_requests_total{endpoint="completions",status="400"}') == 1
        assert fresh.metric('redline_completions_total{finish_reason="length"}') == 2
        assert fresh.metric("redline_prompt_tokens_sum") == 4
        assert fresh.metric("redline_generation_tokens_sum") == 8
        assert fresh.metric("redline_time_to_first_token_seconds_sum") == pytest.approx(0.06)
        assert fresh.metric("redline_inter_token_latency_seconds_count") == 6
        assert fresh.metric("redline_inter_token_latency_seconds_sum") == pytest.approx(0.6)
        assert fresh.metric("redline_request_seconds_count") == 1
        assert fresh.metric("redline_engine_generated_tokens_total") == 7


def test_a_key_is_asked_for_everywhere_but_at_health() -> None:
    with site(ScriptedEngine(), api_key="sesame") as guarded:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}, {"authorization": "Bearer sesamé"}):
            raw = {name: value.encode() for name, value in headers.items()}
            answer = guarded.post("/v1/completions", {"prompt": "hi"}, headers=raw)
            assert refusal(answer) == (401, None, "invalid_api_key")
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert httpx2.get(f"{guarded.url}/v1/models").status_code == 401
        assert httpx2.get(f"{guarded.url}/metrics").status_code == 401
        assert httpx2.get(f"{guarded.url}/health").status_code == 200
        knowing = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="sesame")
        assert knowing.completions.create(model="m", prompt="hi").choices[0].text == "hello"


def test_without_a_key_only_the_servers_own_names_are_answered() -> None:
    with site(ScriptedEngine(), hosts=("inside.example", "Behind.example:8443")) as guarded:
        port = guarded.url.rpartition(":")[2]
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "localhost.evil.example"):
            answer = httpx2.get(f"{guarded.url}/v1/models", headers={"host": host})
            assert refusal(answer) == (421, None, "wrong_host"), host
            assert httpx2.get(f"{guarded.url}/health", headers={"host": host}).status_code == 421
        for host in (f"LOCALHOST:{port}", "127.0.0.1", f"[::1]:{port}", "[::1]", "Inside.example:80", "behind.example"):
            assert httpx2.get(f"{guarded.url}/v1/models", headers={"host": host}).status_code == 200, host


def test_with_a_key_the_name_does_not_matter() -> None:
    with site(ScriptedEngine(), api_key="sesame") as guarded:
        headers = {"host": "public.example", "authorization": "Bearer sesame"}
        assert httpx2.get(f"{guarded.url}/v1/models", headers=headers).status_code == 200


def test_what_nobody_foresaw_is_an_error_of_the_server() -> None:
    engine = ScriptedEngine(script=lambda request, index: 1 / 0)
    with site(engine) as broken:
        assert refusal(broken.post("/v1/completions", {"prompt": "hi"}))[0] == 500
        assert broken.metric('redline_requests_total{endpoint="completions",status="500"}') == 1
