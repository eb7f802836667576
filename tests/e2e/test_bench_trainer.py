from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.processes import redline

RESULT_FIELDS = {"name", "value", "unit", "samples", "bound", "fraction_of_bound", "peer"}
TINY = ("model=builtin:tiny", "device=cpu", "dtype=float32", "num_threads=1")


def document_of(tmp_path: Path, case: str, *overrides: str) -> dict:
    done = redline("bench", case, *TINY, *overrides, "--json", "--save", "results", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "results" / f"{case}.json").read_text()) == document
    assert document["identity"]["config"]["model"] == "builtin:tiny"
    for result in document["results"]:
        assert result.keys() >= RESULT_FIELDS
        assert result["value"] > 0
        assert result["fraction_of_bound"] > 0
    return document


@pytest.mark.slow
def test_the_trainer_is_measured_beside_transformers(tmp_path: Path) -> None:
    document = document_of(tmp_path, "trainer", "sequences=8", "tokens=64", "pairs=2")
    assert [result["name"] for result in document["results"]] == ["throughput", "MFU", "step", "peak memory"]
    assert all(result["peer"]["name"] == "transformers" for result in document["results"])


@pytest.mark.slow
def test_the_largest_micro_batch_keeps_to_the_limit(tmp_path: Path) -> None:
    limits = ("limit_bytes=40_000_000", "first_tokens=1024", "tolerance=0.5", "peers=none")
    tokens, filled = document_of(tmp_path, "memory", "tokens=64", *limits)["results"]  # the trainer plans for GPUs alone
    assert tokens["value"] >= 1024
    assert filled["value"] <= 40_000_000
    assert [try_["fits"] for try_ in tokens["samples"]].count(False) >= 1
    assert sum(filled["parts"].values()) == filled["value"]
