"""A run whose engine is a server: `redline serve` in a process of its own, which gets every version over HTTP."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.processes import only_run, rows, started, succeed, write_letters

from redline import Run
from redline.models.files.sources import model_folder

STEPS = 3
TOKEN = "a-secret-of-the-test"
EVEN_ODDS = float(np.log(259))
"""Less the logprob of every token of the built-in tiny model's 259, where each is as likely as any other."""
pytestmark = pytest.mark.slow


@contextmanager
def serving(cwd: Path, port: int = 0, model: str = "builtin:tiny") -> Iterator[str]:
    """The address of `redline serve` with a model of the recipe's form."""
    os.environ["WEIGHTS_TOKEN"] = TOKEN
    arguments = (
        model,
        "--served-model-name",
        "policy",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--weights-token-env",
        "WEIGHTS_TOKEN",
        "run.num_threads=1",
    )
    with started("serve", *arguments, cwd=cwd) as process:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"at (http://\S+)/v1", (cwd / "stderr.txt").read_text())):
            assert process.poll() is None, (cwd / "stderr.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield found[1]
    del os.environ["WEIGHTS_TOKEN"]


def overrides(url: str) -> list[str]:
    return [f"engine.url={url}/v1", "engine.kind=openai", "engine.weights_token_env=WEIGHTS_TOKEN"]


def version(url: str) -> int:
    return httpx2.get(f"{url}/health").json()["version"]


def assert_synced(steps: list[dict[str, Any]]) -> None:
    """The server sampled every step from the trainer's own policy: their logprobs agree to rounding."""
    assert len(steps) == STEPS
    known = [row["trainer/mismatch_kl"] for row in steps if row["trainer/mismatch_kl"] is not None]
    assert known
    assert max(known) < 1e-9
    assert len({row["trainer/grad_norm"] for row in steps}) > 1


def test_an_adapter_that_is_trained_reaches_the_server_merged(tmp_path: Path) -> None:
    run = {"name": "letters", "num_threads": 1, "steps": STEPS}
    trainer = {"learning_rate": 3e-3, "lora": {"rank": 4}}
    write_letters(tmp_path, run=run, rollouts={"evaluation": {"num_tasks": 2}}, trainer=trainer)
    with serving(tmp_path) as url:
        succeed("train", "letters.yaml", *overrides(url), cwd=tmp_path)
        assert version(url) == STEPS
    steps = rows(only_run(tmp_path).metrics)
    assert_synced(steps)
    whole = sum(tensor.nbytes for tensor in load_file(model_folder("builtin:tiny") / "model.safetensors").values())
    assert all(0 < row["weight_sync/bytes_moved"] < whole for row in steps[1:]), "only what the adapter changes"


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_server_that_is_killed_and_started_again_is_brought_to_the_current_version(max_lag: int, tmp_path: Path) -> None:
    steps, there = 12, {name: tmp_path / name for name in ("first", "second", "run")}
    for folder in there.values():
        folder.mkdir()
    run = {"name": "letters", "num_threads": 1, "steps": steps}
    rollouts = {"groups_per_step": 8, "evaluation": {"num_tasks": 0}}
    write_letters(there["run"], run=run, rollouts=rollouts, trainer={"learning_rate": 3e-2}, buffer={"max_lag": max_lag})
    with ExitStack() as first:
        url = first.enter_context(serving(there["first"]))
        with started("train", "letters.yaml", *overrides(url), cwd=there["run"]) as process:
            wait_until(lambda: version(url) >= 3)
            first.close()  # its process is killed, whatever it was at
            with serving(there["second"], int(url.rpartition(":")[2]), str(without_preference(tmp_path / "flat"))) as again:
                assert process.wait(240) == 0, (there["run"] / "stderr.txt").read_text()
                assert version(again) == steps
    found = rows(only_run(there["run"]).metrics)
    assert len(found) == steps
    known = [row["trainer/mismatch_kl"] for row in found if row["trainer/mismatch_kl"] is not None]
    assert max_lag or max(known) < 1e-9, "the server sampled from the trainer's own policy"
    logprobs = [np.array(values) for values in Run.open(only_run(there["run"]).path).trajectories()["logprobs"].to_pylist()]
    sampled = [values[values < 0] for values in logprobs]
    assert sum(map(len, sampled)) > 0
    of_its_own = [values for values in sampled if len(values) > 1 and np.abs(values + EVEN_ODDS).max() < 1e-4]
    assert not of_its_own, "nothing counts that it sampled from the weights that it was started with"


def without_preference(folder: Path) -> Path:
    """A model of the recipe's form whose weights are all 0: every token is as likely as any other, always."""
    shutil.copytree(model_folder("builtin:tiny"), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def wait_until(condition: Callable[[], bool], patience_s: float = 120) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
