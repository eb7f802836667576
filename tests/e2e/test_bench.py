from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.processes import redline, succeed

RESULT_FIELDS = {"name", "value", "unit", "samples", "bound", "fraction_of_bound", "peer"}
SMALL = ("model=builtin:tiny", "prompts=4", "new_tokens=8", "pairs=2", "num_threads=1")


@pytest.mark.slow
def test_generate_ends_with_a_document_that_has_every_field(tmp_path: Path) -> None:
    done = redline("bench", "generate", *SMALL, "--json", "--save", "results", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document.keys() == {"case", "identity", "results"}
    assert document["case"] == "generate"
    assert document["identity"]["config"]["prompts"] == 4
    assert {"source", "packages", "device", "gpus", "cpu"} <= document["identity"].keys()
    for result in document["results"]:
        assert result.keys() >= RESULT_FIELDS
        assert result["value"] > 0
        assert result["samples"]
        assert result["bound"]["value"] > 0
        assert result["bound"]["why"]
        assert result["fraction_of_bound"] > 0
    assert {"name", "value", "ratio"} <= document["results"][0]["peer"].keys()
    assert json.loads((tmp_path / "results" / "generate.json").read_text()) == document
    assert "throughput" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.slow
def test_n_sampling_ends_with_a_document(tmp_path: Path) -> None:
    small = ("model=builtin:tiny", "prompt_tokens=64", "new_tokens=4", "n=2", "pairs=2", "num_threads=1")
    document = json.loads(succeed("bench", "n-sampling", *small, "--json", cwd=tmp_path).splitlines()[-1])
    assert all(0 < result["fraction_of_bound"] < 1 for result in document["results"])


@pytest.mark.slow
def test_without_json_stdout_has_the_table_and_last_the_path_of_what_was_saved(tmp_path: Path) -> None:
    *table, path = succeed("bench", "generate", *SMALL, "peers=none", "--save", "results", cwd=tmp_path).splitlines()
    assert path == "results/generate.json"
    document = json.loads((tmp_path / path).read_text())
    assert all(any(result["name"] in line for line in table) for result in document["results"])


def test_a_wrong_key_is_refused_at_once(tmp_path: Path) -> None:
    done = redline("bench", "generate", "promts=4", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: redline bench generate: promts: unknown key\n\nhint: did you mean prompts?\n"
