"""Profiles that torch.profiler records here, with a stall that was planted."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.rank_processes import Ranks, started_ranks
from support.stalled_ranks import Stamps, record, schedule

from redline.lab.traces.causes import Cause
from redline.lab.traces.diagnosis import Diagnosis, diagnose

STEPS = 12


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started_ranks(2) as found:
        yield found


@pytest.fixture(scope="module", params=[False, True], ids=["named ranges", "Python's stack"])
def profiled(
    request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Diagnosis, list[Stamps]]:
    folder = tmp_path_factory.mktemp("profiles")
    stamps = ranks.run(record, str(folder), STEPS, request.param)
    return diagnose([folder]), stamps


def waited(working: list[tuple[int, int]], since: list[int]) -> int:
    """Nanoseconds in which one rank worked while the other waited already."""
    return sum(max(0, end - max(start, waiting)) for (start, end), waiting in zip(working, since, strict=True))


def cause_of(diagnosis: Diagnosis, call: str) -> Cause:
    found = [cause for cause in diagnosis.engines[0].causes if call in cause.call]
    assert found, [cause.call for cause in diagnosis.engines[0].causes]
    return found[0]


@pytest.mark.slow
def test_the_rank_that_packs_its_call_and_what_it_costs_are_found(profiled: tuple[Diagnosis, list[Stamps]]) -> None:
    diagnosis, (first, second) = profiled
    cause = cause_of(diagnosis, "dumps")
    assert diagnosis.label(cause.process) == "rank 0"
    assert cause.kind == "serialisation"
    assert cause.lost == pytest.approx(waited(first.packed, second.asked), rel=0.1)
    assert cause.growth is None or cause.growth.last_s > cause.growth.first_s


@pytest.mark.slow
def test_the_rank_that_unpacks_holds_up_the_first_one_in_turn(profiled: tuple[Diagnosis, list[Stamps]]) -> None:
    diagnosis, (first, second) = profiled
    cause = cause_of(diagnosis, "loads")
    assert diagnosis.label(cause.process) == "rank 1"
    assert cause.lost == pytest.approx(waited(second.unpacked, first.met), rel=0.1)


@pytest.mark.slow
def test_that_there_is_no_device_work_is_said(profiled: tuple[Diagnosis, list[Stamps]]) -> None:
    diagnosis, _ = profiled
    assert [sentence for sentence in diagnosis.lacks if "no device work" in sentence]
    assert not [sentence for sentence in diagnosis.lacks if "missing" in sentence]


@pytest.mark.gpu
def test_on_a_gpu_the_engine_waits_for_a_process_that_packs(tmp_path: Path) -> None:
    """Our own engine, whose steps need an object of another process: the doctor finds process, call and lost time."""
    import torch
    from support.small_models import llama, write_model

    write_model(tmp_path / "model", llama(hidden_size=256, num_attention_heads=4, num_key_value_heads=2), seed=5, std=0.15)
    spawned = multiprocessing.get_context("spawn")
    ours, theirs = spawned.Pipe()
    scheduler = spawned.Process(target=schedule, args=(theirs, str(tmp_path / "scheduler.json")), daemon=True)
    scheduler.start()
    engine = engine_with_work(tmp_path / "model")
    named = torch.profiler.record_function
    with torch.profiler.profile() as profiler:
        for _ in range(20):
            ours.send_bytes(b"step")
            ours.recv_bytes()  # the object is there; it is not packed yet
            ours.send_bytes(b"send")
            with named("prepare_context"):
                with named("connection.recv"):
                    data = ours.recv_bytes()
                with named("pickle.loads"):
                    pickle.loads(data)
            engine.step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "engine.json"))
    ours.send_bytes(b"end")
    stamps: Stamps = ours.recv()
    scheduler.join()
    diagnosis = diagnose([tmp_path / "engine.json", tmp_path / "scheduler.json"])
    cause = cause_of(diagnosis, "pickle.dumps")
    assert Path(diagnosis.timeline.processes[cause.process].source).name == "scheduler.json"
    assert cause.kind == "serialisation"
    assert cause.hops == 1
    # the window begins with the first work of the device: what was packed before that is not lost in it
    assert cause.lost == pytest.approx(sum(end - start for start, end in stamps.packed[1:]), rel=0.1)


def engine_with_work(folder: Path):
    """Return an engine on the GPU whose graphs are captured, with requests for more steps than the test takes."""
    import torch
    from support.small_models import VOCAB_SIZE

    from redline.config.sections.engine import EngineConfig
    from redline.engine import NativeEngine
    from redline.models.files.hf import load_decoder
    from redline.types import GenerateRequest, SamplingParams

    engine = NativeEngine(
        load_decoder(folder, "cuda", torch.bfloat16), EngineConfig(max_num_seqs=8, kv_cache_memory_bytes=2**24)
    )
    drawn = np.random.default_rng(0)
    for number in range(8):
        prompt = drawn.integers(2, VOCAB_SIZE, 20).astype(np.int32)
        engine.submit(GenerateRequest(prompt, SamplingParams(max_tokens=220, seed=number)))
    for _ in range(4):  # a step is up to eight tokens of each
        engine.step()
    return engine
