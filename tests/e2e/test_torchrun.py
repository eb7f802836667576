"""`torchrun -m redline train`: several ranks train one run, as one process would, and survive what befalls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from redline.models.files.tiny import write_tiny_model
from redline.telemetry.files.metrics import MetricsLog

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "smoke.yaml"
PATIENCE_S = 300
KEYS = ("step", "trainer/loss", "trainer/grad_norm", "rollouts/reward_mean", "trainer/trained_tokens")


def rows(folder: Path) -> list[dict[str, Any]]:
    return list(MetricsLog.read(folder / "metrics.jsonl"))


def only_run(folder: Path) -> Path:
    (run,) = folder.glob("smoke-*")
    return run


@contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks
            process.wait(60)


def torchrun(*arguments: str, restarts: int = 0) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*launcher, "--max-restarts", str(restarts), "-m", "redline", "train", *arguments]


def finish(command: list[str], log: Path) -> str:
    with started(command, log) as process:
        code = process.wait(PATIENCE_S)
    said = log.read_text(errors="replace")
    assert code == 0, said[-4000:]
    return said


def keys(folder: Path, steps: int, *more: str) -> list[str]:
    """In float32 on every machine: bfloat16 shows who added up what."""
    return [f"run.folder={folder}", f"run.steps={steps}", "run.checkpoint_every=2", "model.dtype=float32", *more]


def assert_same_steps(found: Path, expected: Path) -> None:
    assert [row["step"] for row in rows(found)] == [row["step"] for row in rows(expected)]
    for one, other in zip(rows(found), rows(expected), strict=True):
        assert [one[key] for key in KEYS] == pytest.approx([other[key] for key in KEYS], rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process: four steps."""
    folder = tmp_path_factory.mktemp("alone")
    finish([sys.executable, "-m", "redline", "train", str(RECIPE), *keys(folder, 4)], folder / "log")
    return only_run(folder)


@pytest.mark.parametrize(
    "division",
    [
        [],
        ["trainer.sharding=grad_op"],
        ["trainer.sharding=full"],
        ["trainer.sequence_parallel_size=2"],
        ["trainer.pipeline_parallel_size=2"],
    ],
    ids=lambda division: " ".join(division) or "data",
)
def test_two_ranks_take_the_steps_of_one_process(alone: Path, division: list[str], tmp_path: Path) -> None:
    said = finish(torchrun(str(RECIPE), *keys(tmp_path, 4, *division)), tmp_path / "log")
    run = only_run(tmp_path)
    assert_same_steps(run, alone)
    assert said.count("run folder ") == 1, "rank 0 alone talks"
    lanes = json.loads((run / "ledger.json").read_text())["lanes"]
    (follower,) = (rows for name, rows in lanes.items() if name.startswith("rank-1-") and name.endswith("/main"))
    assert "trainer.backward" in json.dumps(follower)
    assert ("wait.for_stages" in json.dumps(follower)) == ("trainer.pipeline_parallel_size=2" in division)
    assert (run / "model" / "config.json").is_file()
    shares_sequences = any("parallel_size" in key for key in division)
    assert all(("trainer/rank_imbalance" in row) != shares_sequences for row in rows(run))
    assert all(row.get("trainer/rank_imbalance", 1.0) >= 1 for row in rows(run))


def test_a_run_in_stages_goes_on_in_shards_and_in_one_process(alone: Path, tmp_path: Path) -> None:
    stages, shards = "trainer.pipeline_parallel_size", "trainer.sharding"
    finish(torchrun(str(RECIPE), *keys(tmp_path, 1, f"{stages}=2")), tmp_path / "log")
    run = str(only_run(tmp_path))
    finish(torchrun(run, "--resume", "run.steps=2", f"{stages}=1", f"{shards}=full"), tmp_path / "log")
    finish(torchrun(run, "--resume", "run.steps=3", f"{stages}=2", f"{shards}=none"), tmp_path / "log")
    finish([sys.executable, "-m", "redline", "train", run, "--resume", "run.steps=4", f"{stages}=1"], tmp_path / "log")
    assert_same_steps(Path(run), alone)


@pytest.mark.parametrize("before", ["one process", "two that divide the weights"])
def test_a_run_goes_on_with_another_number_of_ranks(alone: Path, before: str, tmp_path: Path) -> None:
    single, full = [sys.executable, "-m", "redline", "train"], "trainer.sharding=full"
    began_alone = before == "one process"
    first = [*single, str(RECIPE), *keys(tmp_path, 2)] if began_alone else torchrun(str(RECIPE), *keys(tmp_path, 2, full))
    finish(first, tmp_path / "log")
    run = str(only_run(tmp_path))
    goes_on = [run, "--resume", "run.steps=4", full if began_alone else "trainer.sharding=none"]
    finish(torchrun(*goes_on) if began_alone else [*single, *goes_on], tmp_path / "log")
    assert_same_steps(Path(run), alone)


def rank_ids(launcher: int) -> dict[int, int]:
    """Rank → process, of the ranks that a torchrun has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    environments = {int(child): Path(f"/proc/{child}/environ").read_bytes().split(b"\0") for child in children}
    return {
        int(entry.removeprefix(b"RANK=")): child
        for child, entries in environments.items()
        for entry in entries
        if entry.startswith(b"RANK=")
    }


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not any(len(rows(run)) >= step for run in folder.glob("smoke-*") if (run / "metrics.jsonl").exists()):
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_costs_a_restart_that_resumes(killed: int, alone: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(torchrun(str(RECIPE), *keys(tmp_path, 4), restarts=1), log) as process:
        wait_for_step(tmp_path, 3, process, log)
        os.kill(rank_ids(process.pid)[killed], signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 0, log.read_text(errors="replace")[-4000:]
    assert_same_steps(only_run(tmp_path), alone)


def in_the_middle(
    tmp_path: Path, act: Callable[[subprocess.Popen[bytes], dict[int, int]], None], *division: str
) -> tuple[Path, str, float]:
    """A long run to whose third step something happens: the run, what was said, and the seconds until rank 0 had ended."""
    log = tmp_path / "log"
    with started(torchrun(str(RECIPE), *keys(tmp_path, 500, "trainer.rank_timeout_s=5", *division)), log) as process:
        wait_for_step(tmp_path, 3, process, log)
        ranks, began = rank_ids(process.pid), time.monotonic()
        act(process, ranks)
        while Path(f"/proc/{ranks[0]}/exe").exists():
            assert time.monotonic() - began < 60, log.read_text(errors="replace")[-4000:]
            time.sleep(0.1)
        took_s = time.monotonic() - began
        os.kill(ranks[1], signal.SIGCONT) if Path(f"/proc/{ranks[1]}").exists() else None
        assert process.wait(PATIENCE_S) != 0
    return only_run(tmp_path), log.read_text(errors="replace"), took_s


def test_a_rank_that_stands_still_ends_the_others_with_its_name(tmp_path: Path) -> None:
    run, said, took_s = in_the_middle(tmp_path, lambda process, ranks: os.kill(ranks[1], signal.SIGSTOP))
    assert "rank 1 of the trainer (process " in said
    assert "has given no sign of life" in said
    assert took_s < 30
    assert "rank 1" in json.loads((run / "failure.json").read_text())["message"]


def test_a_stage_that_is_killed_ends_the_others_with_its_name(tmp_path: Path) -> None:
    stages = "trainer.pipeline_parallel_size=2"
    run, said, took_s = in_the_middle(tmp_path, lambda process, ranks: os.kill(ranks[1], signal.SIGKILL), stages)
    assert "rank 1 of the trainer (process " in said
    assert took_s < 30
    assert "rank 1" in json.loads((run / "failure.json").read_text())["message"]


FAILING = """
import sys, time
from redline import cli
from redline.errors import TrainingError
from redline.launch.stages import Stages
from redline.trainer import PolicyTrainer

step, close = PolicyTrainer.step, Stages.close

def failing_step(trainer, batch):
    if trainer.version == 1:
        raise TrainingError("every rank says no", "nothing helps")
    return step(trainer, batch)

def long_close(stages):
    time.sleep(8)  # longer than a rank has that is told of another's end, and than torchrun needs to hear of it
    close(stages)

PolicyTrainer.step, Stages.close = failing_step, long_close
sys.argv = ["redline", "train", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.parametrize("is_signalled", [False, True], ids=["", "a launcher ends rank 0 while it closes"])
def test_an_error_that_every_rank_raises_is_written_down_with_the_ledger(is_signalled: bool, tmp_path: Path) -> None:
    """A launcher that misses a rank sends the others a SIGTERM, at the time at which rank 0 misses it and begins to close."""
    script, log = tmp_path / "failing.py", tmp_path / "log"
    script.write_text(FAILING)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with started([*launcher, str(script), str(RECIPE), *keys(tmp_path, 4)], log) as process:
        if is_signalled:
            wait_for_failure(tmp_path, process, log)
            os.kill(rank_ids(process.pid)[0], signal.SIGTERM)
        assert process.wait(PATIENCE_S) != 0
    run, said = only_run(tmp_path), log.read_text(errors="replace")
    failure = json.loads((run / "failure.json").read_text())
    assert (failure["error"], failure["message"], failure["step"]) == ("TrainingError", "every rank says no", 1), said[-4000:]
    assert (run / "ledger.json").is_file(), said[-4000:]


def wait_for_failure(folder: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not list(folder.glob("smoke-*/failure.json")):
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        assert time.monotonic() < until
        time.sleep(0.05)


LITTLE_ROOM = """
import os, sys
import torch
from torch.nn.modules.module import register_module_forward_hook
from redline import cli
from redline.models.decoder import DecoderLayer

def look(module, inputs, outputs):
    if isinstance(module, DecoderLayer) and os.environ["RANK"] == "1" and len(outputs[0]) > 110:
        raise torch.OutOfMemoryError("no room")

register_module_forward_hook(look)
sys.argv = ["redline", "train", *sys.argv[1:]]
cli.main()
"""


def test_a_rank_that_runs_out_of_memory_ends_the_run_with_the_key_that_lets_it_go_on(alone: Path, tmp_path: Path) -> None:
    """The other one waits for it inside a layer."""
    script, log = tmp_path / "little_room.py", tmp_path / "log"
    script.write_text(LITTLE_ROOM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    with started([*launcher, str(RECIPE), *keys(tmp_path, 4, "trainer.sharding=full")], log) as process:
        assert process.wait(PATIENCE_S) != 0
    run, said = only_run(tmp_path), log.read_text(errors="replace")
    failure = json.loads((run / "failure.json").read_text())
    assert failure["message"].startswith("rank 1 of the trainer (process "), said[-4000:]
    assert "out of memory with " in failure["message"]
    key = "trainer.max_tokens_per_micro_batch"
    assert key in failure["message"]
    finish([*launcher, str(run), "--resume", f"{key}=105"], log)
    assert_same_steps(run, alone)


def test_a_stage_that_runs_out_of_memory_begins_again_with_the_others(alone: Path, tmp_path: Path) -> None:
    script = tmp_path / "little_room.py"
    script.write_text(LITTLE_ROOM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    said = finish([*launcher, str(RECIPE), *keys(tmp_path, 4, "trainer.pipeline_parallel_size=2")], tmp_path / "log")
    assert "the step begins again with at most" in said
    assert_same_steps(only_run(tmp_path), alone)


@pytest.mark.parametrize("whom", ["torchrun", "rank 1"])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(whom: str, tmp_path: Path) -> None:
    def act(process: subprocess.Popen[bytes], ranks: dict[int, int]) -> None:
        os.kill(process.pid if whom == "torchrun" else ranks[1], signal.SIGTERM)

    run, said, _ = in_the_middle(tmp_path, act)
    last = rows(run)[-1]["step"]
    assert f"stopped after step {last}; continue with" in said
    assert (run / "checkpoints" / f"step-{last:06d}").is_dir()


def test_ranks_that_have_loaded_different_weights_are_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        folder = tmp_path / f"cache-{rank}" / "redline" / "models" / "tiny-0"
        folder.mkdir(parents=True)
        write_tiny_model(folder, rank)
    script = tmp_path / "rank.sh"
    script.write_text(f'export XDG_CACHE_HOME={tmp_path}/cache-$RANK\nexec {sys.executable} -m redline train "$@"\n')
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [*launcher, "bash", str(script), str(RECIPE), *keys(tmp_path / "runs", 2)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode != 0
    assert "the ranks have loaded different weights" in done.stderr
    assert not list((tmp_path / "runs").glob("*/metrics.jsonl"))
