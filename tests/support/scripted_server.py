"""A server over an engine that says what a test tells it to, and clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
import numpy as np
import openai
import uvicorn
from support.eventually import eventually

from redline.errors import EngineError
from redline.models.files.tiny import tiny_tokenizer
from redline.serve.app import make_app
from redline.serve.requests.calls import Served
from redline.serve.requests.limits import ServeLimits
from redline.serve.vocabulary import Vocabulary
from redline.types import Completion, Delta, EngineStats, FinishReason, GenerateRequest, TopLogprobs, VersionSpan

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
MAX_POSITIONS = 200
STATS = EngineStats(*[0] * 14)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


@dataclass
class ScriptedEngine:
    """Says `script(request, index)`, a token at a time, and refuses what `refuse` gives a reason for."""

    script: Callable[[GenerateRequest, int], str] = lambda request, index: "hello"
    refuse: Callable[[GenerateRequest], str | EngineError | None] = lambda request: None
    fail_after: int | None = None
    """Tokens after which the engine gives up."""
    is_endless: bool = False
    """Repeat the script until somebody closes the stream; those that have begun go on when it becomes False."""
    is_alive: bool = True
    failure: Exception | None = None
    step_s: float = 0.0
    cached_tokens: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    num_open: int = 0

    @property
    def stats(self) -> EngineStats:
        return replace(STATS, running=self.num_open, generated_tokens=7)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        reason = self.refuse(request) if self.is_alive else "the engine has stopped"
        if reason:
            raise reason if isinstance(reason, EngineError) else EngineError(reason, "ask otherwise")
        self.requests.append(request)
        self.num_open += 1
        is_endless = self.is_endless
        try:
            said = {index: self._completion(request, index) for index in request.sampling.indices}
            for position in range(max(len(completion.token_ids) for completion in said.values())):
                await asyncio.sleep(0)
                if position == self.fail_after:
                    raise EngineError("the model gave NaN", "look for NaN in the weights")
                for index, completion in said.items():
                    if position < len(completion.token_ids):
                        yield _piece(completion, index, position)
            while is_endless:
                await asyncio.sleep(0.001)
                yield _piece(said[request.sampling.first_index], request.sampling.first_index, 0)
        finally:
            self.num_open -= 1

    async def complete(self, request: GenerateRequest) -> list[Completion]:
        found = {delta.index: delta.completion async for delta in self.stream(request) if delta.completion}
        return [found[index] for index in sorted(found)]

    def _completion(self, request: GenerateRequest, index: int) -> Completion:
        sampling, tokens, stop = request.sampling, ids(self.script(request, index)), None
        for count in range(1, len(tokens) + 1):
            text = TOKENIZER.decode(tokens[:count], skip_special_tokens=True)
            stop = next((s for s in sampling.stop if s in text), None)
            if stop or tokens[count - 1] in sampling.stop_token_ids or count == sampling.max_tokens:
                tokens = tokens[:count]
                break
        logprobs = -0.25 * np.arange(1, len(tokens) + 1, dtype=np.float32)
        reason = FinishReason.STOP if stop or tokens[-1] in sampling.stop_token_ids else FinishReason.LENGTH
        prompt_logprobs = -np.arange(len(request.prompt_ids), dtype=np.float32)
        prompt_logprobs[0] = np.nan
        return Completion(
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=logprobs,
            finish_reason=reason,
            versions=VersionSpan(0, 0),
            queue_s=0.01,
            prefill_s=0.02,
            decode_s=0.3,
            cached_tokens=self.cached_tokens,
            stop=stop,
            top_logprobs=_top(tokens, logprobs, sampling.top_logprobs) if sampling.top_logprobs else None,
            prompt_logprobs=prompt_logprobs if sampling.prompt_logprobs else None,
        )


def _top(tokens: list[int], logprobs: np.ndarray, k: int) -> TopLogprobs:
    """The token itself, its successors after it, and what is impossible last."""
    columns = np.arange(k)
    falling = np.where(columns == k - 1, -np.inf, logprobs[:, None] - columns) if k > 1 else logprobs[:, None]
    return TopLogprobs((np.array(tokens, dtype=np.int32)[:, None] + columns).astype(np.int32), falling.astype(np.float32))


def _piece(whole: Completion, index: int, position: int) -> Delta:
    here, top = slice(position, position + 1), whole.top_logprobs
    return Delta(
        index,
        whole.token_ids[here],
        whole.logprobs[here],
        TopLogprobs(top.token_ids[here], top.logprobs[here]) if top else None,
        whole if position == len(whole.token_ids) - 1 else None,
    )


@dataclass
class Site:
    """A server that runs, and clients for it."""

    engine: ScriptedEngine
    url: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        headers = {"content-type": "application/json"} | options.pop("headers", {})
        return httpx2.post(self.url + path, content=json.dumps(body), headers=headers, **{"timeout": 300, **options})

    def chat(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], **fields)

    def complete(self, prompt: Any = "hi", **fields: Any) -> Any:
        return self.client.completions.create(model="m", prompt=prompt, **fields)

    def metric(self, line: str) -> float:
        found = [row for row in httpx2.get(f"{self.url}/metrics", timeout=300).text.splitlines() if row.startswith(line + " ")]
        return float(found[0].rpartition(" ")[2])

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Block until a condition holds."""
        eventually(condition)


@contextlib.contextmanager
def site(
    engine: ScriptedEngine,
    api_key: str | None = None,
    adapters: tuple[str, ...] = (),
    limits: ServeLimits | None = None,
    hosts: tuple[str, ...] = (),
    rows: int = 256,
    send_bytes: int | None = None,
) -> Iterator[Site]:
    """`send_bytes`: how much the system keeps of what is sent to one client and not read; None for what it likes, megabytes."""
    served = Served("m", Vocabulary(TOKENIZER), (END,), MAX_POSITIONS, adapters, rows=rows)
    app = make_app(engine, served, api_key, limits, hosts)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    if send_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.002)
        yield Site(engine, f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join()


def refusal(response: httpx2.Response) -> tuple[int, str | None, str | None]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return response.status_code, error["param"], error["code"]
