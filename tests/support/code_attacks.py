"""Plays the programs of `hostile_programs.py` in the sandbox.

Run as a program it plays all of them on one kind of ground and prints what came of each as JSON. It needs no more than Python
itself, so that it can be run by a user without rights:

    python code_attacks.py FOLDER [PROTECTION TO LEAVE OFF ...]
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.hostile_programs import FUNCTIONS, STREAMS, TRY

from redline.environments.code.checks import read_tests
from redline.environments.code.examine import examine
from redline.environments.code.inside.cell import Limits
from redline.environments.code.sandbox import Program, Sandbox

LIMITS = Limits(time_s=1.0, memory_mb=200, files_mb=8, output_kb=64, processes=12)
EXPECTED = 739_100 + 7
"""What every test expects; no attack has it in its text."""
SECRET = "the-secret-of-this-run"

WRITTEN = ("/usr/written", "/written", "/dev/shm/written", "/var/tmp/written")
CALLS = [{"call": "f(1)", "returns": EXPECTED}]
ASSERTS = [{"assert": f"y = f(1)\nassert y == {EXPECTED}"}, {"assert": f"assert abs(f(1) - {EXPECTED}) < 0.5 and f(2)"}]


def play(sandbox: Sandbox, folder: Path) -> dict[str, dict[str, Any]]:
    """Every attack, and what came of it."""
    with _surroundings(folder) as known:
        head = TRY.format(**known)
        found = {f"stream: {name}": _stream(sandbox, head + text) for name, text in STREAMS.items()}
        for kind, tests in (("call", CALLS), ("assert", ASSERTS)):
            for name, text in FUNCTIONS.items():
                found[f"{kind}: {name}"] = _function(sandbox, text, tests)
        found["surroundings"] = {
            "canary lives": known["process"].poll() is None,
            "secret": (folder / "secret").read_text(),
            "folder": sorted(os.listdir(folder)),
            "written": [
                name for name in ("/usr/written", "/written", "/dev/shm/written", "/var/tmp/written") if os.path.exists(name)
            ],
        }
    return found


def tree(root: int) -> list[int]:
    """The processes below a process."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [root]
    for one in found:
        found += [pid for pid, parent in parents.items() if parent == one]
    return found[1:]


def settled(root: int, seconds: float = 10.0) -> list[int]:
    """The processes below a process, once it has none or time is up."""
    until = time.monotonic() + seconds
    while (found := tree(root)) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def _stream(sandbox: Sandbox, text: str) -> dict[str, Any]:
    most, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            most[0] = max(most[0], len(tree(sandbox.pid)))

    looking = threading.Thread(target=look)
    looking.start()
    began = time.monotonic()
    (ran,) = sandbox.run(Program(text), [""])
    seconds = time.monotonic() - began
    done.set()
    looking.join()
    report = (
        examine(sandbox, Program(text), read_tests([{"stdin": "", "stdout": str(EXPECTED)}], "t")) if seconds < 0.5 else None
    )
    return {
        "passed": bool(report and report.is_correct),
        "leaks": [line for line in (ran.stdout + ran.stderr).splitlines() if line.startswith("LEAK")],
        "limit": ran.limit, "status": ran.status, "seconds": seconds, "output": len(ran.stdout) + len(ran.stderr),
        "most processes": most[0],
        "left": len(settled(sandbox.pid)), "works after": _works(sandbox), "said": (ran.stdout + ran.stderr)[-300:],
    }  # fmt: skip


def _function(sandbox: Sandbox, text: str, tests: list[dict[str, Any]]) -> dict[str, Any]:
    began = time.monotonic()
    report = examine(sandbox, Program(text), read_tests(tests, "t"))
    return {
        "passed": report.parts()["passed"] > 0,
        "leaks": ["LEAK"] if "LEAK" in str(report) else [],
        "seconds": time.monotonic() - began, "left": len(settled(sandbox.pid)), "works after": _works(sandbox),
        "said": str(report)[:300],
    }  # fmt: skip


def _works(sandbox: Sandbox) -> bool:
    tests = read_tests([{"call": "f(2)", "returns": 4}], "t")
    return examine(sandbox, Program("def f(x): return 2 * x"), tests).is_correct


@contextmanager
def _surroundings(folder: Path) -> Iterator[dict[str, Any]]:
    """What attacks aim at: a process, a file, a port, and this process with a secret in its environment."""
    (folder / "secret").write_text(SECRET)
    os.environ["SECRET"] = SECRET
    canary = subprocess.Popen(["sleep", "1000"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        known = {"canary": canary.pid, "parent": os.getpid(), "folder": str(folder), "port": server.getsockname()[1]}
        known |= {"process": canary}
        try:
            yield known
        finally:
            canary.kill()
            canary.wait()


def main(folder: str, without: list[str]) -> Mapping[str, Any]:
    sandbox = Sandbox(LIMITS, without=without)
    try:
        return {"ground": dict(sandbox.protections), **play(sandbox, Path(folder))}
    finally:
        sandbox.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        print(json.dumps(main(sys.argv[1] if sys.argv[1] != "-" else own, sys.argv[2:])))
