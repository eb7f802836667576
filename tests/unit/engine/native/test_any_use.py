"""Requests at random, in caches too small for them: each gives what it gives alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.ahead_engine import AheadEngine
from support.tiny_engines import (
    PREFIX,
    Model,
    ask,
    assert_nothing_held,
    log_softmax,
    make_model,
    prompt,
    steps,
)

from redline.config.sections.engine import SpeculationMode
from redline.engine import NativeEngine
from redline.engine.native.running.sampler import stream, uniform
from redline.errors import EngineError
from redline.types import Completion, Delta, FinishReason, GenerateRequest, SamplingParams, WeightUpdate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("model"))


# ── anything at all ────────────────────────────────────────────────────────────────────────────────────────────────────


def random_request(rng: np.random.Generator) -> GenerateRequest:
    """One of few, so that prompts often begin alike and nothing has to be worked out too often."""
    seed = int(rng.integers(12))
    start = PREFIX[: int(np.random.default_rng(seed).choice([0, 3, 8, 16, 21]))]
    ids = np.concatenate([start, prompt(1 + seed % 7, seed)]).astype(np.int32)
    stops = (3, 30, 60) if seed % 3 == 0 else ()
    temperature = [1.0, 0.0, 0.7][seed % 3]
    return GenerateRequest(
        ids, SamplingParams(4 + 2 * seed, n=1 + seed % 4, temperature=temperature, seed=seed, stop_token_ids=stops)
    )


def fuzz(model: Model, seed: int, kind: type[NativeEngine], speculation: SpeculationMode = "off") -> NativeEngine:
    rng = np.random.default_rng(seed)
    engine = model.engine(
        kind=kind,
        num_blocks=int(rng.integers(14, 40)),
        max_num_seqs=int(rng.integers(4, 9)),
        max_num_batched_tokens=int(rng.choice([5, 16, 200])),
        enable_prefix_caching=bool(rng.integers(2)),
        speculation=speculation,
    )
    asked: dict[int, GenerateRequest] = {}
    streamed: dict[tuple[int, int], list[int]] = {}
    found: dict[tuple[int, int], Completion] = {}

    def take(events: list[tuple[int, Delta | EngineError]]) -> None:
        for number, piece in events:
            assert isinstance(piece, Delta)
            streamed.setdefault((number, piece.index), []).extend(piece.token_ids.tolist())
            if piece.completion is not None:
                assert (number, piece.index) not in found
                found[number, piece.index] = piece.completion

    streaming = set()
    actions = ["submit", "step", "abort", "end", "apply", "refuse"]
    for action in rng.choice(actions, size=60, p=[0.3, 0.51, 0.06, 0.05, 0.04, 0.04]):
        if action == "submit":
            request, piece = random_request(rng), int(rng.choice([0, 1, 3]))
            number = engine.submit(request, streaming=piece)
            asked[number] = request
            streaming |= {number} if piece else set()
        elif action == "step":
            take(engine.step())
        elif action == "abort" and asked:
            engine.abort(int(rng.choice(list(asked))))
        elif action == "end" and asked:
            engine.end(int(rng.choice(list(asked))), int(rng.integers(4)))
        elif action == "apply":
            engine.apply(WeightUpdate(engine.version + 1, (), 0))
        elif action == "refuse":
            with pytest.raises(EngineError):
                engine.submit(ask(200, 50))
    take(list(steps(engine)))
    assert_nothing_held(engine)
    assert found.keys() == {(number, index) for number, request in asked.items() for index in range(request.sampling.n)}
    for (number, index), completion in found.items():
        assert_as_alone(model, asked[number], index, completion, model.alone(asked[number])[index])
        if number in streaming:
            assert streamed[number, index] == completion.token_ids.tolist()
    return engine


def assert_as_alone(model: Model, request: GenerateRequest, index: int, found: Completion, alone: Completion) -> None:
    """Equal, or the beginning where it was given up. In other company a sum may be rounded otherwise, and a draw that falls on
    the very border between two tokens may then fall on its other side."""
    count = len(found.token_ids)
    if found.finish_reason != FinishReason.ABORT:
        assert found.finish_reason == alone.finish_reason
    same = found.token_ids == alone.token_ids[:count]
    if same.all():
        assert found.finish_reason == FinishReason.ABORT or count == len(alone.token_ids)
        np.testing.assert_allclose(found.logprobs, alone.logprobs[:count], atol=1e-4)
        return
    at = int(np.argmin(same))
    logits = model.logits(np.concatenate([request.prompt_ids, found.token_ids[:at]]))[-1]
    candidates = sorted([int(found.token_ids[at]), int(alone.token_ids[at])])
    if request.sampling.temperature == 0:
        assert abs(logits[candidates[0]] - logits[candidates[1]]) < 1e-4
        return
    share = np.exp(log_softmax(logits / request.sampling.temperature))
    draw = uniform(torch.tensor([stream(request.sampling.seed, index)]), torch.tensor([at])).item()
    assert abs(share[: candidates[0] + 1].sum() - draw) < 1e-5
    assert abs(share[: candidates[1]].sum() - draw) < 1e-5


@pytest.mark.parametrize("kind", [NativeEngine, AheadEngine])
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_whatever_happens_each_request_gives_what_it_gives_alone(model: Model, seed: int, kind: type[NativeEngine]) -> None:
    fuzz(model, seed, kind)


@pytest.mark.parametrize("kind", [NativeEngine, AheadEngine])
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_whatever_happens_guessed_tokens_are_those_that_would_have_been_sampled(
    model: Model, seed: int, kind: type[NativeEngine]
) -> None:
    assert fuzz(model, seed, kind, "always")._speculation.counts.accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NativeEngine, AheadEngine])
@pytest.mark.parametrize("seed", range(1000, 1010))
def test_whatever_happens_for_long_each_request_gives_what_it_gives_alone(
    model: Model, seed: int, kind: type[NativeEngine]
) -> None:
    for number in range(10):
        fuzz(model, 100 * seed + number, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NativeEngine, AheadEngine])
@pytest.mark.parametrize("seed", range(2000, 2005))
def test_whatever_happens_for_long_guessed_tokens_are_those_that_would_have_been_sampled(
    model: Model, seed: int, kind: type[NativeEngine]
) -> None:
    for number in range(10):
        fuzz(model, 100 * seed + number, kind, "always")
