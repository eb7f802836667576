"""`redline bench transfer` and `redline bench weight-sync`: bytes on their way."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from redline.errors import ConfigError
from redline.lab.bench.cases import transfer, weight_sync
from redline.lab.bench.cases.weight_sync import COPY, FILE, SHARED, Weights
from redline.lab.bench.settings import WeightSyncSettings, make_settings
from redline.lab.material import sized_weights
from redline.lab.material.sized_weights import make_weights

COMMON = ["device=cpu", "num_threads=1", "pairs=2", "warmup_s=0"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_cuda_device_it_says_so_and_what_can_be_measured() -> None:
    with pytest.raises(ConfigError) as caught:
        make_settings("transfer", ["device=cuda"])
    assert "no NVIDIA device" in caught.value.message
    assert "device=cpu" in caught.value.hint


def test_host_memory_is_copied_to_host_memory_and_called_that() -> None:
    said = io.StringIO()
    settings = make_settings("transfer", [*COMMON, "sizes=4096,65536", "overlap_bytes=1048576"])
    results = transfer.measure(settings, Console(file=said, width=200)).results  # type: ignore[arg-type]
    assert [result.name for result in results] == [
        "4.1 kB host to host: to pages in use",
        "65.5 kB host to host: to pages in use",
        "1.05 MB host to host, beside products",
    ]
    assert "no CUDA device" in said.getvalue()
    assert "no CUDA device" in results[0].bound.why
    for result in results[:2]:
        assert result.details.keys() == {"host_s", "peer_host_s"}
    beside = results[-1]
    assert beside.peer.name == "one after the other"
    for sample in beside.samples:
        assert sample.keys() == {"copy", "products", "together"}
    assert all(json.dumps(result.as_json(), allow_nan=False) for result in results)


@pytest.mark.parametrize("size", [1, 4, 12, 100])
def test_any_number_of_bytes_can_be_copied_and_few_of_them_take_no_longer(size: int) -> None:
    settings = make_settings("transfer", [*COMMON, f"sizes={size}", "overlap_bytes=1000"])
    began = time.monotonic()
    first, _ = transfer.measure(settings, Console(quiet=True)).results  # type: ignore[arg-type]
    assert time.monotonic() - began < 30
    assert first.value > 0 < first.bound.value


def test_every_way_copies_every_byte() -> None:
    for way in transfer.ways(1000, torch.device("cpu")):
        copied = way.copy()
        assert isinstance(copied, torch.Tensor)
        assert copied.sum() == 1000


@pytest.mark.gpu
def test_pinned_and_pageable_memory_go_both_ways() -> None:
    found = transfer.ways(2**20, torch.device("cuda"))
    assert len(found) == 8
    assert {way.direction for way in found} == {"to the device", "to the host"}
    settings = make_settings("transfer", ["device=cuda", "pairs=6", "sizes=65536,16777216", "overlap_bytes=67108864"])
    results = transfer.measure(settings, Console(file=io.StringIO())).results  # type: ignore[arg-type]
    assert len(results) == 2 * 2 * 3 + 2
    assert all(0 < result.fraction_of_bound <= 1.05 for result in results)


def test_shared_storage_moves_nothing_and_the_others_all_of_it() -> None:
    settings = make_settings("weight-sync", ["model=builtin:tiny", *COMMON])
    said = io.StringIO()
    measured = weight_sync.measure(settings, Console(file=said, width=300))  # type: ignore[arg-type]
    assert re.search(r"^shared storage: pause [\d.e-]+ ms$", said.getvalue(), re.MULTILINE)
    results = {(result.name, result.peer and result.peer.name): result for result in measured.results}
    assert list(results) == [(SHARED, COPY), (SHARED, FILE), (COPY, FILE), (FILE, None)]
    copied = results[COPY, FILE].details["bytes_moved"]
    assert results[SHARED, COPY].details["bytes_moved"] == 0
    assert results[FILE, None].details["bytes_moved"] == 2 * copied > 0
    assert results[SHARED, FILE].peer.ratio > 1
    assert measured.warm_ups.keys() == {SHARED, COPY, FILE}
    assert all(json.dumps(result.as_json(), allow_nan=False) for result in measured.results)


def test_the_trainers_own_write_is_no_part_of_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(make_settings("weight-sync", ["model=builtin:tiny", *COMMON]), tmp_path)  # type: ignore[arg-type]
    writes: list[float] = []

    def write() -> None:
        began = time.perf_counter()
        time.sleep(1.0)
        writes.append(time.perf_counter() - began)

    monkeypatch.setattr(weights._syncs[SHARED], "_wait_for_device", write)
    began = time.perf_counter()
    pause_s = weights.run(SHARED, 0).parts["pause"]
    assert 0 < pause_s <= time.perf_counter() - began - sum(writes)


def test_weights_that_did_not_arrive_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings("weight-sync", ["model=builtin:tiny", *COMMON])
    weights = Weights(settings, tmp_path)  # type: ignore[arg-type]
    weights.run(COPY, 0)
    monkeypatch.setattr(weights, "_copy", lambda: weights.num_bytes)
    with pytest.raises(AssertionError, match="not the same"):
        weights.run(COPY, 1)


def test_options_may_be_spelled_with_hyphens() -> None:
    settings = make_settings("weight-sync", ["--model-size=7B", "strategy=cuda-ipc", "iterations=3", "device=cpu"])
    assert isinstance(settings, WeightSyncSettings)
    assert (settings.model_size, settings.strategy, settings.pairs) == ("7b", "cuda_ipc", 3)


@pytest.mark.parametrize("given", [["model_size=7b", "model=builtin:tiny"], ["compare_all=true", "strategy=shared"]])
def test_two_keys_that_say_the_same_are_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="leave"):
        make_settings("weight-sync", given)


def test_a_model_that_does_not_fit_is_measured_by_some_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings("weight-sync", ["model_size=0.5b", "device=cpu", "dtype=float32"])
    monkeypatch.setattr(sized_weights, "_free_bytes", lambda device: 2 * 800 * 2**20)
    monkeypatch.setattr(sized_weights, "_draw", lambda spec, device, dtype, seed: sized_weights._undrawn(spec, dtype))
    sized = make_weights(settings, 2)  # type: ignore[arg-type]
    assert 1 <= sized.num_layers < sized.whole_layers == 24
    assert sized.num_bytes < 800 * 2**20
    assert sized.whole_bytes == 4 * 494_032_768, "Qwen2.5 0.5B"
    assert f"{sized.num_layers} of 24 layers" in sized.note


@pytest.mark.slow
def test_engines_in_other_processes_get_every_byte_and_tell_the_parts() -> None:
    settings = make_settings("weight-sync", ["model=builtin:tiny", "compare_all=true", *COMMON])
    said = io.StringIO()
    results = weight_sync.measure(settings, Console(file=said, width=300)).results  # type: ignore[arg-type]
    every = ", ".join(
        rf"{part} [\d.e-]+ ms" for part in ("gather", "serialise", "transfer", "load", "verify", "resume", "pause")
    )
    for name in ("cuda_ipc", "broadcast", "checkpoint_engine"):
        assert re.search(rf"^{name}: {every}$", said.getvalue(), re.MULTILINE), said.getvalue()
    names = list(dict.fromkeys(result.name for result in results))
    assert names == [SHARED, "cuda_ipc", "broadcast", "checkpoint_engine", COPY, FILE]
    found = {result.name: result.details for result in results}
    own = found["cuda_ipc"]
    assert own["bytes_moved"] == found["broadcast"]["bytes_moved"] == found[COPY]["bytes_moved"]
    assert own["min_s"] <= own["mean_s"] <= own["max_s"]
    assert 0 < own["pause_s"] < own["max_s"]
    assert {"gather", "serialise", "transfer", "load", "verify", "resume", "pause"} == own["parts"].keys()
