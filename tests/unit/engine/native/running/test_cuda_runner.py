"""The GPU's decode step, kernels and bookkeeping, in Triton's interpreter: all of it but the recording of graphs."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.small_models import CONFIGS, VOCAB_SIZE, write_model

pytest.importorskip("triton")

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.engine.native import engine as native
from redline.engine.native.cache import prefixes
from redline.engine.native.cache.kv_cache import KVCache
from redline.engine.native.running import cuda, few_rows, prompts, some_rows
from redline.engine.native.running.cuda import MAX_STEPS, CudaRunner, batch_sizes
from redline.engine.native.running.device_rows import DeviceRows
from redline.engine.native.running.few_rows import FewRows
from redline.engine.native.running.prompts import CapturedPrompts
from redline.engine.native.running.runner import Runner, Samples
from redline.engine.native.sequence import Wants
from redline.engine.native.speculation import speculation
from redline.engine.native.speculation.references import References
from redline.kernels.decode.guesses import GuessBook
from redline.kernels.decode.parts import product_in_parts
from redline.kernels.decode.prompt_attention import Tile, prompt_attention
from redline.models.decoder import Decoder
from redline.models.files.hf import load_decoder
from redline.types import Completion, GenerateRequest, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of the interpreter's infinities


BOOK = (8, 512)
"""Slots and their tokens: the interpreter would take a minute to look through what a GPU has."""


class UncapturedPrompts(CapturedPrompts):
    captures = True

    def capture(self, size: int) -> Any:
        if not self.captures:
            raise torch.OutOfMemoryError("CUDA out of memory")
        prompts = weakref.proxy(self)
        captured = SimpleNamespace(reset=lambda: None)
        captured.graph = SimpleNamespace(replay=lambda: setattr(captured, "logits_PV", prompts._pass(size)))
        return captured

    def release(self) -> None: ...


class UncapturedRunner(CudaRunner):
    """Where a graph would be replayed, the step runs as it is. Results come late, as they do from a GPU."""

    captures = True
    """False: there is never memory for a graph."""
    takes_few_rows = False
    """Whether few rows go their own way, which takes the interpreter eight times as long."""

    def __init__(self, decoder: Decoder, cache: KVCache, rows: DeviceRows, *, guesses: bool) -> None:
        super().__init__(decoder, cache, rows, guesses=guesses)
        self._book = GuessBook.empty(*BOOK, rows.dead_row + 1, torch.device("cpu"))
        self._prompts = UncapturedPrompts(decoder, cache, self._rotary, rows.tables_RN, rows.upload)
        self._prompts.captures = self.captures
        assert (not self._ways) == (decoder.spec.experts is not None)
        if not self.takes_few_rows:
            self._ways = []

    def capture(self, key: Any) -> Any:
        if not self.captures:
            raise torch.OutOfMemoryError("CUDA out of memory")
        samples = self._room_for_samples(key[0], key[2])
        runner = weakref.proxy(self)  # as a graph, it knows addresses alone
        step = SimpleNamespace(replay=lambda: runner._decode_steps(*key, samples))
        return SimpleNamespace(graph=step, samples=samples, reset=lambda: None)

    def release(self) -> None: ...

    def fetch(self, samples: Samples) -> tuple[Samples, None]:
        return Samples(*(None if part is None else part.clone() for part in samples.parts)), None  # type: ignore[arg-type]


class InterpretedEngine(NativeEngine):
    def _make_runner(self) -> Runner:
        weight, spec = self.decoder.output_weight, self.decoder.spec
        kind = (weight.device, weight.dtype)
        cache = KVCache(spec, self._pool.num_blocks + 1, self._block_size, *kind, heads_first=True, routing=self._routing)
        rows = DeviceRows(self._config.max_num_seqs, -(-self._max_len // self._block_size), spec.vocab_size, weight.device)
        self._speculation._references = References(self._rows, *BOOK)
        return UncapturedRunner(self.decoder, cache, rows, guesses=self._speculation.is_on)


@pytest.fixture(autouse=True)
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for every token and every block of queries, nobody's included."""
    monkeypatch.setattr(prompts, "SIZES", (8, 16))
    monkeypatch.setattr(prompts, "MOST_RUNS", 4)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory, interpreter: None) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("model")
    write_model(folder, CONFIGS["qwen3, biases"], seed=5, std=0.3)
    return load_decoder(folder)  # type: ignore[return-value]


def ask(length: int, max_tokens: int, **sampling: Any) -> GenerateRequest:
    prompt = np.random.default_rng(length).integers(2, VOCAB_SIZE, length).astype(np.int32)
    return GenerateRequest(prompt, SamplingParams(max_tokens=max_tokens, seed=length, **sampling))


def assert_same(found: list[list[Completion]], expected: list[list[Completion]]) -> None:
    for one, other in zip(chain.from_iterable(found), chain.from_iterable(expected), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


CONFIG = EngineConfig(max_num_seqs=6, max_model_len=128, block_size=16, max_num_batched_tokens=40)
PLAIN = [ask(5, 11, n=2), ask(33, 4, temperature=0.0), ask(40, 11, stop_token_ids=tuple(range(60, 68)))]


def test_the_device_samples_what_the_host_samples(decoder: Decoder) -> None:
    assert_same(InterpretedEngine(decoder, CONFIG).generate(PLAIN), NativeEngine(decoder, CONFIG).generate(PLAIN))


def test_so_it_does_where_a_launch_is_one_graph(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step leaves is what the next one begins with. A launch of fewer steps, at the end of a line, is none."""
    chained, one_by_one = [], CudaRunner._decode_steps

    def noted(self: CudaRunner, size: int, max_groups: int, wants: Wants, num_steps: int, samples: Samples) -> None:
        chained.append(num_steps)
        one_by_one(self, size, max_groups, wants, num_steps, samples)

    monkeypatch.setattr(UncapturedRunner, "_chains", lambda self, size, wants: wants.is_plain)
    monkeypatch.setattr(UncapturedRunner, "_decode_steps", noted)
    asked = [*PLAIN, ask(100, 28)]
    assert_same(InterpretedEngine(decoder, CONFIG).generate(asked), NativeEngine(decoder, CONFIG).generate(asked))
    assert set(chained) == {1, MAX_STEPS}


def test_where_a_launch_does_not_fit_into_memory_its_steps_may(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = UncapturedRunner.capture

    def capture(self: UncapturedRunner, key: Any) -> Any:
        if key[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return captured(self, key)

    monkeypatch.setattr(UncapturedRunner, "_chains", lambda self, size, wants: wants.is_plain)
    monkeypatch.setattr(UncapturedRunner, "capture", capture)
    engine, asked = InterpretedEngine(decoder, CONFIG), [ask(33, 20)]
    assert_same(engine.generate(asked), NativeEngine(decoder, CONFIG).generate(asked))
    assert {key[-1] for key in engine._awake.graphs._graphs} == {1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("requests", [[ask(33, 3)], pytest.param(PLAIN, marks=pytest.mark.slow)], ids=["one", "several"])
def test_so_it_does_where_few_rows_go_their_own_way(
    decoder: Decoder, requests: list[GenerateRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UncapturedRunner, "takes_few_rows", True)
    assert_same(InterpretedEngine(decoder, CONFIG).generate(requests), NativeEngine(decoder, CONFIG).generate(requests))


@pytest.mark.parametrize(("config", "cut"), [("qwen3, biases", {80}), ("qwen3, own head size", {80, 96})])
def test_so_it_does_where_some_rows_have_products_in_parts(
    interpreter: None, tmp_path: Path, config: str, cut: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product with a bias is whole."""
    write_model(tmp_path, CONFIGS[config], seed=5, std=0.3)
    network, found = load_decoder(tmp_path), set()

    def noted(x_BK: torch.Tensor, weight_NK: torch.Tensor, parts: int) -> torch.Tensor:
        found.add(weight_NK.shape[1])
        return product_in_parts(x_BK, weight_NK, parts)

    monkeypatch.setattr(some_rows, "parts_of", lambda rows, columns, inner: 2)
    monkeypatch.setattr(some_rows, "product_in_parts", noted)
    monkeypatch.setattr(UncapturedRunner, "takes_few_rows", True)
    monkeypatch.setattr(few_rows, "WIDE", 0)
    requests = [ask(5, 3, n=2), ask(9, 3)]
    assert_same(InterpretedEngine(network, CONFIG).generate(requests), NativeEngine(network, CONFIG).generate(requests))
    assert found == cut


@pytest.mark.slow
def test_experts_of_every_token_are_recorded_where_the_kernels_put_its_keys(decoder: Decoder, tmp_path: Path) -> None:
    """Prompts, steps, dead rows that fill a batch up, and a prompt that is found again."""
    write_model(tmp_path, CONFIGS["qwen3_moe"], seed=5, std=0.3)
    network = load_decoder(tmp_path)
    asked = [ask(5, 9, n=2), ask(9, 6), ask(1, 12)]
    config = EngineConfig(max_num_seqs=6, block_size=16, max_model_len=64, kv_cache_memory_bytes=2**22, record_routing=True)
    plain, kernels = NativeEngine(network, config), InterpretedEngine(network, config)
    for _ in range(2):
        for expected, found in zip(plain.generate(asked), kernels.generate(asked), strict=True):
            for one, other in zip(expected, found, strict=True):
                assert one.token_ids.tolist() == other.token_ids.tolist()
                assert one.routing is not None
                assert other.routing is not None
                np.testing.assert_array_equal(np.sort(other.routing.reshape(-1, 2, 3)), np.sort(one.routing.reshape(-1, 2, 3)))


def test_few_rows_of_a_mixture_of_experts_go_no_way_of_their_own(decoder: Decoder, tmp_path: Path) -> None:
    assert FewRows.serves(decoder)
    write_model(tmp_path, CONFIGS["qwen3_moe"])
    mixture = load_decoder(tmp_path)
    assert isinstance(mixture, Decoder)
    assert not FewRows.serves(mixture)


def test_so_it_does_where_rows_read_their_common_beginning_once(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MIN_ROWS", 2)
    monkeypatch.setattr(prefixes, "LEAST_SAVING", 0.1)
    requests = [ask(33, 3, n=3), ask(17, 3, n=2), ask(9, 3)]
    engine = InterpretedEngine(decoder, CONFIG)
    assert_same(engine.generate(requests), NativeEngine(decoder, CONFIG).generate(requests))
    assert any(max_groups for _, max_groups, *_ in engine._awake.graphs._graphs)  # type: ignore[attr-defined]


def test_so_it_does_where_there_is_no_memory_for_graphs(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UncapturedRunner, "captures", False)
    engine, requests = InterpretedEngine(decoder, CONFIG), [ask(5, 4, n=2)]
    assert_same(engine.generate(requests), NativeEngine(decoder, CONFIG).generate(requests))
    assert len(engine._awake.graphs) == 0  # type: ignore[attr-defined]


def test_so_it_does_where_a_prompt_continues_what_is_cached(decoder: Decoder) -> None:
    engine, host = InterpretedEngine(decoder, CONFIG), NativeEngine(decoder, CONFIG)
    prompt = ask(40, 1).prompt_ids
    for length in (34, 40):
        asked = [GenerateRequest(prompt[:length], SamplingParams(max_tokens=1, seed=1, n=2))]
        assert_same(engine.generate(asked), host.generate(asked))
    assert engine.stats.prefix_hit_tokens > 0


def test_passes_of_few_tokens_share_a_graph_and_larger_ones_have_none(decoder: Decoder) -> None:
    engine, requests = InterpretedEngine(decoder, CONFIG), [ask(5, 1), ask(7, 1), ask(12, 1), ask(20, 1)]
    found = [engine.generate([request])[0] for request in requests]
    assert_same(found, [NativeEngine(decoder, CONFIG).generate([request])[0] for request in requests])
    assert list(engine._awake._prompts.graphs._graphs) == [8, 16]  # type: ignore[attr-defined]


def test_the_last_layer_goes_on_with_the_ends_of_prompts_alone(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    attended: list[int] = []

    def watched(heads: torch.Tensor, *others: Any) -> torch.Tensor:
        attended.append(len(others[2]))
        return prompt_attention(heads, *others)

    monkeypatch.setattr(prompts, "prompt_attention", watched)
    monkeypatch.setattr(prompts, "TILES", {decoder.spec.head_dim: Tile(16, 16, 4, 1)})
    monkeypatch.setattr(cuda, "PROMPT_TILES", prompts.TILES)
    requests = [ask(33, 1), ask(20, 1)]
    engine = InterpretedEngine(decoder, CONFIG.model_copy(update={"max_num_batched_tokens": 64}))
    assert_same(engine.generate(requests), NativeEngine(decoder, CONFIG).generate(requests))
    assert attended == [*[3 + 2] * (decoder.spec.num_layers - 1), 1 + 1], "blocks of queries"


def test_a_device_that_has_nothing_to_do_begins_with_few_prompts(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FIRST_PROMPTS", 2)
    requests = [ask(length, 12) for length in (5, 7, 9, 12)]
    engine = InterpretedEngine(decoder, CONFIG.model_copy(update={"max_num_batched_tokens": 64}))
    for request in requests:
        engine.submit(request)
    engine.step()
    assert (engine.stats.running, engine.stats.waiting) == (2, 2)
    engine.step()
    assert (engine.stats.waiting, engine.stats.decode_steps) == (0, 1), "no more than one step beside prompts that wait"
    assert_same(InterpretedEngine(decoder, CONFIG).generate(requests), NativeEngine(decoder, CONFIG).generate(requests))


def test_a_sleeping_engine_holds_no_memory_of_its_steps(decoder: Decoder) -> None:
    """Not until the garbage collector comes by: a colocated trainer needs the memory now."""
    engine = InterpretedEngine(decoder, CONFIG)
    engine.generate([ask(5, 4, n=2)])
    runner, cache = weakref.ref(engine._awake), weakref.ref(engine._awake.cache.blocks)
    gc.disable()
    try:
        engine.sleep()
        assert (runner(), cache()) == (None, None)
    finally:
        gc.enable()


def test_requests_for_few_more_likeliest_tokens_share_a_graph(decoder: Decoder) -> None:
    engine = InterpretedEngine(decoder, CONFIG)
    for top in (2, 3, 4, 5):
        [[completion]] = engine.generate([ask(5, 3, top_logprobs=top)])
        assert completion.top_logprobs is not None
        assert completion.top_logprobs.token_ids.shape == (3, top)
    assert len(engine._awake.graphs) == 1  # type: ignore[attr-defined]


@pytest.mark.slow
def test_so_it_does_when_sequences_must_give_way(decoder: Decoder) -> None:
    room_for = 7 * KVCache.bytes_per_block(decoder.spec, 16, torch.float32)
    small = CONFIG.model_copy(update={"kv_cache_memory_bytes": room_for})
    engine, requests = InterpretedEngine(decoder, small), [ask(20, 20, n=3)]
    assert_same(engine.generate(requests), NativeEngine(decoder, CONFIG).generate(requests))
    assert engine.stats.preemptions > 0
    assert engine.stats.kv_blocks_used == 0


@pytest.mark.slow
def test_filters_masks_and_extra_logprobs_go_the_longer_way(decoder: Decoder) -> None:
    requests = [
        ask(5, 10, top_k=3, raw_logprobs=True),
        ask(9, 10, logit_bias={7: 5.0}, top_logprobs=2),
        ask(12, 10, min_tokens=6, stop_token_ids=(3,), top_p=0.8),
    ]
    found, expected = InterpretedEngine(decoder, CONFIG).generate(requests), NativeEngine(decoder, CONFIG).generate(requests)
    assert_same(found, expected)
    np.testing.assert_allclose(found[0][0].raw_logprobs, expected[0][0].raw_logprobs, atol=1e-4)
    assert found[1][0].top_logprobs.token_ids.tolist() == expected[1][0].top_logprobs.token_ids.tolist()


@pytest.mark.slow
def test_several_steps_are_launched_at_once_unless_somebody_watches(decoder: Decoder) -> None:
    engine = InterpretedEngine(decoder, CONFIG)
    engine.submit(ask(5, 20))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert steps <= 2 + 20 // MAX_STEPS + 2
    engine.submit(ask(5, 20), streaming=True)
    pieces = [piece for _ in range(30) for _, piece in engine.step()]
    assert len(pieces) >= 20


@pytest.mark.slow
def test_an_abort_leaves_nothing_behind_while_results_are_under_way(decoder: Decoder) -> None:
    engine = InterpretedEngine(decoder, CONFIG)
    dropped, kept = engine.submit(ask(5, 60)), engine.submit(ask(20, 30))
    for _ in range(2):
        engine.step()
    engine.abort(dropped)
    late = engine.submit(ask(17, 25))
    found = {}
    while engine.has_work:
        found |= {number: piece.completion for number, piece in engine.step()}  # type: ignore[union-attr]
    expected = NativeEngine(decoder, CONFIG).generate([ask(20, 30), ask(17, 25)])
    assert_same([[found[kept]], [found[late]]], expected)
    assert engine.stats.kv_blocks_used == 0


GUESSING = CONFIG.model_copy(update={"speculation": "always"})


def test_what_the_device_guesses_changes_nothing_but_the_number_of_steps(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts are known, and several tokens come of a step."""
    monkeypatch.setattr(speculation, "MAX_GUESSES", 3)
    requests = [replace(request, task=str(number)) for number, request in enumerate([ask(5, 11, n=2), ask(20, 9)])]
    engine, expected = InterpretedEngine(decoder, GUESSING), NativeEngine(decoder, CONFIG).generate(requests)
    for request, completions in zip(requests, expected, strict=True):
        for completion in completions:
            engine.remember(request.task, np.concatenate([request.prompt_ids, completion.token_ids]))
    assert_same(engine.generate(requests), expected)
    stats = engine.stats
    assert 8 < stats.accepted_tokens <= stats.drafted_tokens
    assert stats.generated_tokens == sum(len(completion.token_ids) for completion in chain.from_iterable(expected))
    assert stats.kv_blocks_used == 0


@pytest.mark.slow
def test_so_it_is_with_filters_masks_pieces_and_sequences_that_give_way(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "MAX_GUESSES", 3)
    requests = [
        ask(5, 14, top_k=3, raw_logprobs=True),
        ask(9, 14, logit_bias={7: 5.0}, top_logprobs=2),
        ask(12, 14, min_tokens=6, stop_token_ids=(3,), top_p=0.8),
        ask(20, 20, n=3),
    ]
    room_for = 9 * KVCache.bytes_per_block(decoder.spec, 16, torch.float32)
    engine = InterpretedEngine(decoder, GUESSING.model_copy(update={"kv_cache_memory_bytes": room_for}))
    expected = NativeEngine(decoder, CONFIG).generate(requests)
    for _ in range(2):
        found = engine.generate(requests)
        assert_same(found, expected)
    np.testing.assert_allclose(found[0][0].raw_logprobs, expected[0][0].raw_logprobs, atol=1e-4)
    assert found[1][0].top_logprobs.token_ids.tolist() == expected[1][0].top_logprobs.token_ids.tolist()
    assert engine.stats.accepted_tokens > 5
    assert engine.stats.preemptions > 0
    engine.submit(ask(5, 14), streaming=4)
    pieces: list[Any] = []
    [[whole]] = NativeEngine(decoder, CONFIG).generate([ask(5, 14)])
    while engine.has_work:
        pieces += [piece for _, piece in engine.step()]
    assert list(chain.from_iterable(piece.token_ids.tolist() for piece in pieces)) == whole.token_ids.tolist()
    assert engine.stats.kv_blocks_used == 0


def test_batches_are_filled_up_to_few_sizes() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(5) == [1, 2, 4, 5]
    sizes = batch_sizes(512)
    assert sizes[-1] == 512
    assert len(sizes) <= 24
    assert all(larger <= max(smaller + 8, smaller * 2) for smaller, larger in pairwise(sizes))
