"""What the engine keeps while the weights change, and while it sleeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_models import CONFIGS, write_model
from support.tiny_engines import (
    FAMILY,
    MIXED,
    PREFIX,
    Model,
    ask,
    assert_nothing_held,
    assert_same,
    changed,
    finish,
    log_softmax,
    make_model,
    prompt,
)

from redline.engine import NativeEngine
from redline.errors import EngineError
from redline.models.files.hf import load_decoder
from redline.types import Completion, GenerateRequest, SamplingParams, VersionSpan, WeightUpdate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def each_alone(model: Model) -> list[list[Completion]]:
    return [model.alone(request) for request in MIXED]


# ── versions ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def change_weights(engine: NativeEngine, folder: Path, seed: int) -> Model:
    """New weights in the old storage, as a trainer puts them there."""
    fresh = Model(write_model(folder, CONFIGS[FAMILY], seed=seed, std=0.3), folder)
    state = load_decoder(folder).state_dict()
    for name, parameter in engine.decoder.named_parameters():
        parameter.copy_(state[name])
    return fresh


def test_after_an_update_nothing_of_the_old_policy_is_found(model: Model, tmp_path: Path) -> None:
    engine = model.engine()
    request = GenerateRequest(np.concatenate([PREFIX, prompt(5)]), SamplingParams(20, temperature=0.0))
    for version in range(3):
        oracle = change_weights(engine, tmp_path, seed=20 + version)
        engine.apply(WeightUpdate(version, (), 0))
        for repetition in range(2):
            [[completion]] = engine.generate([request])
            assert completion.token_ids.tolist() == oracle.greedy(request.prompt_ids, 20)
            assert completion.versions == VersionSpan(version, version)
            assert completion.cached_tokens == (24 if repetition else 0)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 9}, {"num_blocks": 30}], ids=["roomy", "chunks", "small"])
def test_requests_under_way_when_the_weights_change_spoil_nothing_for_those_that_come_later(
    model: Model, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Their blocks mix two policies. Prompts that begin with theirs must be computed as if they had never been."""
    engine = model.engine(**settings)
    early = [GenerateRequest(np.concatenate([PREFIX, prompt(n, n)]), SamplingParams(16, temperature=0.0)) for n in (1, 5, 9)]
    early.append(changed(early[0], n=3, temperature=1.0))
    for request in early:
        engine.submit(request)
    for _ in range(6):
        engine.step()
    oracle = change_weights(engine, tmp_path, seed=31)
    engine.apply(WeightUpdate(1, (), 0))
    for _ in range(3):
        engine.step()
    half = finish(engine)
    for completions in half.values():
        for completion in completions:
            assert 0 <= completion.versions.oldest <= completion.versions.newest == 1
    assert any(c.versions.oldest == 0 for completions in half.values() for c in completions)
    turns = [
        GenerateRequest(
            np.concatenate([request.prompt_ids, half[number][0].token_ids, prompt(3)]), SamplingParams(9, temperature=0.0)
        )
        for number, request in enumerate(early)
    ]
    for request in [early[2], *turns[1:]]:
        [[completion]] = engine.generate([request])
        assert completion.token_ids.tolist() == oracle.greedy(request.prompt_ids, request.sampling.max_tokens)
        assert completion.versions == VersionSpan(1, 1)


def test_versions_use_the_blocks_of_those_before_them_again(model: Model, tmp_path: Path) -> None:
    """On a CPU untouched blocks take no memory: a run of many versions takes that of one."""
    engine, touched = model.engine(num_blocks=200), []
    for version in range(1, 6):
        engine.generate([ask(40, seed=version, temperature=0.0)])
        engine.apply(WeightUpdate(version, (), 0))
        touched.append(engine._pool.num_touched)
    assert len(set(touched)) == 1


def test_when_an_old_version_comes_back_only_what_was_purely_its_own_is_found(model: Model, tmp_path: Path) -> None:
    engine = model.engine(max_num_batched_tokens=40)
    request = GenerateRequest(np.concatenate([PREFIX, prompt(5)]), SamplingParams(16, temperature=0.0, n=2))
    numbers = [engine.submit(request), engine.submit(ask(60, seed=1, temperature=0.0))]
    for _ in range(3):
        engine.step()
    change_weights(engine, tmp_path, seed=31)
    engine.apply(WeightUpdate(1, (), 0))
    said = finish(engine)[numbers[0]][0].token_ids
    with torch.no_grad():
        for name, weight in load_decoder(model.folder).named_parameters():
            engine.decoder.get_parameter(name).copy_(weight)
    engine.apply(WeightUpdate(0, (), 0))
    turn = GenerateRequest(np.concatenate([request.prompt_ids, said, prompt(3)]), SamplingParams(9, temperature=0.0))
    for again in (request, turn, ask(60, seed=1, temperature=0.0)):
        [[completion, *_]] = engine.generate([again])
        assert completion.token_ids.tolist() == model.greedy(again.prompt_ids, again.sampling.max_tokens)
        assert completion.cached_tokens > 0


def test_versions_cover_every_token_even_of_a_request_that_was_given_up(model: Model) -> None:
    engine = model.engine()
    numbers = [engine.submit(ask(5, 30, seed=seed), streaming=bool(seed)) for seed in range(2)]
    for version in range(3):
        engine.apply(WeightUpdate(version, (), 0))
        engine.step()
    for number in numbers:
        engine.abort(number)
    for [completion] in finish(engine).values():
        assert len(completion.token_ids) == 3
        assert completion.versions == VersionSpan(0, 2)


# ── prefixes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_cached_tokens_are_those_that_were_not_computed(model: Model) -> None:
    engine = model.engine()
    first = GenerateRequest(np.concatenate([PREFIX, prompt(1)]), SamplingParams(4))
    other = GenerateRequest(np.concatenate([PREFIX, prompt(9, 9)]), SamplingParams(4, n=3))
    assert [c.cached_tokens for c in engine.generate([first])[0]] == [0]
    computed = engine.stats.prompt_tokens
    assert [c.cached_tokens for c in engine.generate([other])[0]] == [20] * 3
    assert engine.stats.prompt_tokens - computed == len(other.prompt_ids) - 20
    assert engine.stats.prefix_query_tokens == 23 + 31
    assert engine.stats.prefix_hit_tokens == 20
    assert engine.stats.prefix_hit_rate == pytest.approx(20 / 54)


def test_a_next_turn_finds_what_was_said(model: Model) -> None:
    engine = model.engine()
    [[said]] = engine.generate([ask(10, 11, temperature=0.0)])
    turn = GenerateRequest(np.concatenate([prompt(10), said.token_ids, prompt(4, 4)]), SamplingParams(10, temperature=0.0))
    [[completion]] = engine.generate([turn])
    assert completion.cached_tokens == 20
    assert completion.token_ids.tolist() == model.greedy(turn.prompt_ids, 10)


# ── sleep ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sleep_changes_nothing_but_the_time_it_takes(model: Model, each_alone: list[list[Completion]]) -> None:
    engine = model.engine(max_num_batched_tokens=24)
    requests = [changed(request, prompt_logprobs=True) for request in MIXED]
    numbers = [engine.submit(request) for request in requests]
    gone = engine.submit(ask(9, 30))
    found: dict[int, list[Completion]] = {}
    for _ in range(9):
        for number, piece in engine.step():
            if piece.completion is not None:
                found.setdefault(number, []).append(piece.completion)
        engine.sleep()
        with pytest.raises(EngineError, match="asleep"):
            engine.step()
        if engine.stats.steps == 4:
            engine.abort(gone)
        engine.wake()
    for number, completions in finish(engine).items():
        found.setdefault(number, []).extend(completions)
    for number, request, expected in zip(numbers, requests, each_alone, strict=True):
        completions = sorted(found[number], key=lambda c: [o.token_ids.tolist() for o in expected].index(c.token_ids.tolist()))
        assert_same(completions, expected)
        scores = log_softmax(model.logits(request.prompt_ids))[np.arange(len(request.prompt_ids) - 1), request.prompt_ids[1:]]
        for completion in completions:
            np.testing.assert_allclose(completion.prompt_logprobs[1:], scores, atol=1e-4)
    assert_nothing_held(engine)


def test_a_request_can_be_given_up_after_a_sleep(model: Model) -> None:
    engine = model.engine()
    engine.sleep()
    engine.wake()
    numbers = [engine.submit(ask(9, 30, logit_bias={3: 1.0})) for _ in range(2)]
    engine.step()
    engine.abort(numbers[0])
    engine.apply(WeightUpdate(1, (), 0))
    assert len(finish(engine)[numbers[1]][0].token_ids) == 30
    assert_nothing_held(engine)


@pytest.mark.parametrize("room", [None, 10])
def test_each_token_names_the_version_that_sampled_it(model: Model, room: int | None) -> None:
    """Also where sequences are preempted in between (`room` for few tokens of the cache)."""
    engine = model.engine() if room is None else model.engine(num_blocks=room)
    ids = [engine.submit(GenerateRequest(prompt(4 + i), SamplingParams(24, temperature=1.0, seed=i))) for i in range(3)]
    pieces: dict[int, Completion] = {}
    version = 0
    while len(pieces) < len(ids):
        for number, piece in engine.step():
            assert not isinstance(piece, EngineError)
            if piece.completion is not None:
                pieces[number] = piece.completion
        sampled = max((sum(engine.sampled_tokens(i).values()) for i in ids), default=0)
        if version < 2 and sampled > 8 * (version + 1):
            version += 1
            engine.apply(WeightUpdate(version, (), 0))
    for completion in pieces.values():
        versions = [completion.versions.oldest, *(v for _, v in completion.switches)]
        starts = [0, *(token for token, _ in completion.switches)]
        assert versions == sorted(set(versions))
        assert starts == sorted(set(starts))
        assert versions[-1] == completion.versions.newest
        assert starts[-1] < len(completion.token_ids)
    assert any(len(completion.switches) == 2 for completion in pieces.values())
