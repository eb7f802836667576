"""TRL in a process of its own, which keeps its model loaded and sleeps while the other side has its turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redline.errors import CompareError

PROGRAM = Path(__file__).with_name("trl_process.py")
PATIENCE_S = 30
"""For the process to end once it was told to."""
LINES_SHOWN = 15


class TrlSide:
    def __init__(
        self, python: Path | None, tasks: Sequence[Mapping[str, Any]], work: Mapping[str, Any], num_threads: int
    ) -> None:
        """`tasks` are {"prompt": messages, "answer": ...}, in the order of the steps; `work` is the rest of what the process
        needs to know."""
        self._scratch = tempfile.TemporaryDirectory(prefix="redline-trl-")
        file = Path(self._scratch.name) / "tasks.json"
        file.write_text(json.dumps(list(tasks)))
        self._log = (Path(self._scratch.name) / "log").open("w+")
        self._process = subprocess.Popen(
            # -P: this folder's `statistics` must not stand in for the standard library's.
            [str(python or sys.executable), "-P", str(PROGRAM), json.dumps({**work, "tasks": str(file)})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "OMP_NUM_THREADS": str(num_threads),
            },
        )
        self.version = str(self._read()["ready"])

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        try:
            print("step", file=self._process.stdin, flush=True)
        except BrokenPipeError:
            self._fail()
        return self._read()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._scratch.cleanup()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        return json.loads(line)

    def _fail(self) -> None:
        code = self._process.wait()
        self._log.seek(0)
        said = "\n".join(self._log.read().splitlines()[-LINES_SHOWN:])
        raise CompareError(
            f"trl ended with exit code {code}:\n{said}",
            "an environment that works: pip install torch trl==1.16.0 datasets accelerate",
        )
