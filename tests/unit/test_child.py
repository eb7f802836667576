"""Children that answer with lines of JSON: their answers, their failures, and that none is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from redline.child import KILLED, LINES_SHOWN, Child, ChildError, only_answer

ECHO = """
    import os, sys
    from redline.child import take_stdout
    reply = take_stdout()
    print("loading …")
    reply({"pid": os.getpid(), "flag": os.environ.get("FLAG")})
    for line in sys.stdin:
        print("a library says something")
        reply({"said": line.strip()})
"""


def command(tmp_path: Path, text: str, *arguments: str) -> list[str]:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(text))
    return [sys.executable, str(program), *arguments]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_child_answers_each_line_and_ends_with_its_input(tmp_path: Path) -> None:
    with Child(command(tmp_path, ECHO), {"FLAG": "up"}) as child:
        ready = child.read()
        assert ready["flag"] == "up"
        assert [child.ask(word)["said"] for word in ("one", "two")] == ["one", "two"]
    assert not is_alive(ready["pid"])


def test_a_child_that_ends_shows_its_exit_code_and_its_last_lines(tmp_path: Path) -> None:
    many = "import sys\nfor number in range(40): print('line', number, file=sys.stderr)\nsys.exit(3)"
    with Child(command(tmp_path, many)) as child, pytest.raises(ChildError) as caught:
        child.read()
    assert caught.value.code == 3
    assert caught.value.lines == [f"line {number}" for number in range(40 - LINES_SHOWN, 40)]
    assert str(caught.value).startswith("ended with exit code 3:\nline 25\n")


def test_a_child_that_writes_without_end_keeps_the_newest_of_it(tmp_path: Path) -> None:
    wordy = """
        import os, sys
        from redline import child
        child.LOG_BYTES, child.KEPT_BYTES = 40_000, 1_000
        reply = child.take_stdout()
        sizes = []
        for number in range(3000):
            print(f"line {number}", file=sys.stderr, flush=True)
            print("x" * 100, file=sys.stderr, flush=True)
            child.bound_stderr()
            sizes.append(os.fstat(2).st_size)
        print("last words", file=sys.stderr, flush=True)
        reply({"largest": max(sizes)})
    """
    with Child(command(tmp_path, wordy)) as child:
        assert child.read()["largest"] < 41_000
        child.finish()
        lines = child.last_lines()
    assert lines[-1] == "last words"
    assert "line 2999" in lines


def test_a_child_that_is_gone_when_it_is_asked_says_why(tmp_path: Path) -> None:
    with Child(command(tmp_path, "import sys\nsys.exit('no model')")) as child:
        child._process.wait()
        with pytest.raises(ChildError, match="no model"):
            child.ask("anything")


def test_a_child_that_does_not_answer_in_time_is_killed(tmp_path: Path) -> None:
    slow = "import sys, time\nprint('thinking', file=sys.stderr, flush=True)\nprint('{}', flush=True)\ntime.sleep(600)"
    with Child(command(tmp_path, slow)) as child:
        child.read()
        with pytest.raises(ChildError) as caught:
            child.read(limit_s=1.0)
        assert caught.value.code is None
        assert str(caught.value) == "not done after 1 s:\nthinking"
        assert child._process.returncode == KILLED


def test_a_child_that_outlives_its_input_is_killed(tmp_path: Path) -> None:
    deaf = "import json, os, time\nprint(json.dumps({'pid': os.getpid()}), flush=True)\ntime.sleep(600)"
    started = time.monotonic()
    with Child(command(tmp_path, deaf), patience_s=0.2) as child:
        pid = child.read()["pid"]
    assert not is_alive(pid)
    assert time.monotonic() - started < 300


def test_an_only_answer_counts_if_the_child_ended_well(tmp_path: Path) -> None:
    once = "import json, sys\nprint(json.dumps({'seconds': 1.5}))\nsys.exit(int(sys.argv[1]))"
    assert only_answer(command(tmp_path, once, "0")) == {"seconds": 1.5}
    with pytest.raises(ChildError, match="exit code 4"):
        only_answer(command(tmp_path, once, "4"))


def test_an_answer_longer_than_a_pipe_arrives_whole(tmp_path: Path) -> None:
    long = "import json\nprint(json.dumps({'text': 'x' * 1_000_000}))"
    assert len(only_answer(command(tmp_path, long))["text"]) == 1_000_000


def test_a_child_that_writes_without_end_before_its_answer_fills_neither_disk_nor_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redline.child.LOOK_S", 0.01)
    wordy = """
        import os, sys, time
        from redline.child import take_stdout
        reply = take_stdout()
        largest = 0
        for number in range(400):
            os.write(2, b"x" * 99 + b"\\n" + b"y" * 99_900)
            largest = max(largest, os.fstat(2).st_size)
            time.sleep(0.002)
        print("\\nlast words", file=sys.stderr, flush=True)
        reply({"largest": largest})
        sys.exit(3)
    """
    with Child(command(tmp_path, wordy)) as child:
        assert child.read()["largest"] < 20 << 20  # of 40 MB
        with pytest.raises(ChildError) as caught:
            child.finish()
    assert caught.value.lines[-1] == "last words"
    assert len(str(caught.value)) < 100_000


def test_a_child_that_hangs_ends_soon_after_its_parent(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs.py"
    hangs.write_text(
        "import os, time\nfrom redline.child import end_soon_after\nend_soon_after(os.getppid(), 0.1)\n"
        "print(os.getpid(), flush=True)\ntime.sleep(600)"
    )
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, {str(hangs)!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        process.kill()
    until = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(pid)
