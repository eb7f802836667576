"""A short run of a recipe, in a process of its own, that is looked at afterwards. Ends with the process that started it.

python -m redline.lab.tune.record_process '{"recipe": PATH, "overrides": [...]}'  →  {"run": FOLDER}
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from redline.child import take_stdout
from redline.config import load_recipe, resolve
from redline.errors import RedlineError
from redline.launch.checked_run import CheckedRun
from redline.launch.preflight import check
from redline.launch.start import train


def main() -> None:
    reply, task = take_stdout(), json.loads(sys.argv[1])
    threading.Thread(target=_end_with_the_parent, name="parent", daemon=True).start()
    try:
        resolved = resolve(load_recipe(Path(task["recipe"]), task["overrides"]))
        # Keys that a run of a few steps without evaluation has no use for are no mistake here.
        checked = check(resolved.config)
        summary = train(CheckedRun(resolved, checked.placement, checked.tasks, None, resolved.config.run.folder))
    except RedlineError as error:
        sys.exit(f"error: {error.message}")
    reply({"run": str(summary["run"])})


def _end_with_the_parent() -> None:
    """Block until nobody holds the other end of our input any more, then end at once: what was recorded is of no use."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
