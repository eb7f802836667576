from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.generic_models import MORE_REFUSED, MORE_ROUTED, REFUSED, ROUTED, family
from support.small_models import VOCAB_SIZE, llama, random_model, rope, write_model
from transformers import PretrainedConfig, PreTrainedModel

from redline.config.sections.engine import EngineConfig
from redline.engine.adapters.transformers_engine import TransformersEngine
from redline.errors import EngineError
from redline.models.files.hf import load_recompute_model
from redline.models.files.tiny import tiny_tokenizer
from redline.types import Completion, FinishReason, GenerateRequest, SamplingParams, VersionSpan, WeightUpdate

ALL = {**ROUTED, **MORE_ROUTED, **{name: config for name, (config, _) in (REFUSED | MORE_REFUSED).items()}}


@pytest.fixture(scope="module")
def bloom() -> PreTrainedModel:
    return random_model(REFUSED["bloom"][0], seed=5, std=0.3)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCAB_SIZE, length).astype(np.int32)


def ask(length: int, max_tokens: int = 8, seed: int = 0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(prompt(length, seed), SamplingParams(max_tokens=max_tokens, seed=seed, **sampling))


def engine_of(model: PreTrainedModel, tokenizer: Any = None, **config: Any) -> TransformersEngine:
    return TransformersEngine(model, EngineConfig(**config), tokenizer)


def one(model: PreTrainedModel, request: GenerateRequest, **config: Any) -> Completion:
    [[completion]] = engine_of(model, **config).generate([request])
    return completion


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt_ids: np.ndarray, count: int) -> list[int]:
    """The likeliest token after the whole sequence, again and again: nothing is kept between tokens."""
    ids = torch.from_numpy(prompt_ids.astype(np.int64))[None]
    for _ in range(count):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(dim=-1)[:, None]], dim=1)
    return ids[0, len(prompt_ids) :].tolist()


@torch.no_grad()
def teacher_forced(
    model: PreTrainedModel, prompt_ids: np.ndarray, tokens: np.ndarray, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities [prompt and tokens - 1, V]."""
    whole = torch.from_numpy(np.concatenate([prompt_ids, tokens]).astype(np.int64))
    return torch.log_softmax(model(whole[None], use_cache=False).logits[0, :-1].double() / temperature, dim=-1)


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


# ── any family ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_greedy(config: PretrainedConfig, folder: Path) -> None:
    write_model(folder, config, seed=5, std=0.3)
    model = load_recompute_model(folder)
    requests = [ask(length, count, seed=length, temperature=0.0, n=2) for length, count in ((1, 8), (5, 3), (5, 9), (29, 6))]
    for request, completions in zip(requests, engine_of(model).generate(requests), strict=True):
        expected = greedy(model, request.prompt_ids, request.sampling.max_tokens)
        assert [completion.token_ids.tolist() for completion in completions] == [expected, expected]


@pytest.mark.parametrize("config", [config for config, _ in REFUSED.values()], ids=REFUSED.keys())
def test_a_family_that_no_other_engine_runs_generates_what_transformers_would(config: PretrainedConfig, tmp_path: Path) -> None:
    check_greedy(config, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("config", ALL.values(), ids=ALL.keys())
def test_every_family_generates_what_transformers_would(config: PretrainedConfig, tmp_path: Path) -> None:
    check_greedy(config, tmp_path)


def test_greedy_generation_equals_transformers_own(bloom: PreTrainedModel) -> None:
    ids = torch.from_numpy(prompt(9).astype(np.int64))[None]
    expected = bloom.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, eos_token_id=None)
    assert one(bloom, ask(9, 20, temperature=0.0)).token_ids.tolist() == expected[0, 9:].tolist()


def test_a_cache_that_is_wrong_for_batches_is_not_used() -> None:
    """transformers' RWKV mixes the rows of a batch once their tokens come one at a time."""
    engine = engine_of(random_model(REFUSED["rwkv"][0], std=0.3))
    assert not engine.abilities.caches
    assert engine.abilities.is_causal


def test_a_network_that_sees_what_follows_runs_its_rows_alone() -> None:
    model = random_model(llama(), std=0.3)
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, x: x + 0.3 * x.mean(dim=1, keepdim=True))
    engine = engine_of(model)
    assert not engine.abilities.is_causal
    requests = [ask(length, 5, seed=length, temperature=0.0) for length in (3, 8)]
    for request, [completion] in zip(requests, engine.generate(requests), strict=True):
        assert completion.token_ids.tolist() == greedy(model, request.prompt_ids, 5)


def test_longrope_goes_beyond_the_length_where_its_frequencies_change() -> None:
    parameters = rope(
        "longrope", original_max_position_embeddings=32, factor=8.0, short_factor=[1.0] * 4, long_factor=[4.0, 3.0, 2.0, 1.5]
    )
    model = random_model(llama(rope_parameters=parameters), std=0.3)
    requests = [ask(28, 12, seed=1, temperature=0.0), ask(9, 12, seed=2, temperature=0.0), ask(40, 5, seed=3, temperature=0.0)]
    for request, [completion] in zip(requests, engine_of(model).generate(requests), strict=True):
        assert completion.token_ids.tolist() == greedy(model, request.prompt_ids, request.sampling.max_tokens)


def test_a_row_that_is_done_does_not_run_out_of_positions_while_others_go_on() -> None:
    model = random_model(ROUTED["gpt2"], std=0.3)
    requests = [ask(250, 6, seed=1, temperature=0.0), ask(4, 30, seed=2, temperature=0.0)]
    for request, [completion] in zip(requests, engine_of(model).generate(requests), strict=True):
        assert completion.token_ids.tolist() == greedy(model, request.prompt_ids, request.sampling.max_tokens)


# ── what the port promises ─────────────────────────────────────────────────────────────────────────────────────────────


VARIED = [ask(5, 9, seed=1, n=3), ask(1, 1, seed=2), ask(20, 7, seed=3, n=2, temperature=0.7), ask(8, 12, seed=4, top_p=0.8)]


def test_a_request_gives_the_same_completions_alone_and_among_others(bloom: PreTrainedModel) -> None:
    together = engine_of(bloom).generate(VARIED)
    for request, expected in zip(VARIED, together, strict=True):
        assert_same(engine_of(bloom).generate([request])[0], expected)
    for found, expected in zip(engine_of(bloom, max_num_seqs=3).generate(VARIED), together, strict=True):
        assert_same(found, expected)
    for found, expected in zip(engine_of(bloom, max_num_batched_tokens=8).generate(VARIED), together, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("name", ["bloom", "rwkv"], ids=["cached", "recomputed"])
def test_logprobs_equal_a_teacher_forced_recomputation(name: str) -> None:
    model = random_model(REFUSED[name][0], seed=5, std=0.3)
    request = ask(9, 10, temperature=0.7, raw_logprobs=True, top_logprobs=3, prompt_logprobs=True)
    found = one(model, request)
    warm, plain = (teacher_forced(model, request.prompt_ids, found.token_ids, t) for t in (0.7, 1.0))
    chosen = torch.from_numpy(found.token_ids.astype(np.int64))[:, None]
    np.testing.assert_allclose(found.logprobs, warm[8:].gather(1, chosen).squeeze(1), atol=1e-4)
    np.testing.assert_allclose(found.raw_logprobs, plain[8:].gather(1, chosen).squeeze(1), atol=1e-4)
    likeliest = warm[8:].topk(3)
    assert found.top_logprobs.token_ids.tolist() == likeliest.indices.tolist()
    np.testing.assert_allclose(found.top_logprobs.logprobs, likeliest.values, atol=1e-4)
    following = torch.from_numpy(request.prompt_ids[1:].astype(np.int64))[:, None]
    assert np.isnan(found.prompt_logprobs[0])
    np.testing.assert_allclose(found.prompt_logprobs[1:], plain[:8].gather(1, following).squeeze(1), atol=1e-4)


def test_only_who_asks_for_more_gets_more(bloom: PreTrainedModel) -> None:
    asking, other = ask(9, 4, prompt_logprobs=True, top_logprobs=2, n=2), ask(5, 4, seed=1)
    completions, [plain] = engine_of(bloom).generate([asking, other])
    assert all(len(completion.prompt_logprobs) == 9 for completion in completions)
    assert plain.prompt_logprobs is plain.top_logprobs is plain.raw_logprobs is None


def test_a_stop_token_ends_a_completion_and_is_part_of_it(bloom: PreTrainedModel) -> None:
    tokens = one(bloom, ask(9, 20, temperature=0.0)).token_ids.tolist()
    stop = tokens[4]
    found = one(bloom, ask(9, 20, temperature=0.0, stop_token_ids=(stop,)))
    assert found.token_ids.tolist() == tokens[: tokens.index(stop) + 1]
    assert found.finish_reason is FinishReason.STOP
    late = one(bloom, ask(9, 20, temperature=0.0, stop_token_ids=(stop,), min_tokens=12))
    assert stop not in late.token_ids[:11]
    assert len(late.token_ids) >= 12


def test_masks_biases_and_filters_shape_what_is_sampled(bloom: PreTrainedModel) -> None:
    allowed = one(bloom, ask(9, 20, allowed_token_ids=(7, 8, 9)))
    assert set(allowed.token_ids.tolist()) <= {7, 8, 9}
    assert set(one(bloom, ask(9, 5, logit_bias={50: 1e4})).token_ids.tolist()) == {50}
    likeliest = greedy(bloom, prompt(9), 5)
    for filters in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert one(bloom, ask(9, 5, **filters)).token_ids.tolist() == likeliest


def test_a_stop_string_ends_a_completion_with_the_token_that_completed_it() -> None:
    tokenizer = tiny_tokenizer()
    model = random_model(family("bloom", vocab_size=len(tokenizer), hidden_size=48, n_layer=2, n_head=6), std=0.3)
    letters = tuple(tokenizer.encode("abc"))
    request = GenerateRequest(
        prompt(5), SamplingParams(max_tokens=200, allowed_token_ids=letters, stop=("cab",), temperature=3.0)
    )
    [[found]] = engine_of(model, tokenizer).generate([request])
    text = tokenizer.decode(found.token_ids)
    assert found.stop == "cab"
    assert found.finish_reason is FinishReason.STOP
    assert text.endswith("cab")
    assert text.count("cab") == 1


def test_completions_carry_the_versions_they_were_sampled_with(bloom: PreTrainedModel) -> None:
    engine = engine_of(bloom)
    engine.apply(WeightUpdate(3, (), 0))
    engine.submit(ask(5, 3))
    engine.step()
    engine.apply(WeightUpdate(4, (), 0))
    events = [event for _ in range(2) for event in engine.step()]
    assert events[-1][1].completion.versions == VersionSpan(3, 4)
    assert events[-1][1].completion.switches == ((1, 4),)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ask(0), "no tokens"),
        (ask(9, 0), "nothing to generate"),
        (ask(9, n=5), "max_num_seqs"),
        (ask(9, stop=("x",)), "need a tokenizer"),
        (ask(9, top_logprobs=100), "top_logprobs"),
        (GenerateRequest(prompt(9), SamplingParams(max_tokens=4), adapter="a"), "unknown adapter"),
        (GenerateRequest(np.array([VOCAB_SIZE], np.int32), SamplingParams(max_tokens=4)), "outside the vocabulary"),
        (ask(200, 100), "exceed the model's 256 positions"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(request_: GenerateRequest, reason: str) -> None:
    engine = engine_of(random_model(ROUTED["gpt2"]), max_num_seqs=4)
    with pytest.raises(EngineError, match=reason):
        engine.generate([ask(3), request_])
    assert not engine.has_work


# ── pieces ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_pieces_of_a_stream_are_its_completion(bloom: PreTrainedModel) -> None:
    engine = engine_of(bloom)
    request = ask(9, 6, n=2, top_logprobs=2)
    engine.submit(request, streaming=True)
    pieces: dict[int, list] = {0: [], 1: []}
    while engine.has_work:
        for _, delta in engine.step():
            pieces[delta.index].append(delta)
    for index, expected in enumerate(engine_of(bloom).generate([request])[0]):
        assert len(pieces[index]) == 6
        assert np.concatenate([delta.token_ids for delta in pieces[index]]).tolist() == expected.token_ids.tolist()
        assert pieces[index][-1].completion.token_ids.tolist() == expected.token_ids.tolist()
        assert all(delta.top_logprobs.token_ids.shape == (1, 2) for delta in pieces[index])


def test_one_completion_can_be_ended_where_it_is_and_the_others_go_on(bloom: PreTrainedModel) -> None:
    engine, request = engine_of(bloom), ask(9, 8, n=2)
    number = engine.submit(request, streaming=3)
    found: dict[int, Completion] = {}
    while engine.has_work:
        for _, delta in engine.step():
            found |= {delta.index: delta.completion} if delta.completion else {}
            if delta.index == 0 and delta.completion is None:
                assert len(delta.token_ids) == 3
                engine.end(number, 0)
    [first, second] = engine_of(bloom).generate([request])[0]
    assert found[0].finish_reason is FinishReason.ABORT
    assert found[0].token_ids.tolist() == first.token_ids[:3].tolist()
    assert_same([found[1]], [second])


def test_an_aborted_request_leaves_what_it_sampled_and_the_others_alone(bloom: PreTrainedModel) -> None:
    engine = engine_of(bloom, max_num_seqs=2)
    running, kept, waiting = (engine.submit(request) for request in (ask(9, 20), ask(5, 6, seed=1), ask(7, 5, seed=2)))
    engine.step()
    engine.step()
    engine.abort(running)
    engine.abort(waiting)
    found = {}
    while engine.has_work:
        found |= {number: delta.completion for number, delta in engine.step()}
    assert found[running].finish_reason is found[waiting].finish_reason is FinishReason.ABORT
    assert (len(found[running].token_ids), len(found[waiting].token_ids)) == (2, 0)
    assert_same([found[kept]], [one(bloom, ask(5, 6, seed=1))])
    assert engine.stats.requests == 3
    assert engine.stats.generated_tokens == 8


def test_a_model_that_gives_nan_is_said_and_the_engine_goes_on() -> None:
    model = random_model(ROUTED["gpt2"])
    engine = engine_of(model)
    weight = model.transformer.wte.weight
    with torch.no_grad():
        healthy = weight.clone()
        weight[50:60] = float("nan")
    with pytest.raises(EngineError, match="NaN"):
        engine.generate([ask(5, 6)])
    with torch.no_grad():
        weight.copy_(healthy)
    assert len(one(model, ask(5, 6)).token_ids) == 6
    assert len(engine.generate([ask(5, 6)])[0][0].token_ids) == 6
