"""Runs of `redline` as a user starts them: a process of its own, in a folder of its own, judged by the files it leaves."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from support.forks import Forked

from redline.telemetry import RunFolder

REDLINE = Path(sys.executable).with_name("redline")
TIMEOUT_S = 600

LETTERS = '''
"""A task that even a tiny random model learns within a minute: write the letter e, and never a q."""

from redline.types import Task


class Letters:
    def __init__(self, seed, letter="e"):
        self.letter = letter

    def train(self, index):
        return Task(f"letters/{index}", [{"role": "user", "content": f"word {index % 7}"}])

    def held_out(self, count):
        return [Task(f"letters/held_out/{i}", [{"role": "user", "content": f"test {i}"}]) for i in range(count)]

    def score(self, task, text):
        if "q" in text:
            raise ValueError("there is a q in it")
        return {"letter": text.count(self.letter) / max(1, len(text))}
'''


def write_letters(folder: Path, **sections: dict[str, Any]) -> Path:
    """The task and a recipe for it; each keyword adds to, or replaces, the keys of one section."""
    (folder / "letters.py").write_text(LETTERS)
    recipe: dict[str, dict[str, Any]] = {
        "run": {"name": "letters", "num_threads": 1},
        "model": {"path": "builtin:tiny", "dtype": "float32"},
        "rollouts": {
            "task": {"kind": "import", "path": "letters:Letters"},
            "groups_per_step": 4,
            "group_size": 8,
            "max_new_tokens": 16,
            "evaluation": {"num_tasks": 8},
        },
        "trainer": {"learning_rate": 3e-3},
    }
    for name, values in sections.items():
        recipe.setdefault(name, {}).update(values)
    path = folder / "letters.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def redline(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    if not _may_be_forked(arguments, env):
        return subprocess.run(
            [REDLINE, *arguments],
            cwd=cwd,
            env=_environment(env),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder, "stdout"), Path(folder, "stderr")
        process = Forked([str(argument) for argument in arguments], cwd, _environment(env), *outputs)
        try:
            process.wait(TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(arguments, process.wait(), *(path.read_text() for path in outputs))


def _environment(env: dict[str, str] | None) -> dict[str, str]:
    return os.environ | {"NO_COLOR": "1"} | (env or {})


FORKED = ("train", "eval", "export", "env", "serve", "doctor", "report", "show")
"""Verbs that start no process that is to be as itself."""


def _may_be_forked(arguments: Sequence[str | Path], env: dict[str, str] | None) -> bool:
    """Whether a process that has imported everything before will do: not where the environment of the imports is another, or
    the process starts others that are to be as itself."""
    if sys.platform != "linux":  # macOS allows no fork of what has loaded torch
        return False
    is_placed = any(str(argument).startswith(("placement.", "tensor_parallel_size")) for argument in arguments)
    return not (env or {}).keys() - {"PYTHONDONTWRITEBYTECODE"} and str(arguments[0]) in FORKED and not is_placed


def succeed(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run to the end and expect that it went well; what it printed on stdout."""
    done = redline(*arguments, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def started(*arguments: str | Path, cwd: Path) -> Iterator[subprocess.Popen[str] | Forked]:
    """A process that is ours to signal, and gone when the block ends."""
    with _popen(arguments, cwd) if not _may_be_forked(arguments, None) else _forked(arguments, cwd) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@contextlib.contextmanager
def _popen(arguments: Sequence[str | Path], cwd: Path) -> Iterator[subprocess.Popen[str]]:
    with (cwd / "stderr.txt").open("a") as stderr:
        process = subprocess.Popen(
            [REDLINE, *arguments], cwd=cwd, env=_environment(None), stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    yield process
    process.stdout.close()


@contextlib.contextmanager
def _forked(arguments: Sequence[str | Path], cwd: Path) -> Iterator[Forked]:
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), cwd / "stderr.txt"
        yield Forked([str(argument) for argument in arguments], cwd, _environment(None), stdout, stderr)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str] | Forked) -> bool:
    """Look a few times per millisecond; False when the process ended first."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if process.poll() is not None:
            return condition()
        assert time.monotonic() < deadline, "it neither happened nor ended"
        time.sleep(0.0003)
    return True


# ── what a run leaves ──────────────────────────────────────────────────────────────────────────────────────────────────


def wait_for_run(cwd: Path, process: subprocess.Popen[str] | Forked) -> RunFolder:
    """The folder that the process makes, or has made."""
    assert wait_until(lambda: any(cwd.glob("runs/*")), process), "the process ended before it had a run folder"
    return only_run(cwd)


def only_run(cwd: Path) -> RunFolder:
    [path] = (cwd / "runs").iterdir()
    return RunFolder(path)


def digest(path: Path) -> str:
    """To compare large files by: when an assertion on their bytes fails, pytest may spend hours on the difference."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rows(path: Path) -> list[dict[str, Any]]:
    """Of a JSONL file; a last line that is still being written does not count."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def num_rows(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    """What must be the same in every run of a recipe: everything but seconds and rates."""
    return {key: value for key, value in row.items() if not key.endswith(("_s", "/seconds"))}


def assert_finite(row: dict[str, Any]) -> None:
    """A step that trained on no token has no means over tokens, and one during which no group arrived none over groups."""
    absent = {"rollouts/failure_reason"}  # words
    if row["trainer/trained_tokens"] == 0:
        absent |= {"trainer/entropy", "trainer/clip_fraction", "trainer/mismatch_kl", "trainer/max_ratio"}
    if row["rollouts/groups"] == 0:
        absent |= {f"rollouts/{name}" for name in ("reward_mean", "reward_std", "stopped_fraction", "completion_tokens_mean")}
        absent |= {f"rollouts/{name}" for name in ("truncated_fraction", "sequences_mean", "turns_mean", "turns_max")}
        absent.add("rollouts/expected_fraction")
    if row["rollouts/completion_tokens_mean"] in (None, 1.0):  # percentiles of nothing, or of the gaps between single tokens
        absent |= {key for key in row if re.search(r"_p\d\d_s$", key)}
    expected = row.keys() - absent
    bad = {key: row[key] for key in expected if not isinstance(row[key], int | float) or not math.isfinite(row[key])}
    assert not bad, f"step {row['step']}: {bad}"
