"""Steps of many rows on a GPU: whatever is switched on, the bits are those of the decoder's own pass."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.engine.native.running import many_rows
from redline.lab.material.networks import make_network
from redline.models.decoder import Decoder
from redline.types import GenerateRequest, SamplingParams

CONFIG = EngineConfig(max_num_seqs=160, max_model_len=256, max_num_batched_tokens=32768, kv_cache_memory_bytes=2**31)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    network = make_network("random:qwen2.5-0.5b", torch.device("cuda"), torch.bfloat16, seed=0).decoder
    assert isinstance(network, Decoder)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in network.layers:
            layer.qkv.bias.normal_()  # type: ignore[union-attr]
    return network


def ask(number: int, length: int, max_tokens: int, n: int = 1) -> GenerateRequest:
    prompt = np.random.default_rng(number).integers(2, 100_000, length).astype(np.int32)
    return GenerateRequest(prompt, SamplingParams(max_tokens=max_tokens, seed=number, n=n))


REQUESTS = {
    "splits that are merged": [ask(number, 100, 20) for number in range(40)],
    "one split": [ask(number, 50, 20) for number in range(160)],
    "rows that die": [ask(number, 60, 5 + 10 * (number % 3)) for number in range(90)],
    "common beginnings": [ask(number, 200, 20, n=32) for number in range(4)],
}


def bits(engine: NativeEngine, requests: list[GenerateRequest]) -> list[tuple[list[int], bytes]]:
    found = [completion for group in engine.generate(requests) for completion in group]
    return [(one.token_ids.tolist(), np.asarray(one.logprobs).tobytes()) for one in found]


@pytest.mark.gpu
@pytest.mark.parametrize("name", REQUESTS)
def test_no_switch_changes_a_bit(name: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for tuned, overlapped in itertools.product((False, True), repeat=2):
        monkeypatch.setattr(many_rows, "TUNED", tuned)
        monkeypatch.setattr(many_rows, "OVERLAPPED", overlapped)
        found.append(bits(NativeEngine(decoder, CONFIG), REQUESTS[name]))
    assert all(one == found[0] for one in found[1:])


@pytest.mark.gpu
def test_steps_that_guess_change_no_bit_either(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    request, found = replace(ask(7, 60, 20, n=48), task="7"), []
    [known] = NativeEngine(decoder, CONFIG).generate([request])
    for switched_on in (False, True):
        monkeypatch.setattr(many_rows, "TUNED", switched_on)
        monkeypatch.setattr(many_rows, "OVERLAPPED", switched_on)
        engine = NativeEngine(decoder, CONFIG.model_copy(update={"speculation": "always"}))
        for one in known:
            engine.remember("7", np.concatenate([request.prompt_ids, one.token_ids]))
        found.append(bits(engine, [request]))
        assert engine.stats.drafted_tokens > 0
    assert found[0] == found[1]
