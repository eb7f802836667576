"""The parts of a step's row that say how long things took."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.fakes import group, trajectory
from support.tiny_engines import ask, make_model

from redline.engine.stats import metrics_between
from redline.telemetry import Recorder
from redline.telemetry.summary.percentiles import latency_metrics, percentiles_of
from redline.telemetry.summary.phases import EngineParts, part_seconds
from redline.types import FinishReason, TrajectoryGroup, Turn, VersionSpan, WeightUpdate


def turn(queue_s: float, prefill_s: float, decode_s: float, num_tokens: int) -> Turn:
    return Turn("", 1, 1 + num_tokens, VersionSpan(0, 0), FinishReason.STOP, queue_s, prefill_s, decode_s)


def answered(*turns: Turn, latency_s: float) -> TrajectoryGroup:
    """A group with one attempt of so many turns."""
    return replace(group([1.0]), trajectories=[trajectory([1], [2], turns=turns)], latency_s=latency_s)


# ── percentiles ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_percentiles_are_those_of_what_there_is() -> None:
    found = percentiles_of("engine/queue", [*range(101), math.nan])
    assert found == {"engine/queue_p50_s": 50.0, "engine/queue_p90_s": 90.0, "engine/queue_p99_s": 99.0}


def test_nothing_has_no_percentiles() -> None:
    assert all(math.isnan(value) for value in percentiles_of("engine/queue", []).values())
    assert all(math.isnan(value) for value in latency_metrics([]).values())


def test_latency_is_that_of_groups_of_attempts_and_of_each_time_the_engine_was_asked() -> None:
    first, second = turn(1.0, 2.0, 6.0, 4), turn(3.0, 1.0, 5.0, 11)
    found = latency_metrics([answered(first, second, latency_s=20.0), answered(first, latency_s=10.0)])
    medians = {key: value for key, value in found.items() if "_p50_" in key}
    assert medians == {
        "rollouts/latency_p50_s": 15.0,
        "rollouts/attempt_latency_p50_s": (9.0 + 18.0) / 2,
        "engine/queue_p50_s": 1.0,
        "engine/first_token_p50_s": 3.0,
        "engine/inter_token_p50_s": 2.0,  # 6 s for the three tokens after the first, twice, and once 5 s for ten
    }
    assert found["engine/queue_p99_s"] == pytest.approx(3.0, rel=0.02)


def test_a_completion_of_one_token_has_no_time_between_tokens() -> None:
    found = latency_metrics([answered(turn(0.0, 1.0, 0.0, 1), latency_s=1.0)])
    assert math.isnan(found["engine/inter_token_p50_s"])
    assert found["engine/first_token_p50_s"] == 1.0


# ── parts ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_parts_of_a_section_are_seconds_and_those_that_did_not_run_are_zero() -> None:
    spans = {"trainer.forward": 1_500_000_000, "trainer.values": 10**9, "engine.decode": 10**9, "unaccounted": 5}
    assert part_seconds("trainer", ("forward", "backward"), spans) == {
        "trainer/forward_s": 1.5,
        "trainer/backward_s": 0.0,
        "trainer/values_s": 1.0,
    }


def test_the_engines_parts_are_found_in_whatever_thread_they_ran() -> None:
    now = 0
    recorder = Recorder(clock=lambda: now)
    parts = EngineParts(recorder)

    def decode(seconds: int) -> None:
        nonlocal now
        with recorder.span("engine.decode"):
            now += seconds * 10**9

    decode(1)
    thread = threading.Thread(target=decode, args=(2,))
    thread.start()
    thread.join()
    assert parts.mark() == {"engine/prefill_s": 0.0, "engine/decode_s": 3.0, "engine/collect_s": 0.0}
    decode(5)
    assert parts.mark()["engine/decode_s"] == 5.0


# ── the engine's own counts ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_of_training_has_the_engines_batch_size_tokens_and_peak_of_its_cache(tmp_path: Path) -> None:
    engine = make_model(tmp_path).engine(num_blocks=64, enable_prefix_caching=False)
    engine.generate([ask(5, max_tokens=3)])
    engine.apply(WeightUpdate(1, (), 0))
    before = engine.stats
    engine.generate([ask(8, max_tokens=6, n=3), ask(8, max_tokens=2, n=1, seed=1)])
    engine.apply(WeightUpdate(2, (), 0))
    row = metrics_between(before, engine.stats)
    # After the first token, which prefill gives: one step with all four, then four with the three that go on.
    assert row["engine/batch_size_mean"] == (4 + 3 + 3 + 3 + 3) / 5
    assert row["engine/generated_tokens"] == 3 * 6 + 2
    assert row["engine/prompt_tokens"] == 16
    assert (row["engine/running"], row["engine/waiting"], row["engine/kv_use"]) == (0, 0, 0.0)
    # Blocks of four tokens. At the end of the longest: two full ones of the prompt shared, and two of each of the three.
    assert row["engine/kv_use_peak"] >= (2 + 3 * 2) / 64
