"""`redline train` that trains in whole numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import only_run, redline, rows, succeed, write_letters

from redline.config.processor import multiplies_in
from redline.kernels.cpu.quantized_training import training_products

STEPS = 6
KEYS = {"quantization": "int16"}


@pytest.fixture
def _there() -> None:
    if not multiplies_in("int16") or training_products("int16") is None:
        pytest.skip("this CPU has no such products, or there is no compiler")


def recipe(folder: Path, **sections: dict[str, object]) -> Path:
    return write_letters(folder, run={"steps": STEPS, "num_threads": 1}, model={"dtype": "float32"}, **sections)


@pytest.mark.usefixtures("_there")
@pytest.mark.parametrize("engine", ["none", "int16"])
def test_a_run_learns_from_samples_that_are_near_to_it(engine: str, tmp_path: Path) -> None:
    written = recipe(tmp_path, trainer=KEYS, engine={"quantization": engine})
    succeed("train", written.name, cwd=tmp_path)
    found = rows(only_run(tmp_path).metrics)
    mismatches = [row["trainer/mismatch_kl"] for row in found if row.get("trainer/mismatch_kl") is not None]
    assert len(found) == STEPS
    assert len(mismatches) > STEPS // 2
    assert all(0 < value < 1e-6 for value in mismatches)


@pytest.mark.usefixtures("_there")
@pytest.mark.slow
def test_a_resumed_run_ends_in_the_same_samples(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
        name = recipe(folder, trainer=KEYS).name
    succeed("train", name, cwd=whole)
    succeed("train", name, "run.steps=3", "run.checkpoint_every=3", cwd=parts)
    succeed("train", "--resume", only_run(parts).path, f"run.steps={STEPS}", cwd=parts)
    last = [rows(only_run(folder).metrics)[-1] for folder in (whole, parts)]
    assert last[0]["rollouts/reward_mean"] == last[1]["rollouts/reward_mean"]


@pytest.mark.usefixtures("_there")
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("model.dtype=bfloat16",), "bfloat16"),
        (("trainer.sharding=full",), "trainer.sharding"),
        (("trainer.pipeline_parallel_size=2",), "trainer.pipeline_parallel_size"),
        (("trainer.sequence_parallel_size=2",), "trainer.sequence_parallel_size"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(overrides: tuple[str, ...], named: str, tmp_path: Path) -> None:
    written = recipe(tmp_path, trainer=KEYS)
    for dry in (("--dry-run",), ()):
        refused = redline("train", written.name, *overrides, *dry, cwd=tmp_path)
        assert refused.returncode
        assert "trainer.quantization" in refused.stderr
        assert named in refused.stderr
        assert "hint" in refused.stderr
