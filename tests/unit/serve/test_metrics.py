from __future__ import annotations

import re
from dataclasses import fields

from support.fakes import completion

from redline.serve.metrics import ENGINE, Histogram, ServerMetrics
from redline.types import EngineStats

SAMPLE = re.compile(r'[a-z_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? (\+Inf|-?[0-9.e+-]+)')


def text() -> str:
    metrics = ServerMetrics()
    metrics.answered("chat", 200, 0.5)
    metrics.generated(3, [completion([1, 2, 3])])
    return metrics.text(EngineStats(*[1] * 14))


def test_every_line_is_a_comment_or_a_sample() -> None:
    assert text().endswith("\n")
    assert [line for line in text().splitlines() if not line.startswith("# ") and not SAMPLE.fullmatch(line)] == []


def test_every_metric_has_one_type_and_one_meaning_before_its_samples() -> None:
    seen: set[str] = set()
    for line in text().splitlines():
        name = line.split(" ")[2] if line.startswith("#") else re.match(r"[a-z_]+", line)[0]
        if line.startswith("# HELP"):
            assert name not in seen
            seen.add(name)
        else:
            assert name in seen or re.sub(r"_(bucket|sum|count)$", "", name) in seen


def test_names_have_our_prefix_and_counters_end_in_total() -> None:
    types = [line.split(" ")[2:] for line in text().splitlines() if line.startswith("# TYPE")]
    assert all(name.startswith("redline_") for name, _ in types)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in types)


def test_every_count_of_the_engine_is_shown() -> None:
    assert ENGINE.keys() == {field.name for field in fields(EngineStats)}


def test_a_histogram_counts_what_is_at_most_each_bound() -> None:
    histogram = Histogram("h", "Something.", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, times=2)
    assert list(histogram.lines())[2:] == [
        'h_bucket{le="1.0"} 2',
        'h_bucket{le="2.0"} 5',
        'h_bucket{le="+Inf"} 6',
        "h_sum 16.0",
        "h_count 6",
    ]


def test_a_completion_of_one_token_has_no_gap_between_tokens() -> None:
    metrics = ServerMetrics()
    metrics.generated(1, [completion([1])])
    assert "redline_inter_token_latency_seconds_count 0" in metrics.text(EngineStats(*[0] * 14))
