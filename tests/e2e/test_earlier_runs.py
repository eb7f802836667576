"""A run that an earlier version began goes on, and is shown, in this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.paths import ROOT
from support.processes import only_run, rows, succeed

RECORDED = ROOT / "tests" / "unit" / "config" / "recorded" / "smoke.json"
"""The config.json that an earlier version wrote for recipes/smoke.yaml."""


@pytest.mark.slow
def test_a_run_with_the_config_of_an_earlier_version_is_resumed_and_shown(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "smoke.yaml"
    succeed("train", recipe, "run.steps=2", "run.checkpoint_every=1", "run.device=cpu", "run.num_threads=1", cwd=tmp_path)
    run = only_run(tmp_path)
    earlier = json.loads(RECORDED.read_text())
    earlier["run"] |= {"steps": 2, "checkpoint_every": 1, "folder": str(tmp_path / "runs")}
    run.config.write_text(json.dumps(earlier))
    succeed("train", run.path, "--resume", "run.steps=3", cwd=tmp_path)
    assert [row["step"] for row in rows(run.metrics)] == [1, 2, 3]
    assert "schedule" in json.loads(run.config.read_text())["trainer"]
    assert json.loads(succeed("show", run.path, "--json", cwd=tmp_path))
