"""A server whose weights follow the trainer's samples from them, or the run stops. It is a real server, in threads here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_engines import ask
from support.weight_servers import TOKEN, ServedPolicy, served

from redline.config import Config, resolve, validate
from redline.config.sections.lora import LoraConfig
from redline.engine import EngineSession
from redline.engine.adapters.openai_server import OpenAIServerEngine
from redline.errors import ConfigError, ServerAwayError, WeightSyncError
from redline.launch.build import make_probe
from redline.launch.kinds import make_other_engine
from redline.launch.models import load_policy
from redline.models.decoder import Decoder
from redline.models.files.hf import load_decoder
from redline.models.files.sources import model_folder
from redline.models.lora.trainable import add_adapter
from redline.models.prompt_logprobs import prompt_logprobs
from redline.types import Completion, VersionSpan, WeightSet
from redline.weight_sync import WeightProtocol
from redline.weight_sync.transports import http
from redline.weight_sync.transports.http_calls import HttpServer, Json

TOKENS = [5, 9, 3, 17, 4, 8]


def decoder() -> Decoder:
    loaded = load_decoder(model_folder("builtin:tiny"))
    assert isinstance(loaded, Decoder)
    return loaded


@pytest.fixture(scope="module")
def shared() -> Iterator[ServedPolicy]:
    with served(decoder()) as policy:
        yield policy


@pytest.fixture
def server(shared: ServedPolicy, monkeypatch: pytest.MonkeyPatch) -> ServedPolicy:
    monkeypatch.setenv("SERVERS_TOKEN", TOKEN)
    shared.start_again()
    return shared


def config(url: str, **engine: Any) -> Config:
    at = {"kind": "openai", "url": f"{url}/v1", "weights_token_env": "SERVERS_TOKEN", "timeout_s": 120, **engine}
    model = {"path": "builtin:tiny", "dtype": "float32"}
    task = {"kind": "import", "path": "letters:Letters"}
    return resolve(validate({"run": {"device": "cpu"}, "model": model, "rollouts": {"task": task}, "engine": at})).config


class Run:
    """A run as far as weights go, connected as `launch.build` does it. With a rank it trains an adapter alone."""

    def __init__(self, url: str, rank: int = 0, **engine: Any) -> None:
        settings, self.version = config(url, **engine), 0
        model = load_policy(settings)
        assert isinstance(model.decoder, Decoder)
        self.decoder = model.decoder
        if rank:
            add_adapter(self.decoder, LoraConfig(rank=rank), torch.float32, 0)
        side = make_other_engine(settings, model, self)  # type: ignore[arg-type]
        assert isinstance(side.engine, OpenAIServerEngine)
        self.engine = side.engine
        self.sync = WeightProtocol(side.transport, EngineSession(self.engine), probe=make_probe(model))
        side.join(self.sync)

    def weights(self) -> WeightSet:
        return WeightSet(self.version, {n: p.detach() for n, p in self.decoder.named_parameters() if p.requires_grad})

    @torch.no_grad()
    def step(self) -> None:
        with self.sync.writing():
            self.version += 1
            for tensor in self.weights().tensors.values():
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(self.version)))

    def update(self) -> None:
        self.sync.engine.apply(self.sync.publish(self.weights()))

    def expected(self) -> Any:
        """What the trainer makes of a prompt; the server must come to the same."""
        return pytest.approx(prompt_logprobs(self.decoder, TOKENS), abs=1e-3)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_server_samples_from_every_version_also_of_an_adapter_that_is_merged(server: ServedPolicy, rank: int) -> None:
    run = Run(server.url, rank)
    for version in range(3):
        run.update()
        assert run.engine.prompt_logprobs(TOKENS) == run.expected()
        [completions] = run.engine.generate([ask(6, 4, n=3)])
        assert {completion.versions for completion in completions} == {VersionSpan(version, version)}
        run.step()
    assert run.engine.prompt_logprobs(TOKENS) != run.expected()


def test_a_server_that_samples_from_other_weights_than_it_was_sent_is_refused_with_both_figures(
    server: ServedPolicy,
) -> None:
    elsewhere = decoder()
    tensors = {name: parameter.detach().clone() for name, parameter in elsewhere.named_parameters()}
    with served(elsewhere, live=tensors) as wrong:
        run = Run(wrong.url)
        run.update()
        run.step()
        with pytest.raises(
            WeightSyncError, match=r"does not sample from the weights .* more than 0\.01 \(their means: -"
        ) as caught:
            run.update()
        assert "engine.served_model" in caught.value.hint
        assert wrong.endpoint.version == 0, "it has gone back"
        assert run.engine.version == 0


def test_an_adapter_of_the_server_is_not_trained_in_place_of_the_model(server: ServedPolicy) -> None:
    with served(decoder(), adapters=("poet",)) as policy:
        with pytest.raises(ConfigError, match=r"engine\.served_model = poet: the server has an adapter of m"):
            Run(policy.url, served_model="poet")
        Run(policy.url, served_model="m")


def test_a_server_that_was_started_again_is_brought_to_the_current_version(server: ServedPolicy) -> None:
    run = Run(server.url)
    for _ in range(2):
        run.update()
        run.step()
    run.update()
    server.start_again()
    assert run.engine.prompt_logprobs(TOKENS) != run.expected()
    [completions] = run.engine.generate([ask(6, 4, n=3)])
    assert len(completions) == 3
    assert run.engine.prompt_logprobs(TOKENS) == run.expected()
    assert server.endpoint.version == 2
    server.start_again()
    run.step()
    run.update()
    assert run.engine.prompt_logprobs(TOKENS) == run.expected()


class DiesInAnUpload:
    """Starts the server again under the first bucket that is sent to it. With the next one it asks the new server for
    completions, as rollouts beside the trainer do."""

    def __init__(self, run: Run, server: ServedPolicy, monkeypatch: pytest.MonkeyPatch, *, looks: bool) -> None:
        self._run, self._server, self._looks, self._call = run, server, looks, HttpServer.call
        self._num_puts = 0
        self.came: list[Completion] = []
        """What counts of the answers."""
        monkeypatch.setattr(HttpServer, "call", lambda *asked: self.call(*asked))
        monkeypatch.setattr(http, "PAUSE_S", 0.01)

    def call(self, to: HttpServer, method: str, *rest: Any) -> Json:
        self._num_puts += method == "PUT"
        if method == "PUT" and self._num_puts == 1:
            self._server.start_again()
            raise ServerAwayError("the connection was reset")
        if method == "PUT" and self._num_puts == 2:
            self._ask()
        return self._call(to, method, *rest)

    def _ask(self) -> None:
        """Returns when the answers are there; where it looks, when the engine has looked at them too."""
        engine = self._run.engine
        engine.submit(ask(6, 8, n=2))
        wait(engine._futures)
        while self._looks and not self.came and engine._restoring is None:
            self.step()

    def step(self) -> None:
        for _, piece in self._run.engine.step():
            assert not isinstance(piece, Exception)
            assert piece.completion is not None
            self.came.append(piece.completion)


@pytest.mark.parametrize("looks", [True, False], ids=["while weights are sent", "after the update"])
def test_what_a_server_answers_from_its_own_model_while_an_update_is_sent_is_asked_again(
    server: ServedPolicy, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(server.url)
    for _ in range(2):
        run.update()
        run.step()
    dies = DiesInAnUpload(run, server, monkeypatch, looks=looks)
    run.update()
    while run.engine.has_work:
        dies.step()
    assert len(dies.came) == 2
    prompt = ask(6, 8).prompt_ids
    for completion in dies.came:
        whole = prompt_logprobs(run.decoder, np.concatenate([prompt, completion.token_ids]).tolist())
        assert completion.versions == VersionSpan(2, 2)
        assert completion.logprobs.tolist() == pytest.approx(whole[len(prompt) - 1 :], abs=1e-3)
