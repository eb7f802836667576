"""`redline train` with guessed tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import only_run, rows, succeed, write_letters

STEPS = 40


@pytest.mark.slow
def test_a_run_that_guesses_samples_what_one_that_does_not_samples_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    run = {"steps": STEPS, "checkpoint_every": STEPS}
    counts = {}
    for mode in ("off", "always"):
        (tmp_path / mode).mkdir()
        recipe = write_letters(tmp_path / mode, run={"name": "letters", "num_threads": 1, **run}, engine={"speculation": mode})
        succeed("train", recipe.name, cwd=tmp_path / mode)
        counts[mode] = rows(only_run(tmp_path / mode).metrics)
    first_off, first_always = counts["off"][0], counts["always"][0]
    for name in ("rollouts/reward_mean", "engine/generated_tokens"):
        assert first_always[name] == first_off[name]
    assert not any("engine/drafted_tokens" in row for row in counts["off"])
    last = max(counts["always"], key=lambda row: row.get("engine/accepted_rate", 0.0))
    assert last["engine/drafted_tokens"] > 0
    assert 0 < last["engine/accepted_rate"] <= 1
    folder = only_run(tmp_path / "always")
    succeed("train", "--resume", folder.path, f"run.steps={STEPS + 2}", cwd=tmp_path / "always")
    assert rows(folder.metrics)[-1]["engine/drafted_tokens"] > 0
