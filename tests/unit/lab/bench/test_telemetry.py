from __future__ import annotations

import io

import pytest
from rich.console import Console

from redline.lab.bench.run import bench
from redline.lab.bench.settings import make_settings


@pytest.mark.slow
def test_the_case_times_spans_and_pairs_a_recorded_loop_with_one_that_is_not() -> None:
    settings = make_settings(
        "telemetry",
        [
            "model=builtin:tiny",
            "pairs=1",
            "samples=2",
            "steps=2",
            "group_size=2",
            "groups_per_step=1",
            "max_new_tokens=2",
            "whole_steps=3",
        ],
    )
    document = bench("telemetry", settings, Console(file=io.StringIO()))
    results = {result.name: result for result in document.results}
    assert results.keys() == {
        "a span",
        "a span, sums only",
        "a span in a task",
        "a span, nobody records",
        "spans in a step, counted",
        "a whole run, counted",
        "a recorded step",
    }
    for name, result in results.items():
        assert result.value > 0, name
        assert result.bound.value > 0, name
    assert results["a span"].value > results["a span, nobody records"].value
    assert results["a recorded step"].peer is not None
    assert len(results["a span"].samples) == 2
