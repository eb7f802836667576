"""`redline.Engine`: the model's own tokens, one reply per prompt, and clear refusals."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from redline import Engine, RedlineError, Reply
from redline.models.files.sources import model_folder

HELLO = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("builtin:tiny", device="cpu", dtype="float32", max_num_seqs=8) as engine:
        yield engine


def greedy(ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """What transformers makes of the same model, step by step."""
    model = AutoModelForCausalLM.from_pretrained(model_folder("builtin:tiny"), dtype=torch.float32)
    tokens, logprobs = list(ids), []
    for _ in range(count):
        with torch.no_grad():
            row = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].double(), dim=-1)
        tokens.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return tokens[len(ids) :], logprobs


def test_without_temperature_the_reply_is_the_likeliest_text(engine: Engine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder("builtin:tiny"))
    reply = engine.generate("one two", temperature=0, max_tokens=6)
    tokens, logprobs = greedy(tokenizer.encode("one two"), 6)
    assert list(reply.tokens) == tokens[: len(reply.tokens)]
    assert reply.logprobs == pytest.approx(logprobs[: len(reply.tokens)], abs=1e-4)
    assert reply.text == tokenizer.decode(reply.tokens, skip_special_tokens=True)
    assert reply.finish_reason == ("length" if len(reply.tokens) == 6 else "stop")


def test_a_list_gives_a_list_in_order_and_equal_prompts_get_replies_of_their_own(engine: Engine) -> None:
    replies = engine.generate(["one", "two", "one"], max_tokens=12)
    assert [type(reply) for reply in replies] == [Reply] * 3
    assert replies[0].tokens != replies[2].tokens
    again = engine.generate(["one", "two", "one"], max_tokens=12)
    assert [reply.tokens for reply in again] == [reply.tokens for reply in replies]
    assert engine.generate("one", max_tokens=12).tokens == replies[0].tokens, "whatever else is in the batch"
    assert engine.generate("one", max_tokens=12, seed=1).tokens != replies[0].tokens
    for reply in replies:
        assert len(reply.logprobs) == len(reply.tokens) <= 12
        assert all(math.isfinite(value) and value <= 0 for value in reply.logprobs)
    assert engine.generate([]) == []


def test_a_conversation_is_rendered_by_the_models_template(engine: Engine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder("builtin:tiny"))
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    reply = engine.chat(HELLO, temperature=0, max_tokens=5)
    assert list(reply.tokens) == greedy(tokenizer.encode(text, add_special_tokens=False), 5)[0][: len(reply.tokens)]
    assert [reply.tokens for reply in engine.chat([HELLO, HELLO], temperature=0, max_tokens=5)] == [reply.tokens] * 2


def test_a_stop_string_ends_the_text_before_it(engine: Engine) -> None:
    whole = engine.generate("one", max_tokens=40)
    stop = next(char for char in whole.text[1:] if char.isascii() and char.isprintable())
    cut = engine.generate("one", max_tokens=40, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.tokens == whole.tokens[: len(cut.tokens)]


def test_a_reply_without_a_limit_takes_the_room_there_is() -> None:
    with Engine.load("builtin:tiny", device="cpu", max_model_len=24) as engine:
        assert len(engine.generate("one two three").tokens) <= 24
        with pytest.raises(RedlineError, match="exceed the model's 24 positions"):
            engine.generate("one two three", max_tokens=24)


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("builtin:none", {}, "builtin:none"),
        ("builtin:tiny", {"max_num_sequences": 3}, "engine.max_num_sequences"),
        ("builtin:tiny", {"dtype": "float64"}, "model.dtype"),
        ("builtin:tiny", {"max_num_seqs": 0}, "engine.max_num_seqs"),
    ],
)
def test_a_model_or_setting_that_there_is_not_is_refused(path: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RedlineError) as caught:
        Engine.load(path, **settings)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_new_tokens": 3}, "no sampling option max_new_tokens"),
        ({"temperature": -1}, "temperature = -1 makes no sense"),
        ({"seed": 2**40}, "seed = 1099511627776 makes no sense"),
        ({"max_tokens": 0}, "nothing to generate"),
        ({"max_tokens": 2.5}, "max_tokens = 2.5 is not a whole number"),
        ({"max_tokens": "3"}, "max_tokens = '3' is not a whole number"),
        ({"top_k": 1.5}, "top_k = 1.5 is not a whole number"),
        ({"seed": 1.5}, "seed = 1.5 is not a whole number"),
        ({"seed": "x"}, "seed = 'x' is not a whole number"),
        ({"temperature": "a"}, "temperature = 'a' is not a number"),
        ({"stop": 5}, "a stop string is int, not text"),
        ({"stop": [1]}, "a stop string is int, not text"),
        ({"stop": "\ud800"}, "a stop string holds .* half of a character"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(engine: Engine, sampling: Any, message: str) -> None:
    with pytest.raises(RedlineError, match=message):
        engine.generate("one", **sampling)
    with pytest.raises(RedlineError, match="a conversation has no messages"):
        engine.chat([])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.generate([3]), "a prompt is int, not text"),
        (lambda engine: engine.generate(""), "a prompt has no tokens"),
        (lambda engine: engine.generate(None), "a prompt is NoneType, not text"),
        (lambda engine: engine.generate(5), "a prompt is int, not text"),
        (lambda engine: engine.generate(b"one"), "a prompt is bytes, not text"),
        (lambda engine: engine.generate(HELLO[0]), "a prompt is dict, not text"),
        (lambda engine: engine.generate("\ud800"), "a prompt holds .* half of a character"),
        (lambda engine: engine.generate([], max_new_tokens=3), "no sampling option max_new_tokens"),
        (lambda engine: engine.chat("hi"), "a conversation is str, not a list of messages"),
        (lambda engine: engine.chat(None), "a conversation is NoneType, not a list of messages"),
        (lambda engine: engine.chat(HELLO[0]), "a conversation is dict, not a list of messages"),
        (lambda engine: engine.chat(["hi"]), "a conversation is str, not a list of messages"),
        (lambda engine: engine.chat([1]), "a conversation is int, not a list of messages"),
        (lambda engine: engine.chat([HELLO, HELLO[0]]), "a conversation is dict, not a list of messages"),
        (lambda engine: engine.chat([["hi"]]), "a message is str, not a mapping"),
        (lambda engine: engine.chat([{"role": "user", "content": "\ud800"}]), "a conversation holds .* half of a character"),
        (lambda engine: engine.chat([{"role": "user"}]), "lacks its role or its content"),
        (lambda engine: engine.chat([[]]), "a conversation has no messages"),
    ],
)
def test_what_is_no_prompt_is_refused(engine: Engine, call: Callable[[Engine], Any], message: str) -> None:
    with pytest.raises(RedlineError, match=message) as caught:
        call(engine)
    assert caught.value.hint


def test_whatever_gives_prompts_one_by_one_is_as_good_as_a_list(engine: Engine) -> None:
    listed = engine.generate(["1", "2"], max_tokens=4, stop=["a", "b"])
    assert engine.generate((text for text in ("1", "2")), max_tokens=4, stop=iter("ab")) == listed
    assert engine.generate(map(str, [1, 2]), max_tokens=4, stop=("a", "b")) == listed
    assert engine.chat((message for message in HELLO), max_tokens=4) == engine.chat(HELLO, max_tokens=4)
    assert engine.chat((iter(HELLO) for _ in range(2)), max_tokens=4) == engine.chat([HELLO, HELLO], max_tokens=4)


def test_none_is_the_default_of_an_option_and_a_number_of_numpy_is_a_number(engine: Engine) -> None:
    plain = engine.generate("one")
    nothing: Any = dict.fromkeys(("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop"))
    assert engine.generate("one", **nothing) == plain
    numbers: Any = {"max_tokens": np.int64(5), "seed": np.int32(0), "temperature": np.float64(1)}
    assert engine.generate("one", **numbers).tokens == plain.tokens[:5]


def in_threads(call: Callable[[], None], count: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=call, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def all_end(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(60)
    return not any(thread.is_alive() for thread in threads)


def test_threads_take_turns() -> None:
    with Engine.load("builtin:tiny", device="cpu") as engine:
        alone, found = engine.generate(["one", "two"], max_tokens=16), []
        threads = in_threads(lambda: found.extend(engine.generate(["one", "two"], max_tokens=16) for _ in range(5)), 3)
        assert all_end(threads)
        assert found == [alone] * 15


def test_an_engine_closes_between_the_calls_of_other_threads() -> None:
    engine = Engine.load("builtin:tiny", device="cpu")
    alone, found, refused = engine.generate(["one", "two"], max_tokens=16), [], []
    has_begun = threading.Event()

    def until_closed() -> None:
        try:
            while True:
                found.append(engine.generate(["one", "two"], max_tokens=16))
                has_begun.set()
        except RedlineError as error:
            refused.append(error.message)

    threads = in_threads(until_closed, 2)
    assert has_begun.wait(60)
    engine.close()
    assert all_end(threads)
    assert refused == ["the engine is closed"] * 2
    assert all(replies == alone for replies in found)


def test_the_model_of_a_run_that_has_not_finished_is_refused() -> None:
    with pytest.raises(RedlineError) as caught:
        Engine.load(None)  # type: ignore[arg-type]
    assert "until a run has finished" in caught.value.hint


def test_a_closed_engine_says_so_and_has_let_its_memory_go() -> None:
    engine = Engine.load("builtin:tiny", device="cpu")
    inside = weakref.ref(engine._opened.engine)
    engine.generate("one", max_tokens=2)
    engine.close()
    engine.close()
    assert inside() is None
    with pytest.raises(RedlineError, match="the engine is closed"):
        engine.generate("one")
