"""What `redline train --dry-run` prints."""

from __future__ import annotations

import json
from pathlib import Path

from support.paths import ROOT
from typer.testing import CliRunner

from redline.cli import app


def test_a_dry_run_says_what_was_filled_in_and_why(tmp_path: Path) -> None:
    arguments = [str(ROOT / "recipes" / "smoke.yaml"), "trainer.schedule=cosine", "run.device=cpu", f"run.folder={tmp_path}"]
    result = CliRunner().invoke(app, ["train", *arguments, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "trainer.schedule.decay_steps = 40  (until run.steps)" in result.stderr
    assert json.loads(result.stdout)["trainer"]["schedule"]["decay_steps"] == 40
