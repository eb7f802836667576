"""TRL in a process of its own, which keeps its model loaded and sleeps while the other side has its turn."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redline.child import Child, ChildError
from redline.errors import CompareError

PROGRAM = Path(__file__).with_name("trl_process.py")


class TrlSide:
    """Speaks with `trl_process.py`."""

    def __init__(
        self, python: Path | None, tasks: Sequence[Mapping[str, Any]], work: Mapping[str, Any], num_threads: int
    ) -> None:
        """Starts it and blocks until it is ready. `tasks` are {"prompt": messages, "answer": ...}, in the order of the
        steps; `work` is the rest of what the process needs to know."""
        self._scratch = tempfile.TemporaryDirectory(prefix="redline-trl-")
        file = Path(self._scratch.name) / "tasks.json"
        file.write_text(json.dumps(list(tasks)))
        self._child = Child(
            # -P: no module of that folder may stand in for one of the standard library.
            [str(python or sys.executable), "-P", str(PROGRAM), json.dumps({**work, "tasks": str(file)})],
            {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(num_threads)},
        )
        try:
            with _explained():
                self.version = str(self._child.read()["ready"])
        except CompareError:
            self.close()
            raise

    def step(self) -> dict[str, float]:
        """Blocks until it has taken a step; returns what it says of it."""
        with _explained():
            return self._child.ask("step")

    def close(self) -> None:
        self._child.close()
        self._scratch.cleanup()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ChildError as failed:
        raise CompareError(
            f"trl {failed}", "an environment that works: pip install torch trl==1.16.0 datasets accelerate"
        ) from None
