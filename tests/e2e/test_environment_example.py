"""`examples/haggle.py` as a reader would use it."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

from redline import Run
from redline.lab.environments.check import check
from redline.lab.environments.made import Made
from redline.lab.environments.trials import Plan

EXAMPLE = ROOT / "examples" / "haggle.py"


def test_the_example_imports_redline_alone() -> None:
    imports = [node for node in ast.walk(ast.parse(EXAMPLE.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names if isinstance(node, ast.Import)}
    modules = {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    assert names | modules == {"redline"}


def test_nothing_is_wrong_with_the_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    monkeypatch.chdir(tmp_path)
    report = check(Made("haggle:Haggle"), Plan(tasks=2, limit_s=300), lambda text: None)
    assert report.problems == []
    assert report.counts["roles"] == 2


@pytest.mark.slow
def test_the_example_trains(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    done = subprocess.run([sys.executable, "haggle.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    run = Run.open(tmp_path / "runs" / "haggle-001")
    assert run.status.state == "finished"
    rows = run.trajectories().to_pylist()
    assert {row["role"] for row in rows} == {"seller", "buyer"}
