"""`redline serve builtin:tiny` as a user starts it, through OpenAI's own client."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import torch
from safetensors.torch import save_file
from support.processes import redline, started, wait_until

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.models.files.hf import load_decoder, load_tokenizer, stop_token_ids
from redline.models.files.sources import model_folder
from redline.types import GenerateRequest, SamplingParams

MODEL = "builtin:tiny"
MESSAGES = [{"role": "user", "content": "Say something."}]
WITH_IDS = {"return_token_ids": True}
WITHOUT_END = {"ignore_eos": True}


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)

    def chat(self, **fields: Any) -> Any:
        return self.client().chat.completions.create(model=MODEL, messages=MESSAGES, **fields)

    def complete(self, **fields: Any) -> Any:
        return self.client().completions.create(model=MODEL, **{"prompt": "Once", **fields})

    def metrics(self) -> dict[str, float]:
        lines = httpx2.get(f"{self.url}/metrics").text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


@contextlib.contextmanager
def serving(cwd: Path, *arguments: str) -> Iterator[Server]:
    """On a port that the system chooses, until the block ends."""
    plain = ("--port", "0", "--device", "cpu", "--dtype", "float32", "run.num_threads=1")
    with started("serve", MODEL, *plain, *arguments, cwd=cwd) as process:
        log = cwd / "stderr.txt"
        assert wait_until(lambda: "serving" in log.read_text(), process), log.read_text()
        yield Server(process, re.search(r"http://[\d.]+:\d+", log.read_text())[0])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve")) as running:
        yield running


@dataclass
class Reference:
    """The engine without a server."""

    engine: NativeEngine
    tokenizer: Any
    ends: tuple[int, ...]

    def generate(self, prompt_ids: list[int], **sampling: Any) -> Any:
        params = SamplingParams(stop_token_ids=self.ends, **sampling)
        return self.engine.generate([GenerateRequest(np.array(prompt_ids, dtype=np.int32), params)])[0]


@pytest.fixture(scope="module")
def reference() -> Reference:
    folder = model_folder(MODEL)
    tokenizer = load_tokenizer(folder)
    engine = NativeEngine(load_decoder(folder), EngineConfig(max_num_seqs=8), tokenizer)
    return Reference(engine, tokenizer, stop_token_ids(folder, tokenizer))


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 300
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# ── the answers of the engine ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_chat_is_what_the_engine_generates(server: Server, reference: Reference) -> None:
    answer = server.chat(n=4, seed=5, max_tokens=24, logprobs=True, top_logprobs=3, extra_body=WITH_IDS)
    expected = reference.generate(answer.prompt_token_ids, n=4, seed=5, max_tokens=24, top_logprobs=3)
    assert answer.prompt_token_ids == reference.tokenizer.encode(
        reference.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )
    for choice, completion in zip(answer.choices, expected, strict=True):
        assert choice.token_ids == completion.token_ids.tolist()
        assert choice.finish_reason == completion.finish_reason
        assert choice.message.content == reference.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        content = choice.logprobs.content
        assert np.allclose([entry.logprob for entry in content], completion.logprobs, atol=1e-4)
        likeliest = [[top.logprob for top in entry.top_logprobs] for entry in content]
        assert np.allclose(likeliest, completion.top_logprobs.logprobs, atol=1e-4)


def test_a_completion_is_what_the_engine_generates(server: Server, reference: Reference) -> None:
    prompts = [reference.tokenizer.encode("Once"), reference.tokenizer.encode("Twice upon")]
    answer = server.complete(prompt=prompts, n=2, seed=1, max_tokens=12, logprobs=0, extra_body=WITH_IDS)
    expected = [c for ids in prompts for c in reference.generate(ids, n=2, seed=1, max_tokens=12)]
    assert [choice.token_ids for choice in answer.choices] == [c.token_ids.tolist() for c in expected]
    assert [choice.prompt_token_ids for choice in answer.choices] == [prompts[0], prompts[0], prompts[1], prompts[1]]
    for choice, completion in zip(answer.choices, expected, strict=True):
        assert np.allclose(choice.logprobs.token_logprobs, completion.logprobs, atol=1e-4)


def test_an_echo_scores_the_prompt_as_the_engine_does(server: Server, reference: Reference) -> None:
    ids = reference.tokenizer.encode("Once upon")
    answer = server.complete(prompt=ids, n=2, echo=True, logprobs=1, max_tokens=0)
    [completion] = reference.generate(ids, max_tokens=1, prompt_logprobs=True)
    for choice in answer.choices:
        first, *scored = choice.logprobs.token_logprobs
        assert (choice.text, first) == ("Once upon", None)
        assert np.allclose(scored, completion.prompt_logprobs[1:], atol=1e-4)


def test_a_stream_says_what_the_whole_answer_says(server: Server) -> None:
    asked = {"n": 3, "seed": 2, "max_tokens": 40, "logprobs": True, "extra_body": WITH_IDS}
    whole, usage = server.chat(**asked), None
    texts, tokens, scores, reasons = {}, {}, {}, {}
    for chunk in server.chat(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            tokens.setdefault(choice.index, []).extend(choice.token_ids)
            scores.setdefault(choice.index, []).extend(choice.logprobs.content)
            reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert tokens == {choice.index: choice.token_ids for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    for choice in whole.choices:
        assert [entry.token for entry in scores[choice.index]] == [entry.token for entry in choice.logprobs.content]


def test_a_stop_string_cuts_whole_and_streamed_text_alike(server: Server) -> None:
    free = server.complete(seed=3, max_tokens=60).choices[0].text
    stop = next(pair for pair in (free[i : i + 2] for i in range(10, 50)) if pair.isascii() and pair.isprintable())
    cut = server.complete(seed=3, max_tokens=60, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (free[: free.index(stop)], "stop", stop)
    chunks = server.complete(seed=3, max_tokens=60, stop=[stop], stream=True)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == cut.text


def test_a_prompt_seen_before_is_found_in_the_cache(server: Server) -> None:
    prompt = "The same long beginning of a prompt, sent twice to the same server. " * 3
    server.complete(prompt=prompt, max_tokens=1)
    assert server.complete(prompt=prompt, max_tokens=1).usage.prompt_tokens_details.cached_tokens > 100


def test_only_allowed_tokens_are_sampled(server: Server, reference: Reference) -> None:
    allowed = reference.tokenizer.encode("ab")
    answer = server.complete(max_tokens=30, extra_body={"allowed_token_ids": allowed, **WITH_IDS})
    assert set(answer.choices[0].token_ids) <= set(allowed)


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_that_is_not_served_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client().completions.create(model="gpt", prompt="hi")
    assert caught.value.code == "model_not_found"


def test_what_is_too_long_is_refused(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024") as caught:
        server.complete(prompt="x" * 1020, max_tokens=5)
    assert caught.value.code == "context_length_exceeded"


def test_what_the_engine_refuses_is_said_with_its_hint(server: Server) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"n = 1000 asks for 1000 choices, and a request may have 256.*engine.max_num_seqs"
    ):
        server.complete(n=1000)
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        server.complete(prompt=[99999], stream=True)


# ── clients that leave ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_clients_that_leave_end_their_requests(server: Server) -> None:
    stream = server.chat(n=8, stream=True, extra_body=WITHOUT_END)
    next(iter(stream))
    assert soon(lambda: server.metrics()["redline_engine_running"] == 8)
    stream.close()
    assert soon(lambda: server.metrics()["redline_engine_running"] == 0)
    impatient = server.client().with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(model=MODEL, prompt="x", max_tokens=1000, n=32, extra_body=WITHOUT_END)
    assert soon(lambda: server.metrics()["redline_engine_running"] == 0)
    assert server.complete(max_tokens=2, extra_body=WITHOUT_END).choices[0].finish_reason == "length"


# ── the rest of the surface ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_model_is_listed(server: Server) -> None:
    [model] = server.client().models.list().data
    assert (model.id, model.max_model_len) == (MODEL, 1024)


def test_health_and_metrics(server: Server) -> None:
    assert httpx2.get(f"{server.url}/health").status_code == 200
    before = server.metrics()
    server.complete(prompt="four", max_tokens=3, extra_body=WITHOUT_END)
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after if name in before}
    assert grown["redline_engine_generated_tokens_total"] == 3
    assert grown["redline_prompt_tokens_sum"] == 4
    assert grown["redline_time_to_first_token_seconds_count"] == 1
    assert grown["redline_request_seconds_count"] == 1
    assert after["redline_engine_kv_blocks"] > 0


def test_a_port_that_is_taken_is_refused_before_anything_loads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = redline("serve", MODEL, "--port", port, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, f"error: port {port} of 127.0.0.1 is taken")
    assert "hint: " in done.stderr


def test_other_machines_are_not_served_without_a_key(tmp_path: Path) -> None:
    done = redline("serve", MODEL, "--host", "0.0.0.0", cwd=tmp_path)
    assert (done.returncode, "export REDLINE_API_KEY=" in done.stderr) == (2, True)


# ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_key_guards_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame")
    with serving(tmp_path, "--host", "0.0.0.0", "--api-key-env", "MY_KEY", "--served-model-name", "tiny") as guarded:
        with pytest.raises(openai.AuthenticationError, match="API key"):
            guarded.client("wrong").models.list()
        assert [model.id for model in guarded.client("sesame").models.list().data] == ["tiny"]
        assert httpx2.get(f"{guarded.url}/health").status_code == 200


@pytest.mark.slow
def test_an_adapter_is_a_model_of_its_own(tmp_path: Path) -> None:
    adapter = tmp_path / "poet"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 64}))
    module, noise = "base_model.model.model.layers.0.mlp.down_proj", torch.Generator().manual_seed(0)
    sides = {"A": torch.randn(4, 128, generator=noise), "B": torch.randn(64, 4, generator=noise)}
    save_file({f"{module}.lora_{side}.weight": tensor for side, tensor in sides.items()}, adapter / "adapter_model.safetensors")
    with serving(tmp_path, "--lora", f"poet={adapter}") as both:
        base, *others = both.client().models.list().data
        assert [(model.id, model.parent) for model in (base, *others)] == [(MODEL, None), ("poet", MODEL)]
        asked: dict[str, Any] = {"prompt": "Once", "seed": 1, "max_tokens": 16, "extra_body": WITH_IDS}
        plain = both.client().completions.create(model=MODEL, **asked).choices[0].token_ids
        adapted = both.client().completions.create(model="poet", **asked).choices[0].token_ids
        assert plain != adapted
        assert both.client().completions.create(model=MODEL, **asked).choices[0].token_ids == plain


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_server_and_frees_its_port(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with serving(tmp_path) as idle:
        port = int(idle.url.rpartition(":")[2])
        short = idle.complete(max_tokens=1, extra_body=WITHOUT_END)
        idle.process.send_signal(number)
        assert idle.process.wait(timeout=30) == code
        assert short.choices[0].finish_reason == "length"
    with socket.create_server(("127.0.0.1", port), reuse_port=False):
        pass
    assert "Traceback" not in (tmp_path / "stderr.txt").read_text()


@pytest.mark.slow
def test_a_request_that_would_take_too_long_is_given_up_at_the_end(tmp_path: Path) -> None:
    with serving(tmp_path) as busy:
        outcomes: list[object] = []

        def ask() -> None:
            try:
                outcomes.append(busy.complete(max_tokens=1000, n=200, extra_body=WITHOUT_END))
            except openai.APIError as error:
                outcomes.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        assert soon(lambda: busy.metrics()["redline_engine_running"] > 0)
        busy.process.send_signal(signal.SIGTERM)
        assert busy.process.wait(timeout=30) == 0
        asking.join()
    [outcome] = outcomes
    assert isinstance(outcome, openai.APIStatusError)
    assert "stopped" in outcome.message
    assert "Traceback" not in (tmp_path / "stderr.txt").read_text()
