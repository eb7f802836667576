"""`redline bench all` and `--profile`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from redline.errors import ConfigError
from redline.lab.bench.every import bench_all
from redline.lab.bench.run import bench
from redline.lab.bench.settings import SETTINGS, make_settings, quick_overrides
from redline.lab.material.workloads import QUICK

SMALL = ["model=builtin:tiny", "device=cpu", "num_threads=1", "pairs=2", "warmup_s=0"]


def test_every_case_has_a_quick_size_that_it_accepts() -> None:
    assert QUICK.keys() == SETTINGS.keys()
    for case in SETTINGS:
        make_settings(case, ["device=cpu", *quick_overrides(case)])


@pytest.mark.slow
def test_a_case_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(QUICK, "transfer", ("sizes=1_000_000_000_000_000", "warmup_s=0"))  # type: ignore[arg-type]
    monkeypatch.setitem(QUICK, "weight-sync", ("model=builtin:tiny", "pairs=1", "warmup_s=0"))  # type: ignore[arg-type]
    document = bench_all(["num_threads=1", "device=cpu"], quick=True, cases=("transfer", "weight-sync"))
    assert document.failed == ["transfer"]
    assert document.exit_code == 1
    saved = json.loads(document.save(tmp_path).read_text())
    assert saved == document.as_json()
    assert [(run["case"], bool(run["error"])) for run in saved["cases"]] == [("transfer", True), ("weight-sync", False)]
    assert {result["case"] for result in saved["results"]} == {"weight-sync"}
    assert saved["cases"][1]["identity"]["config"]["num_threads"] == 1
    assert "2 cases in" in capfd.readouterr().err


def test_what_only_one_case_knows_is_refused_before_any_runs() -> None:
    with pytest.raises(ConfigError, match="not a setting that every case has"):
        bench_all(["prompts=3"], quick=True)


@pytest.mark.slow
def test_a_profile_lies_next_to_the_result_and_changes_nothing_in_it(tmp_path: Path) -> None:
    settings = make_settings("weight-sync", SMALL)
    document = bench("weight-sync", settings, Console(file=io.StringIO()), profile=tmp_path)
    assert document.identity["config"]["pairs"] == 2
    folder = tmp_path / "profiles" / "weight-sync"
    summary = json.loads((folder / "summary.json").read_text())
    assert "aten::_foreach_copy_" in {operator["name"] for operator in summary["operators"]}
    assert summary["seconds"] > 0
    assert "unaccounted" in summary["by_stage"], "copies are in no span"
    assert json.loads((folder / "torch.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_memory_is_profiled_in_this_process(tmp_path: Path) -> None:
    overrides = ["model=builtin:tiny", "device=cpu", "num_threads=1", "tokens=8", "first_tokens=8", "most_tokens=8"]
    settings = make_settings("memory", [*overrides, "limit_bytes=1_000_000_000", "peers=none"])
    bench("memory", settings, Console(file=io.StringIO()), profile=tmp_path)
    summary = json.loads((tmp_path / "profiles" / "memory" / "summary.json").read_text())
    assert summary["operators"]
