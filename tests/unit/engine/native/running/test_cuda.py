"""The engine on a CUDA device: graphs, and what becomes of them when it sleeps or when others use the device."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.small_models import VOCAB_SIZE, llama, write_model
from transformers import PreTrainedModel

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.models.files.hf import load_decoder
from redline.types import Completion, GenerateRequest, SamplingParams, WeightUpdate

pytestmark = pytest.mark.gpu


@pytest.fixture
def oracle(tmp_path: Path) -> PreTrainedModel:
    return write_model(tmp_path, llama(hidden_size=256, num_attention_heads=4, num_key_value_heads=2), seed=5, std=0.15)


def make_engine(folder: Path) -> NativeEngine:
    decoder = load_decoder(folder, "cuda", torch.bfloat16)
    return NativeEngine(decoder, EngineConfig(max_num_seqs=32, kv_cache_memory_bytes=2**24))


def requests() -> list[GenerateRequest]:
    drawn = np.random.default_rng(0)
    return [
        GenerateRequest(
            drawn.integers(2, VOCAB_SIZE, int(drawn.integers(1, 60))).astype(np.int32),
            SamplingParams(max_tokens=int(drawn.integers(20, 60)), n=int(drawn.integers(1, 4)), seed=number),
        )
        for number in range(12)
    ]


def tokens(completions: list[list[Completion]]) -> list[list[int]]:
    return sorted(completion.token_ids.tolist() for each in completions for completion in each)


@torch.no_grad()
def off_by(oracle: PreTrainedModel, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """Of each token, from how transformers scores it in float32."""
    whole = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int64))
    expected = oracle(whole[None]).logits[0].log_softmax(-1)[:-1].gather(1, whole[1:, None]).squeeze(1).numpy()
    return np.abs(completion.logprobs - expected[len(request.prompt_ids) - 1 :])


def assert_scored(oracle: PreTrainedModel, request: GenerateRequest, completion: Completion) -> None:
    """Within bfloat16; other weights or a wrong key are off by more than 1."""
    assert off_by(oracle, request, completion).mean() < 0.15


def test_logprobs_are_those_of_transformers(oracle: PreTrainedModel, tmp_path: Path) -> None:
    asked = requests()
    for request, completions in zip(asked, make_engine(tmp_path).generate(asked), strict=True):
        for completion in completions:
            assert_scored(oracle, request, completion)


@pytest.mark.parametrize("rows", [40, 64, 128, 256, 512])
def test_so_are_those_of_many_rows(oracle: PreTrainedModel, tmp_path: Path, rows: int) -> None:
    drawn = np.random.default_rng(rows)
    prompts = [drawn.integers(2, VOCAB_SIZE, int(drawn.integers(1, 60))).astype(np.int32) for _ in range(rows // 8)]
    asked = [GenerateRequest(prompt, SamplingParams(max_tokens=24, n=8, seed=number)) for number, prompt in enumerate(prompts)]
    assert_scored_together(oracle, tmp_path, rows, asked)


def test_so_are_those_of_very_many_rows(tmp_path: Path) -> None:
    """Of a network wide enough for all of its own products."""
    spec = llama(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=2)
    oracle, drawn = write_model(tmp_path, spec, seed=6, std=0.1), np.random.default_rng(0)
    prompts = [drawn.integers(2, VOCAB_SIZE, int(drawn.integers(1, 60))).astype(np.int32) for _ in range(90)]
    asked = [GenerateRequest(prompt, SamplingParams(max_tokens=24, n=8, seed=number)) for number, prompt in enumerate(prompts)]
    assert_scored_together(oracle, tmp_path, 720, asked)


def assert_scored_together(oracle: PreTrainedModel, folder: Path, rows: int, asked: list[GenerateRequest]) -> None:
    decoder = load_decoder(folder, "cuda", torch.bfloat16)
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=rows, kv_cache_memory_bytes=2**28))
    off = [
        off_by(oracle, request, completion)
        for request, completions in zip(asked, engine.generate(asked), strict=True)
        for completion in completions
    ]
    assert engine.stats.steps < 48, "they did not run together"
    assert np.concatenate(off).mean() < 0.1
    assert max(each.mean() for each in off) < 0.3


@pytest.mark.parametrize("weights", [False, True])
def test_sleep_frees_what_it_says_and_requests_go_on_after_it(oracle: PreTrainedModel, tmp_path: Path, weights: bool) -> None:
    engine = make_engine(tmp_path)
    asked = {engine.submit(request): request for request in requests()}
    found: list[tuple[int, Completion]] = []

    def step() -> None:
        found.extend((number, piece.completion) for number, piece in engine.step() if piece.completion is not None)

    for _ in range(3):
        step()
    before = torch.cuda.memory_allocated()
    slept = engine.sleep(weights=weights)
    freed = before - torch.cuda.memory_allocated()
    assert slept.weight_bytes == (sum(p.nbytes for p in engine.decoder.parameters()) if weights else 0)
    assert slept.kv_bytes > 2**23
    assert freed >= slept.kv_bytes + slept.weight_bytes
    woken = engine.wake()
    assert (woken.kv_bytes, woken.weight_bytes) == (slept.kv_bytes, slept.weight_bytes)
    while engine.stats.running or engine.stats.waiting:
        step()
    assert len(found) == sum(request.sampling.n for request in asked.values())
    for number, completion in found:
        assert_scored(oracle, asked[number], completion)


def test_graphs_of_an_engine_that_nobody_needs_are_not_let_go_of_while_another_captures(tmp_path: Path) -> None:
    write_model(tmp_path, llama(hidden_size=256, num_attention_heads=4, num_key_value_heads=2), seed=5, std=0.15)
    expected, thresholds = tokens(make_engine(tmp_path).generate(requests())), gc.get_threshold()
    for _ in range(3):
        engine = make_engine(tmp_path)
        engine.generate(requests())
        circle: list[object] = [engine]
        circle.append(circle)
        del engine, circle
    gc.set_threshold(1)  # a collection at every turn
    try:
        assert tokens(make_engine(tmp_path).generate(requests())) == expected
    finally:
        gc.set_threshold(*thresholds)


def test_a_weight_update_in_place_is_seen_by_graphs(oracle: PreTrainedModel, tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    before = tokens(engine.generate(requests()))
    with torch.no_grad():
        for parameter in engine.decoder.parameters():
            parameter.mul_(1.5)
    engine.apply(WeightUpdate(1, (), 0))
    changed = make_engine(tmp_path)
    with torch.no_grad():
        for parameter in changed.decoder.parameters():
            parameter.mul_(1.5)
    after = tokens(engine.generate(requests()))
    assert after == tokens(changed.generate(requests()))
    assert after != before


def test_graphs_are_captured_while_another_thread_computes(oracle: PreTrainedModel, tmp_path: Path) -> None:
    expected = tokens(make_engine(tmp_path).generate(requests()))
    done, failures = threading.Event(), []

    def train() -> None:
        try:
            mine = torch.Generator("cuda")  # torch refuses the device's own while anybody captures
            with torch.cuda.stream(torch.cuda.Stream()):
                while not done.is_set():
                    x = torch.randn(512, 512, device="cuda", generator=mine, requires_grad=True)
                    (x @ x).sum().backward()
                    float(x.grad.norm())  # allocates, copies and waits, none of which a capture may see
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        found = tokens(make_engine(tmp_path).generate(requests()))
    finally:
        done.set()
        thread.join()
    assert not failures
    assert found == expected


def flavours() -> list[GenerateRequest]:
    """Every combination of what a client may ask of the sampler."""
    prompt = np.arange(2, 20, dtype=np.int32)
    asked = []
    for bits in range(64):
        extra: dict[str, object] = {"top_k": 5} if bits & 1 else {}
        extra |= {"min_p": 0.01} if bits & 2 else {}
        extra |= {"logit_bias": {3: 1.0}} if bits & 4 else {}
        extra |= {"raw_logprobs": True} if bits & 8 else {}
        extra |= {"min_tokens": 2, "stop_token_ids": (1,)} if bits & 16 else {}
        extra |= {"top_logprobs": 3} if bits & 32 else {}
        asked.append(GenerateRequest(prompt, SamplingParams(max_tokens=12, seed=bits, **extra)))  # type: ignore[arg-type]
    return asked


def test_graphs_of_however_many_flavours_take_bounded_memory(oracle: PreTrainedModel, tmp_path: Path) -> None:
    expected = [make_engine(tmp_path).generate([request])[0][0].token_ids.tolist() for request in flavours()[:4]]
    engine = make_engine(tmp_path)
    cache = engine._awake.graphs  # type: ignore[attr-defined]
    cache._max_graphs = 8
    free, found = [], []
    for request in flavours():
        found.append(engine.generate([request])[0][0].token_ids.tolist())
        assert len(cache) <= 8
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    assert found[:4] == expected
    assert cache.evictions > 0
    assert free[20] - free[-1] < 64 * 2**20, "what was evicted has been given back"
    again = [engine.generate([request])[0][0].token_ids.tolist() for request in flavours()]
    assert again == found, "and is captured again when it is asked for"


def test_running_out_of_memory_in_a_capture_costs_speed_and_not_the_engine(oracle: PreTrainedModel, tmp_path: Path) -> None:
    asked = requests()
    expected = tokens(make_engine(tmp_path).generate(asked))
    engine = make_engine(tmp_path)
    runner = engine._awake
    step = runner._decode_steps  # type: ignore[attr-defined]

    def greedy(*arguments: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.empty(2**45, dtype=torch.uint8, device="cuda")  # 32 TiB
        step(*arguments)

    runner._decode_steps = greedy  # type: ignore[attr-defined]
    assert tokens(engine.generate(asked)) == expected
    assert len(runner.graphs) == 0  # type: ignore[attr-defined]
    runner._decode_steps = step  # type: ignore[attr-defined]
    runner.graphs._without.clear()  # type: ignore[attr-defined]
    assert tokens(engine.generate(asked)) == expected
    assert len(runner.graphs) > 0, "where there is memory again there are graphs again"  # type: ignore[attr-defined]


def test_a_short_prompt_is_scored_as_it_is_without_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of every captured size, from the first token on and behind what is cached, beside the same launched one by one."""
    from redline.engine.native.running.prompts import SIZES, CapturedPrompts  # needs triton

    shape = llama(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=640)
    oracle = write_model(tmp_path, shape, seed=5, std=0.15)
    drawn = np.random.default_rng(1).integers(2, VOCAB_SIZE, 600).astype(np.int32)
    lengths = (20, 60, 120, 250, 500, 600)
    asked = [GenerateRequest(drawn[:length], SamplingParams(max_tokens=4, seed=length)) for length in lengths]
    found = {}
    for name in ("captured", "launched"):
        if name == "launched":
            monkeypatch.setattr(CapturedPrompts, "logits", lambda self, prompts: None)
        engine = make_engine(tmp_path)
        found[name] = [engine.generate([request])[0][0] for request in (*asked, *asked)]  # later ones find prefixes
        captured = list(engine._awake._prompts.graphs._graphs)  # type: ignore[attr-defined]
        assert sorted(captured) == (list(SIZES) if name == "captured" else [])
    for each in found.values():  # four tokens are too few for a mean of their own
        scored = np.concatenate([off_by(oracle, *pair) for pair in zip((*asked, *asked), each, strict=True)])
        assert scored.mean() < 0.15
        assert scored.max() < 1
    # Products round by the number of their rows, so that a draw on a border may fall on either side of it.
    pairs = list(zip(found["captured"], found["launched"], strict=True))
    same = [(one.logprobs[0], other.logprobs[0]) for one, other in pairs if one.token_ids[0] == other.token_ids[0]]
    assert len(same) >= len(pairs) - 2
    np.testing.assert_allclose(*zip(*same, strict=True), atol=0.1)


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.0), (torch.float32, 0.8)])
def test_what_was_guessed_is_scored_as_what_was_not(
    oracle: PreTrainedModel, tmp_path: Path, dtype: torch.dtype, share: float
) -> None:
    """Texts that come again are guessed by the device, several steps in a launch; steps of other sizes round otherwise, but a
    wrong key, position or random number would be off by far more."""
    asked = requests()
    decoder = load_decoder(tmp_path, "cuda", dtype)
    config = EngineConfig(max_num_seqs=32, kv_cache_memory_bytes=2**25)
    plain, engine = NativeEngine(decoder, config), NativeEngine(decoder, config.model_copy(update={"speculation": "always"}))
    expected, steps = tokens(plain.generate(asked)), []
    for _ in range(3):
        before = engine.stats.decode_steps
        found = engine.generate(asked)
        steps.append(engine.stats.decode_steps - before)
        for request, completions in zip(asked, found, strict=True):
            for completion in completions:
                assert_scored(oracle, request, completion)
    stats = engine.stats
    assert stats.accepted_tokens > stats.drafted_tokens / 8, stats
    assert steps[2] < plain.stats.decode_steps / 2, (steps, plain.stats.decode_steps)
    same = sum(one in expected for one in tokens(found))
    assert same >= share * len(expected), f"{same} of {len(expected)} are the same"


def test_what_one_launch_guesses_is_scored_as_what_it_does_not(tmp_path: Path) -> None:
    """A network of the smallest shape that it serves, whose steps with and without guesses are one launch each."""
    from redline.kernels.decode.one_launch import OneLaunch

    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 4}
    shape = llama(hidden_size=448, intermediate_size=1088, vocab_size=136, max_position_embeddings=640, **heads)
    oracle = write_model(tmp_path, shape, seed=5, std=0.1)
    config = EngineConfig(max_num_seqs=32, kv_cache_memory_bytes=2**25, speculation="always")
    engine = NativeEngine(load_decoder(tmp_path, "cuda", torch.bfloat16), config)
    launches = engine._awake._ways[0]  # type: ignore[attr-defined]
    if not isinstance(launches, OneLaunch):
        pytest.skip("the kernel is for Hopper")
    drawn, calls, logits = np.random.default_rng(2), [], launches.logits
    launches.logits = lambda *given: calls.append(given[-1] is not None) or logits(*given)  # type: ignore[func-returns-value]
    asked = [
        GenerateRequest(drawn.integers(2, 136, length).astype(np.int32), SamplingParams(max_tokens=48, seed=length))
        for length in (5, 31, 70, 200, 520)
    ]
    for _ in range(3):
        for request in asked:
            assert_scored(oracle, request, engine.generate([request])[0][0])
    assert any(calls), "no step that guesses was one launch"
    stats = engine.stats
    assert stats.accepted_tokens > stats.drafted_tokens / 4, stats
