"""Whole cases on the tiny model: not how fast it is, but that everything is measured and adds up."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from redline.kernels.cpu import compiled
from redline.kernels.cpu.products import products
from redline.kernels.cpu.steps import steps_for
from redline.lab.bench.cases import generate, n_sampling
from redline.lab.bench.run import bench
from redline.lab.bench.settings import make_settings
from redline.lab.evidence.document import Measured

COMMON = ["model=builtin:tiny", "device=cpu", "dtype=float32", "num_threads=1"]


@pytest.fixture(scope="module")
def generated() -> tuple[Measured, str]:
    console = Console(file=io.StringIO(), width=200)
    overrides = [*COMMON, "prompts=3", "prompt_tokens=20", "n=2", "new_tokens=5", "pairs=6", "peers=transformers,redline"]
    return generate.measure(make_settings("generate", overrides), console), console.file.getvalue()


def test_generate_reports_throughput_for_each_peer_and_latency_and_memory(generated: tuple[Measured, str]) -> None:
    results = generated[0].results
    assert [(result.name, result.peer and result.peer.name) for result in results] == [
        ("throughput", "transformers"),
        ("throughput", "redline again"),
        ("throughput, streamed", None),
        ("time to first token", "transformers"),
        ("time between tokens, streamed", "transformers"),
        ("peak memory", "transformers"),
        ("KV cache", None),
    ]
    assert generated[0].peers.keys() == {"transformers"}
    assert json.dumps([result.as_json() for result in results], allow_nan=False)


def test_every_round_is_kept(generated: tuple[Measured, str]) -> None:
    first, again, *_ = generated[0].results
    assert len(first.samples) == 6
    assert first.samples[0].keys() == {"redline", "transformers"}
    assert first.samples[0]["redline"] == again.samples[0]["redline"]
    assert first.samples[0]["redline"].keys() == {"seconds", "tokens_per_s", "mean_logprob"}
    assert first.peer.comparison.interval is not None


def test_latency_has_percentiles_of_both_sides(generated: tuple[Measured, str]) -> None:
    for result in generated[0].results[3:5]:
        assert list(result.details["percentiles"]) == ["p50", "p90", "p99"]
        assert 0 < result.value == result.details["percentiles"]["p50"] <= result.details["percentiles"]["p99"]
        assert result.peer.value == result.details["peer_percentiles"]["p50"]


def test_the_engine_that_ran_is_in_the_settings(generated: tuple[Measured, str]) -> None:
    engine = generated[0].settings.engine
    assert (engine.max_num_seqs, engine.max_model_len) == (6, 25)


def test_the_kv_cache_holds_every_sequence_at_its_end(generated: tuple[Measured, str]) -> None:
    cache = generated[0].results[-1]
    assert cache.value >= cache.bound.value
    assert 0 < cache.fraction_of_bound <= 1


def test_progress_is_told_round_by_round(generated: tuple[Measured, str]) -> None:
    said = generated[1]
    assert "measured here" in said
    assert "round 6/6" in said


def test_generate_asks_questions_and_needs_no_peer() -> None:
    overrides = [*COMMON, "prompts=2", "new_tokens=3", "pairs=1", "peers=none"]
    measured = generate.measure(make_settings("generate", overrides), Console(file=io.StringIO()))
    assert [result.peer for result in measured.results] == [None] * 6
    assert measured.results[1].details["of_wholes"] == measured.results[1].value / measured.results[0].value
    assert measured.results[0].samples[0].keys() == {"redline"}


def test_long_tailed_completions_are_measured_by_what_they_need() -> None:
    overrides = [*COMMON, "prompts=6", "prompt_tokens=8", "new_tokens=10", "longest=40", "pairs=1", "peers=none"]
    settings = make_settings("generate", [*overrides, "lengths=long-tailed"])
    measured = generate.measure(settings, Console(file=io.StringIO()))
    longest = generate.completion_lengths(measured.settings).max()
    assert measured.settings.engine.max_model_len == 8 + longest
    assert "60 tokens, " in measured.results[0].bound.why
    assert f" {longest - 1} steps of" in measured.results[0].bound.why


def test_n_sampling_compares_one_request_with_n() -> None:
    overrides = [*COMMON, "prompts=2", "prompt_tokens=40", "new_tokens=3", "pairs=6", "n=1,2"]
    results = n_sampling.measure(make_settings("n-sampling", overrides), Console(file=io.StringIO())).results
    assert [result.name for result in results] == [
        "n = 1: one request against 1 request, one after the other",
        "n = 1: one request against 1 request, at once, prefix caching off",
        "n = 1: one request against 1 request, at once, prefix caching on",
        "n = 2: one request against 2 requests, one after the other",
        "n = 2: one request against 2 requests, at once, prefix caching off",
        "n = 2: one request against 2 requests, at once, prefix caching on",
    ]
    assert len({result.fraction_of_bound for result in results}) == 2, "the same request's, whatever it is compared with"
    assert [result.peer and result.peer.value for result in results] == [None, None, None, 1.8, None, None]
    for result in results:
        low, high = result.details["interval_95"]
        assert low <= result.value <= high
        assert len(result.samples) == 6
        assert all(0 < fraction < 1 for fraction in result.fractions), "however long the other requests took"
        least = [f * sample["one request"]["seconds"] for f, sample in zip(result.fractions, result.samples, strict=True)]
        assert least == pytest.approx([least[0]] * 6)
        assert json.dumps(result.as_json(), allow_nan=False)


def test_a_figure_of_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if products() is None:
        pytest.skip("no compiler here, or torch computes with other threads")
    settings = make_settings("generate", [*COMMON, "prompts=2", "prompt_tokens=8", "new_tokens=3", "pairs=1", "peers=none"])
    for kept in ("_why_none", "_told"):  # other tests of this process may have been without a compiler
        monkeypatch.setattr(compiled, kept, [])
    assert "without_c" not in bench("generate", settings, Console(file=io.StringIO())).identity
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    forget = (compiled.library, products, steps_for)
    for asked in forget:
        asked.cache_clear()
    console = Console(file=io.StringIO(), width=300)
    document = bench("generate", settings, console)
    for asked in forget:
        asked.cache_clear()
    assert "install gcc" in document.identity["without_c"]
    assert console.file.getvalue().count("install gcc") == 1
