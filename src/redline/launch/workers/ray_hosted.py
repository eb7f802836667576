"""The program that a `ProcessHost` starts: runs a module as `python -m` would, and ends with the process that started it.

    python -m redline.launch.workers.ray_hosted PARENT MODULE ARGUMENTS…

Ray ends an actor with SIGKILL, and its processes with Ctrl-C blocked. What an actor started must neither outlive it nor be deaf
to signals.
"""

from __future__ import annotations

import runpy
import signal
import sys

from redline.child import die_with

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Run the module that the arguments name."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    die_with(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stop in STOPS[1:]:
        signal.signal(stop, signal.SIG_DFL)
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
