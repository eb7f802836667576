from __future__ import annotations

import math

import pytest

from redline.telemetry.summary.timeline import bottleneck, by_phase, in_words, phase_of, step_phases


@pytest.mark.parametrize(
    ("span", "phase"),
    [
        ("engine.decode", "generation"),
        ("engine.update_weights", "weight_sync"),
        ("trainer.backward", "training"),
        ("weight_sync.publish", "weight_sync"),
        ("buffer.pack", "data"),
        ("rollouts.prompts", "data"),
        ("rollouts.reward", "reward"),
        ("wait.for_rollouts", "wait_for_rollouts"),
        ("run.checkpoint", "other"),
        ("trainer.setup", "other"),
        ("somebody's own", "other"),
        ("unaccounted", "unaccounted"),
    ],
)
def test_every_span_has_a_phase(span: str, phase: str) -> None:
    assert phase_of(span) == phase


def test_phases_sum_to_what_their_spans_do() -> None:
    rows = {"engine.decode": 5, "engine.prefill": 2, "trainer.forward": 3, "mine": 1, "unaccounted": 4}
    assert by_phase(rows) == {"generation": 7, "training": 3, "other": 1, "unaccounted": 4}


def test_a_step_from_before_there_were_phases_has_those_of_its_sections() -> None:
    row = {
        "step": 1,
        "time/engine_s": 2.0,
        "time/trainer_s": 1.0,
        "time/buffer_s": 0.25,
        "time/rollouts_s": 0.25,
        "time/wait_s": 3,
    }
    assert step_phases(row) == {"generation": 2.0, "training": 1.0, "data": 0.5, "wait": 3}


def test_the_phases_of_a_step_are_its_timeline_alone() -> None:
    row = {"timeline/generation_s": 2.0, "time/engine_s": 9.0, "timeline/training_s": None, "timeline/data_s": math.inf}
    assert step_phases(row) == {"generation": 2.0}


def test_the_bottleneck_is_the_phase_that_took_the_most() -> None:
    assert bottleneck({"generation": 1.0, "wait_for_rollouts": 3.0}) == ("wait_for_rollouts", 0.75)
    assert bottleneck({}) is None
    assert bottleneck({"generation": 0.0}) is None


def test_phases_in_words() -> None:
    assert [in_words(phase) for phase in ("wait_for_rollouts", "weight_sync", "wait")] == [
        "waiting for rollouts",
        "weight sync",
        "waiting",
    ]
