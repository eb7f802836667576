"""`redline.Engine`: the model's own tokens, one reply per prompt, and clear refusals."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

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
        (lambda engine: engine.chat([{"role": "user"}]), "lacks its role or its content"),
        (lambda engine: engine.chat([[]]), "a conversation has no messages"),
    ],
)
def test_what_is_no_prompt_is_refused(engine: Engine, call: Callable[[Engine], Any], message: str) -> None:
    with pytest.raises(RedlineError, match=message):
        call(engine)


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
