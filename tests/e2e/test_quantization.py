"""`redline train` that samples in whole numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import only_run, redline, rows, succeed, write_letters

from redline.config.processor import multiplies_in
from redline.kernels.cpu.quantized import quantized_products

STEPS = 6
MISMATCH = {"int16": 1e-7, "int8": 1e-4}
"""In lockstep, by a tiny network. One that samples with the weights of a step before has 5e-4 and more."""


def needs(kind: str) -> None:
    if not multiplies_in(kind) or quantized_products(kind) is None:  # type: ignore[arg-type]
        pytest.skip("this CPU has no such products, or there is no compiler")


def trained(folder: Path, **engine: object) -> list[dict[str, float]]:
    recipe = write_letters(folder, run={"steps": STEPS, "num_threads": 1}, engine=engine, model={"dtype": "float32"})
    succeed("train", recipe.name, cwd=folder)
    return rows(only_run(folder).metrics)


def test_a_run_says_how_far_its_samples_are_from_the_trainer(tmp_path: Path) -> None:
    needs("int16")
    found = mismatches(trained(tmp_path, quantization="int16"))
    assert len(found) > STEPS // 2
    assert all(0 < value < MISMATCH["int16"] for value in found)


def mismatches(found: list[dict[str, float]]) -> list[float]:
    """Of the steps that something was trained on."""
    return [row["trainer/mismatch_kl"] for row in found if row.get("trainer/mismatch_kl") is not None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MISMATCH)
@pytest.mark.parametrize("overrides", [("placement.engines=1",), ("trainer.lora.rank=4",), ("buffer.max_lag=1",)], ids=str)
def test_engines_apart_adapters_and_a_lag_take_every_version(kind: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Were a version missed, or sampled without its adapter, the mismatch would grow from step to step."""
    needs(kind)
    recipe = write_letters(
        tmp_path,
        run={"steps": 4 * STEPS, "num_threads": 2},
        engine={"quantization": kind},
        model={"dtype": "float32"},
        trainer={"learning_rate": 3e-3},
    )
    succeed("train", recipe.name, *overrides, cwd=tmp_path)
    found = mismatches(rows(only_run(tmp_path).metrics))
    assert len(found) > 2 * STEPS
    assert all(0 < value < (MISMATCH[kind] if not overrides[0].startswith("buffer") else 0.05) for value in found)


@pytest.mark.slow
def test_a_resumed_run_ends_in_the_same_samples(tmp_path: Path) -> None:
    needs("int8")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    whole_rows = trained(whole, quantization="int8")
    recipe = write_letters(
        parts, run={"steps": STEPS, "num_threads": 1}, engine={"quantization": "int8"}, model={"dtype": "float32"}
    )
    succeed("train", recipe.name, "run.steps=3", "run.checkpoint_every=3", cwd=parts)
    succeed("train", "--resume", only_run(parts).path, f"run.steps={STEPS}", cwd=parts)
    name = "rollouts/reward_mean"
    assert rows(only_run(parts).metrics)[-1][name] == whole_rows[-1][name]


def test_engines_of_others_do_not_read_it(tmp_path: Path) -> None:
    recipe = write_letters(tmp_path, engine={"kind": "transformers", "quantization": "int16"})
    refused = redline("train", recipe.name, "--dry-run", cwd=tmp_path)
    assert refused.returncode
    assert "engine.quantization" in refused.stderr
