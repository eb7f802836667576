"""A rank that is killed or stopped at a random moment costs time alone: the run completes, and nothing is trained twice.

Four rounds by default. Twenty, with the table that docs/trainer.md has:

    REDLINE_RANK_ROUNDS=20 .venv/bin/pytest -m slow -s tests/e2e/test_rank_deaths.py
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from redline.telemetry.files.metrics import MetricsLog

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "smoke.yaml"
ROUNDS, FIRST = int(os.environ.get("REDLINE_RANK_ROUNDS", "4")), int(os.environ.get("REDLINE_RANK_FIRST_ROUND", "0"))
STEPS = 8
PATIENCE_S = 600
KEYS = ("step", "trainer/loss", "trainer/grad_norm", "rollouts/reward_mean", "trainer/trained_tokens")
SHARDINGS = ("none", "full")


def command(folder: Path, sharding: str, restarts: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    keys = [f"run.folder={folder}", f"run.steps={STEPS}", "run.checkpoint_every=2", "run.num_threads=1"]
    keys += ["rollouts.evaluation.num_tasks=0", "trainer.rank_timeout_s=5", f"trainer.sharding={sharding}"]
    # A stopped rank hears no SIGTERM: torchrun kills it after so many seconds, 30 by default.
    patience = ["--max-restarts", str(restarts), "--shutdown-timeout", "5"]
    return [*launcher, *patience, "-m", "redline", "train", str(RECIPE), *keys]


@contextmanager
def started(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(arguments, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        if process.poll() is None:
            for rank in ranks_of(process).values():
                os.kill(rank, signal.SIGKILL)
            process.terminate()
            process.wait(60)


def ranks_of(launcher: subprocess.Popen[bytes]) -> dict[int, int]:
    """Rank → process, of those that live."""
    found = {}
    for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        try:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {int(entry.removeprefix(b"RANK=")): int(child) for entry in variables if entry.startswith(b"RANK=")}
    return found


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for run in folder.glob("smoke-*/metrics.jsonl") for row in MetricsLog.read(run)]


def trained(folder: Path) -> list[tuple[int, int, int]]:
    """Group, attempt and the step that it was trained on in, as the store has it: an attempt as often as it was trained on."""
    table = pa.concat_tables(pa.ipc.open_file(path).read_all() for path in folder.glob("smoke-*/trajectories/segment-*.arrow"))
    kept = table.filter(pc.field("version") >= 0).select(["group", "attempt", "version"]).to_pylist()
    return sorted((row["group"], row["attempt"], row["version"]) for row in kept)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of two ranks for each way to divide, to which nothing happens."""
    found = {}
    for sharding in SHARDINGS:
        found[sharding] = folder = tmp_path_factory.mktemp(sharding)
        with started(command(folder, sharding, 0), folder / "log") as process:
            assert process.wait(PATIENCE_S) == 0, (folder / "log").read_text(errors="replace")[-4000:]
    return found


@dataclass
class Blow:
    """What happens in one round, drawn from its number."""

    sharding: str
    rank: int
    signal: signal.Signals
    after_steps: int
    """It comes after so many steps; after none: while the run starts."""
    delay_s: float

    @classmethod
    def of_round(cls, number: int) -> Blow:
        draw = random.Random(number)
        after = draw.randrange(STEPS - 1)
        delay_s = draw.uniform(0.0, 1.5) if after else draw.uniform(1.0, 12.0)
        kind = draw.choice((signal.SIGKILL, signal.SIGSTOP))
        return cls(SHARDINGS[number % 2], draw.randrange(2), kind, after, delay_s)


@dataclass
class Round:
    blow: Blow
    recovered_s: float | None
    """From the blow to the end of the first step of ranks that were started after it; None where no step was left to take."""
    log: str


def strike(folder: Path, blow: Blow) -> Round:
    folder.mkdir()
    with started(command(folder, blow.sharding, 3), folder / "log") as process:
        until = time.monotonic() + PATIENCE_S
        while len(rows(folder)) < blow.after_steps or len(before := ranks_of(process)) < 2:
            assert process.poll() is None, (folder / "log").read_text(errors="replace")[-4000:]
            assert time.monotonic() < until
            time.sleep(0.02)
        time.sleep(blow.delay_s)
        struck, restarted = time.time(), None
        with suppress(ProcessLookupError):  # it was faster
            os.kill(before[blow.rank], blow.signal)
        while process.poll() is None:
            assert time.time() - struck < PATIENCE_S, "it hangs:\n" + (folder / "log").read_text(errors="replace")[-4000:]
            now = set(ranks_of(process).values())
            if restarted is None and len(now) == 2 and not now & set(before.values()):
                restarted = time.time()
            time.sleep(0.05)
        log = (folder / "log").read_text(errors="replace")
        assert process.returncode == 0, log[-6000:]
    after = [row["run/time_s"] for row in rows(folder) if restarted and row["run/time_s"] > restarted]
    return Round(blow, min(after) - struck if after else None, log)


@pytest.fixture(scope="module")
def done() -> Iterator[list[Round]]:
    """The rounds that went well; how long recovery took is printed behind the last."""
    rounds: list[Round] = []
    yield rounds
    for kind in (signal.SIGKILL, signal.SIGSTOP):
        times = sorted(one.recovered_s for one in rounds if one.recovered_s is not None and one.blow.signal is kind)
        if times:
            middle = statistics.median(times)
            print(f"\n{kind.name}: {len(times)} rounds, {times[0]:.0f} / {middle:.0f} / {times[-1]:.0f} s (min / median / max)")


@pytest.mark.parametrize("number", range(FIRST, FIRST + ROUNDS))
def test_the_run_completes_and_nothing_is_trained_twice(
    number: int, undisturbed: dict[str, Path], done: list[Round], tmp_path: Path
) -> None:
    blow = Blow.of_round(number)
    expected, folder = undisturbed[blow.sharding], tmp_path / "runs"
    done.append(strike(folder, blow))
    print(f"round {number}: {blow}: {done[-1].recovered_s} s", flush=True)
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1))
    assert trained(folder) == trained(expected)
    for one, other in zip(rows(folder), rows(expected), strict=True):
        assert [one[key] for key in KEYS] == pytest.approx([other[key] for key in KEYS], rel=1e-4, abs=1e-6)
