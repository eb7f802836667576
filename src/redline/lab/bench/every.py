"""`redline bench all`: every case, one after the other, each in a process of its own. Loads no torch itself.

{"case": "all", "identity", "cases": [{"case", "seconds", "error", "identity"}], "results": [{"case", "name", …}]}

A case that fails, whichever way, does not keep the others from being measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline.errors import ConfigError
from redline.lab.bench.settings import SETTINGS, make_settings, quick_overrides
from redline.telemetry import describe_environment, write_json

ALL = "all"
COMMON = ("device", "dtype", "num_threads", "seed")
"""Settings that mean the same to every case."""
HOST_MEMORY = "limit_bytes=4_000_000_000"
"""What `memory` may fill of a host, which is not only ours."""


@dataclass(slots=True, frozen=True)
class CaseRun:
    case: str
    seconds: float
    document: dict[str, Any] | None
    error: str | None

    def as_json(self) -> dict[str, Any]:
        identity = self.document["identity"] if self.document else None
        return {"case": self.case, "seconds": self.seconds, "error": self.error, "identity": identity}


@dataclass(slots=True)
class AllDocument:
    runs: list[CaseRun] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=describe_environment)

    @property
    def failed(self) -> list[str]:
        return [run.case for run in self.runs if run.error]

    @property
    def exit_code(self) -> int:
        return 1 if self.failed else 0

    def as_json(self) -> dict[str, Any]:
        results = [{"case": run.case, **result} for run in self.runs if run.document for result in run.document["results"]]
        return {
            "case": ALL,
            "identity": self.identity,
            "cases": [run.as_json() for run in self.runs],
            "results": results,
        }

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{ALL}.json"
        write_json(path, self.as_json())
        return path


def bench_all(
    overrides: Sequence[str] = (), *, quick: bool, profile: Path | None = None, cases: Sequence[str] = tuple(SETTINGS)
) -> AllDocument:
    """What is wrong with the command line is said before the first case runs."""
    arguments = {case: _arguments(case, overrides, quick) for case in cases}
    document = AllDocument()
    for number, (case, given) in enumerate(arguments.items(), start=1):
        _say(f"{number}/{len(arguments)}: {case}")
        document.runs.append(_run(case, given, profile))
        outcome = document.runs[-1]
        _say(f"{case}: {outcome.error}" if outcome.error else f"{case}: {outcome.seconds:.0f} s")
    failed = f", {len(document.failed)} failed: {', '.join(document.failed)}" if document.failed else ""
    _say(f"{len(document.runs)} cases in {sum(run.seconds for run in document.runs):.0f} s{failed}")
    return document


def _arguments(case: str, overrides: Sequence[str], quick: bool) -> list[str]:
    strange = [override for override in overrides if override.partition("=")[0] not in COMMON]
    if strange:
        raise ConfigError(f"{strange[0]}: not a setting that every case has", f"one of {', '.join(COMMON)}, or bench one case")
    own = [override for override in overrides if case != "serialize" or not override.startswith("device=")]
    given = [*(quick_overrides(case) if quick else ()), *own]
    if case == "memory":
        on_host = make_settings("weight-sync", own).device == "cpu"
        given += [HOST_MEMORY] if on_host and not any(key.startswith("limit_bytes=") for key in given) else []
    make_settings(case, given)
    return given


def _run(case: str, given: Sequence[str], profile: Path | None) -> CaseRun:
    started = time.perf_counter()
    own = ["--profile", "--save", str(profile)] if profile else []
    done = subprocess.run(
        [sys.executable, "-m", "redline.cli", "bench", case, *given, *own, "--json"], stdout=subprocess.PIPE, text=True
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        return CaseRun(case, seconds, None, f"it ended with exit code {done.returncode}; what it said is above")
    return CaseRun(case, seconds, json.loads(done.stdout.splitlines()[-1]), None)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
