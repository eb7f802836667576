"""Programs that attack, on every ground that this machine can give: docs/code.md has the table of which test shows what."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import code_attacks
from support.code_attacks import LIMITS, settled, tree
from support.hostile_programs import FUNCTIONS, STREAMS, TRY
from support.paths import ROOT

from redline.environments.code.inside.cell import Limits
from redline.environments.code.protections import gaps
from redline.environments.code.sandbox import Program, Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the protections are Linux's")

NOBODY = 61_234
PATHS = f"{ROOT / 'src'}:{ROOT / 'tests'}"
GROUNDS: dict[str, tuple[str, list[str]]] = {
    "as it is": ("", []),
    "without namespaces": ("", ["namespaces"]),
    "a user id for each program, without namespaces": ("root", ["namespaces"]),
    "a user without rights": ("nobody", []),
    "a user without rights, without namespaces": ("nobody", ["namespaces"]),
}
"""Ground → who runs it with a Python that all can read, if anybody, and the protections that are left off."""
ATTACKS = [f"stream: {name}" for name in STREAMS] + [f"{kind}: {name}" for kind in ("call", "assert") for name in FUNCTIONS]
FOUND: dict[str, dict[str, Any]] = {}


def found_on(ground: str) -> dict[str, Any]:
    """What came of all attacks on a ground; they are played once."""
    if ground not in FOUND:
        FOUND[ground] = _played(*GROUNDS[ground])
    protections = FOUND[ground]["ground"]
    if "namespaces" not in GROUNDS[ground][1] and not protections["namespaces"]:
        pytest.skip(f"no namespaces on this machine: {protections['missing']['namespaces']}")
    if found := gaps(protections):
        pytest.skip(f"on this machine a program could {found[0]}")
    return FOUND[ground]


def _played(who: str, without: list[str]) -> dict[str, Any]:
    source = Path(code_attacks.__file__)
    with tempfile.TemporaryDirectory(prefix="attacked-") as folder:
        python = sys.executable
        change: dict[str, Any] = {}
        if who:
            python = _python_for_all()
        if who == "nobody":
            os.chown(folder, NOBODY, NOBODY)
            change = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        done = subprocess.run(
            [python, str(source), folder, *without],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": PATHS}, capture_output=True, timeout=600, **change,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    played: dict[str, Any] = json.loads(done.stdout)
    return played


def _python_for_all() -> str:
    """A Python that any user may start, which must be able to read this repository too."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    for python in ("/usr/bin/python3", "/usr/local/bin/python3"):
        code = "import sys; assert sys.version_info >= (3, 11); import redline.environments.code.sandbox"
        env = {"PYTHONPATH": str(ROOT / "src")}
        if (
            os.path.exists(python)
            and not subprocess.run([python, "-c", code], user=NOBODY, env=env, capture_output=True).returncode
        ):
            return python
    pytest.skip("no Python that another user could start")


@pytest.mark.slow
@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_costs_one_attempt_and_is_no_pass(attack: str, ground: str) -> None:
    outcome = found_on(ground)[attack]
    assert not outcome["passed"], outcome
    assert outcome["leaks"] == [], outcome
    assert outcome["left"] == 0, "processes are left"
    assert outcome["works after"], outcome
    assert outcome["seconds"] < 20
    assert outcome.get("output", 0) <= 2 * LIMITS.output_kb * 1024
    assert outcome.get("most processes", 0) <= LIMITS.processes + 3, "the program's, and zygote's child, keeper and judge"


@pytest.mark.slow
@pytest.mark.parametrize("ground", GROUNDS)
def test_nothing_around_the_sandbox_was_touched(ground: str) -> None:
    assert found_on(ground)["surroundings"] == {
        "canary lives": True, "secret": code_attacks.SECRET, "folder": ["secret"], "written": [],
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ground", GROUNDS)
def test_a_ground_has_the_protections_that_it_is_named_for(ground: str) -> None:
    protections = found_on(ground)["ground"]
    assert bool(protections["namespaces"]) == ("namespaces" not in GROUNDS[ground][1])
    assert bool(protections["first_uid"]) == (os.geteuid() == 0 and ground in ("as it is", list(GROUNDS)[2]))
    assert protections["seccomp"]
    assert protections["namespaces"] or protections["landlock"]


@pytest.mark.slow
def test_a_fork_bomb_reaches_its_limit_and_no_further_and_others_go_on_meanwhile() -> None:
    sandbox = Sandbox(Limits(3.0, 256, 4, 16, 12))
    if not (sandbox.protections["first_uid"] or (sandbox.protections["namespaces"] and os.geteuid())):
        pytest.skip("programs may not start processes on this machine")
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    with ThreadPoolExecutor(4) as threads:
        bombs = [threads.submit(sandbox.run, Program(bomb), [""]) for _ in range(2)]
        time.sleep(1.5)
        most = len(tree(sandbox.pid))
        honest = threads.submit(sandbox.run, Program("import os\nif os.fork() == 0: os._exit(0)\nos.wait()\nprint(1)"), [""])
        assert honest.result()[0].stdout == "1\n"
        assert [bomb.result()[0].limit for bomb in bombs] == ["time", "time"]
    assert 12 < most <= 2 * (12 + 2) + 3
    assert settled(sandbox.pid) == []
    sandbox.close()


@pytest.mark.slow
@pytest.mark.parametrize("without", [[], ["namespaces"]])
def test_nothing_is_left_when_redline_is_killed(without: list[str], tmp_path: Path) -> None:
    zygote = _start_and_kill(tmp_path, without, "redline")
    _gone(zygote)


@pytest.mark.slow
@pytest.mark.parametrize("without", [[], ["namespaces"]])
def test_nothing_is_left_when_the_zygote_is_killed_and_the_next_start_clears_its_folder(
    without: list[str], tmp_path: Path
) -> None:
    zygote = _start_and_kill(tmp_path, without, "zygote")
    _gone(zygote)
    assert (tmp_path / f"redline-code-{os.geteuid()}" / str(zygote)).exists()
    _start_and_kill(tmp_path, without, "nothing")
    assert not (tmp_path / f"redline-code-{os.geteuid()}" / str(zygote)).exists()


CHILD = """
import os, sys, threading, time
from redline.environments.code.inside.cell import Limits
from redline.environments.code.protections import gaps
from redline.environments.code.sandbox import Program, Sandbox
sandbox = Sandbox(Limits(60, 256, 4, 16, 8), without=sys.argv[1:])
hold = "open('mark', 'w').close()\\nimport time\\nwhile True: time.sleep(1)"
threading.Thread(target=sandbox.run, args=(Program(hold), [""]), daemon=True).start()
print(sandbox.pid, flush=True)
time.sleep(100)
"""


def _start_and_kill(folder: Path, without: list[str], whom: str) -> int:
    """Start a redline that runs a program, and kill one of them. Returns the zygote's process id."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(folder)}
    child = subprocess.Popen([sys.executable, "-c", CHILD, *without], env=env, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    zygote = int(child.stdout.readline())
    until = time.monotonic() + 20
    while len(tree(zygote)) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    below = tree(zygote)
    assert len(below) >= 3, "warden, keeper and program"
    if whom == "zygote":
        os.kill(zygote, signal.SIGKILL)
        _all_gone(below)
    child.kill()
    child.wait()
    _all_gone([*below, zygote])
    return zygote


def _all_gone(pids: list[int]) -> None:
    until = time.monotonic() + 20
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    assert left == []


def _gone(zygote: int) -> None:
    assert not _lives(zygote)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_program_cannot_say_for_itself_that_it_passed() -> None:
    """The quick ones of the attacks, so that every change is put to them."""
    sandbox = Sandbox(Limits(5.0, 256, 4, 16, 8))
    for name in ("always equal", "sys.exit", "os._exit", "other builtins", "another guest", "a reply of its own"):
        outcome = code_attacks._function(sandbox, FUNCTIONS[name], code_attacks.CALLS)
        assert not outcome["passed"], name
        assert outcome["works after"], name
    sandbox.close()


def test_a_program_sees_no_secret_and_opens_no_socket(tmp_path: Path) -> None:
    sandbox = Sandbox(Limits(5.0, 256, 4, 16, 8))
    if found := gaps(sandbox.protections):
        pytest.skip(f"on this machine a program could {found[0]}")
    with code_attacks._surroundings(tmp_path) as known:
        for name in ("the environment", "files of the user", "writes outside", "the network", "signals to others"):
            (ran,) = sandbox.run(Program(TRY.format(**known) + STREAMS[name]), [""])
            assert "LEAK" not in ran.stdout + ran.stderr, (name, ran)
            assert "refused" in ran.stdout or name == "signals to others", ran
        assert known["process"].poll() is None
    sandbox.close()


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_a_compiled_language_runs_by_a_command() -> None:
    sandbox = Sandbox(Limits(20.0, 1024, 16, 16, 32))
    text = '#include <stdio.h>\nint main(void) { int x; scanf("%d", &x); printf("%d\\n", 2 * x); }'
    (ran,) = sandbox.run(Program(text, ("sh", "-c", "cc -o a answer.c && ./a"), "answer.c"), ["21"])
    if sandbox.protections["namespaces"]:
        assert (ran.stdout, ran.status) == ("42\n", 0), ran
    sandbox.close()
