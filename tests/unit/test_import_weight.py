from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "ray", "numpy", "pyarrow", "pydantic", "safetensors", "huggingface_hub", "reasoning_gym")
REDLINE = Path(sys.executable).with_name("redline")


def loaded_after(statement: str) -> set[str]:
    """Which heavy packages a fresh interpreter has after the statement."""
    code = f"import sys\n{statement}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_heavy_packages_are_installed_so_that_their_absence_means_something() -> None:
    assert loaded_after("import torch") >= {"torch"}


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import redline") == set()


def test_reading_a_run_loads_no_torch() -> None:
    assert not loaded_after("import redline; redline.Run") & {"torch", "transformers", "ray"}


def test_a_mistake_in_a_call_of_train_is_said_before_torch_is_loaded() -> None:
    call = "import redline\ntry: redline.train('none.yaml')\nexcept redline.RedlineError: pass"
    assert not loaded_after(call) & {"torch", "transformers", "ray"}


@pytest.mark.parametrize("verb", ["lab.evaluate.command", "launch.export"])
def test_what_eval_and_export_check_first_needs_no_torch(verb: str) -> None:
    assert not loaded_after(f"import redline.{verb}") & {"torch", "transformers", "ray"}


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    assert loaded_after("import redline.cli") == set()


def test_reading_a_recipe_loads_no_torch() -> None:
    assert not loaded_after("from redline.config import load_recipe, resolve") & {"torch", "transformers", "ray"}


def test_telemetry_loads_no_torch() -> None:
    assert not loaded_after("import redline.telemetry") & {"torch", "transformers", "ray"}


def test_help_loads_nothing_heavy() -> None:
    shown = "import contextlib, io, sys, redline.cli\nsys.argv = ['redline', '--help']"
    quietly = "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): redline.cli.main()"
    assert loaded_after(f"{shown}\n{quietly}") == set()


@pytest.mark.slow  # a processor that is slow for a while takes longer
def test_help_takes_less_than_half_a_second() -> None:
    """The best of five, in CPU time: the machine may be busy, the command may not be slow."""
    seconds = []
    for _ in range(5):
        began = _children_s()
        done = subprocess.run(
            [REDLINE, "--help"], capture_output=True, text=True, check=True, env=os.environ | {"NO_COLOR": "1"}
        )
        seconds.append(_children_s() - began)
        assert "train" in done.stdout
    assert min(seconds) < 0.5


def _children_s() -> float:
    """CPU time of all children that have ended."""
    times = os.times()
    return times.children_user + times.children_system
