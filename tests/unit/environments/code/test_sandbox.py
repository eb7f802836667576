"""What the sandbox does with programs that mean well; test_hostile.py has the others."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.code_attacks import tree

from redline.environments.code.inside.cell import Limits
from redline.environments.code.sandbox import Program, Sandbox
from redline.errors import TaskError


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(Limits(time_s=60, memory_mb=256, files_mb=4, output_kb=16, processes=8))
    yield sandbox
    sandbox.close()


def test_a_program_reads_its_input_and_each_run_begins_anew(sandbox: Sandbox) -> None:
    program = Program("import os\nprint(int(input()) + 1, os.listdir('.'))\nopen('left', 'w').write('x')")
    first, second = sandbox.run(program, ["1\n", "2\n"])
    assert (first.stdout, first.stderr, first.status, first.limit) == ("2 []\n", "", 0, "")
    assert second.stdout == "3 []\n"


def test_an_error_is_told_as_python_tells_it_without_lines_of_ours(sandbox: Sandbox) -> None:
    (ran,) = sandbox.run(Program("def f():\n    return 1 / 0\nf()"), [""])
    assert ran.status == 1
    assert ran.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert 'File "answer.py", line 2, in f' in ran.stderr
    assert ran.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "redline" not in ran.stderr


@pytest.mark.parametrize(("text", "status"), [("import sys; sys.exit(3)", 3), ("raise SystemExit('no')", 1), ("x = (", 1)])
def test_the_exit_status_is_the_programs(sandbox: Sandbox, text: str, status: int) -> None:
    assert sandbox.run(Program(text), [""])[0].status == status


def test_threads_and_exit_handlers_of_a_program_are_waited_for(sandbox: Sandbox) -> None:
    text = (
        "import atexit, threading, time\natexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\nprint('main')"
    )
    assert sandbox.run(Program(text), [""])[0].stdout == "main\nthread\nlast\n"


def test_a_program_finds_what_python_usually_has(sandbox: Sandbox) -> None:
    text = "import sys\nprint(__name__, __file__, sys.argv, sys.orig_argv)\nif not input(): exit()\nprint('not here')"
    (ran,) = sandbox.run(Program(text), ["\n"])
    assert (ran.stdout, ran.status) == ("__main__ answer.py ['answer.py'] ['answer.py']\n", 0), ran


def test_a_program_may_use_several_processes_where_they_are_counted(sandbox: Sandbox) -> None:
    if not sandbox.protections["namespaces"] or not (sandbox.protections["first_uid"] or os.geteuid()):
        pytest.skip("programs may not start processes here")
    text = "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, -2]))"
    (ran,) = sandbox.run(Program(text), [""])
    assert ran.stdout == "[1, 2]\n", ran


def test_functions_are_called_in_one_process_and_their_values_come_back_as_data(sandbox: Sandbox) -> None:
    calls = ["add(2, 3)", "[add(1, 1), (add('a', 'b'),)]", "add(1)", "missing()"]
    found, ran = sandbox.call("print('hello')\ndef add(a, b):\n    return a + b", calls)
    assert [one.value for one in found[:2]] == [5, [2, ("ab",)]]
    assert "TypeError" in found[2].problem
    assert "NameError" in found[3].problem
    assert ran is not None
    assert ran.stdout == "hello\n"


def test_a_program_that_does_not_load_says_why(sandbox: Sandbox) -> None:
    found, ran = sandbox.call("import nothing_of_that_name", ["f()"])
    assert found[0].problem
    assert ran is not None
    assert "ModuleNotFoundError" in ran.stderr


def test_asserts_run_beside_the_program_and_call_into_it(sandbox: Sandbox) -> None:
    tests = [
        "assert abs(half(3) - 1.5) < 1e-9",
        "assert half(3) == 2, 'no'",
        "import math\ndef check(f):\n    assert all(math.isclose(f(x), x / 2) for x in range(3))\ncheck(half)",
        "assert half() == 1",
    ]
    verdicts = sandbox.judge("def half(x):\n    return x / 2", tests)
    assert verdicts[:3] == ["", "AssertionError: no", ""]
    assert "TypeError" in verdicts[3]


def test_many_long_verdicts_of_asserts_all_come_back(sandbox: Sandbox) -> None:
    verdicts = sandbox.judge("def f(x):\n    return x", ["assert f(1) == 2, '\\u2713' * 5000", "assert f(1) == 1"] * 10)
    assert [bool(verdict) for verdict in verdicts] == [True, False] * 10


def test_a_cell_that_is_killed_from_outside_is_no_fault_of_its_program(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(sandbox.run, Program("import time\ntime.sleep(600)"), [""])
        while len(below := tree(sandbox.pid)) < 3:
            time.sleep(0.01)
        assert {Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in below} == {"1000\n"}
        os.kill(min(below), signal.SIGKILL)
        with pytest.raises(TaskError, match="something outside has killed it"):
            running.result()


def test_another_language_runs_by_a_command(sandbox: Sandbox) -> None:
    (ran,) = sandbox.run(Program("read x; echo $((x + 1))", ("sh", "answer.sh"), "answer.sh"), ["41\n"])
    assert ran.stdout == "42\n"


def test_many_at_once_do_not_get_in_each_others_way(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda i: sandbox.run(Program(f"print({i})"), [""])[0].stdout, range(12))
    assert list(found) == [f"{i}\n" for i in range(12)]


def test_a_zygote_that_was_ended_is_started_again() -> None:
    sandbox = Sandbox(Limits(60, 256, 4, 16, 8))
    first = sandbox.pid
    os.kill(first, signal.SIGKILL)
    while tree(os.getpid()).count(first) and Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert sandbox.run(Program("print(1)"), [""])[0].stdout == "1\n"
    assert sandbox.pid != first
    sandbox.close()


def test_a_limit_on_time_ends_a_program_and_those_after_it_are_not_run() -> None:
    sandbox = Sandbox(Limits(0.3, 256, 4, 16, 8))
    runs = sandbox.run(Program("while True: pass"), ["", ""])  # which comes back, though the program does not
    assert [ran.limit for ran in runs] == ["time"]
    sandbox.close()


def test_a_scratch_folder_that_is_a_link_or_anothers_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "precious" / "7"
    kept.mkdir(parents=True)
    (kept / "lock").touch()
    (tmp_path / f"redline-code-{os.geteuid()}").symlink_to(kept.parent)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TaskError, match="not a folder of this user's alone"):
        Sandbox(Limits(60, 256, 4, 16, 8)).run(Program("print(1)"), [""])
    assert kept.exists()


def test_errors_and_iterators_of_a_program_reach_asserts_as_what_they_are(sandbox: Sandbox) -> None:
    program = (
        "class Odd(KeyError): pass\n"
        "def f(x):\n    if x < 0: raise ValueError('below')\n    raise Odd(x)\n"
        "def count():\n    n = 0\n    while True:\n        yield n\n        n += 1\n"
        "def upto(n):\n    return (i for i in range(n))\n"
        "def stop(x): raise StopIteration\ndef false(): assert False\ndef text(): b'\\xff'.decode()\ndef all(x): return True"
    )
    tests = [
        "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'below'",
        "try:\n    f(1)\n    assert False\nexcept KeyError:\n    pass",
        "try:\n    text()\n    assert False\nexcept ValueError:\n    pass",
        "assert list(upto(3)) == [0, 1, 2]",
        "import itertools\nassert list(itertools.islice(count(), 3)) == [0, 1, 2]",
        "try:\n    f(1)\nexcept ValueError:\n    pass",
        "assert all(map(stop, [1, 2])) == True",
        "false()",
        "assert all(x > 0 for x in upto(3)) == True",
    ]
    verdicts = sandbox.judge(program, tests)
    assert verdicts[:5] == [""] * 5
    assert verdicts[5].startswith("the program raised Odd")
    assert verdicts[6].startswith("the program raised StopIteration")
    assert verdicts[7].startswith("the program raised AssertionError")
    assert verdicts[8] == "AssertionError"
