"""The program of a worker process: holds games that it made itself, and calls them as it is told.

             ◄──  {"value": "ready"}
    run      {"do": "load", "path": "my_game:Game", "folder": "/home/me"}                                     ──►
             ◄──  {"value": null}
    run      {"do": "make", "id": 7, "path": "my_game:Game", "folder": "/home/me", "keywords": {"seed": 0}}   ──►
             ◄──  {"value": null}
    run      {"do": "call", "id": 7, "name": "step", "arguments": ["up"]}                                     ──►
             ◄──  {"value": {"$reaction": ["a wall", 0.0, false]}}      or  {"error": {"reason", "where", "hint"}}
    run      {"do": "drop", "id": 7}  ·  {"do": "function", "path": "my_game:solve", "folder": …, "arguments": […]}

One call at a time. The process ends with its run: when its input ends, or its parent does, also in the middle of a call.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redline.child import die_with, take_stdout
from redline.environments.workers.plain import from_plain, to_plain
from redline.errors import RedlineError, TaskError, boundary, in_words


def main() -> None:
    """Answer until the input ends."""
    die_with(int(sys.argv[1]))
    reply = take_stdout()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_input, args=(lines,), name="input", daemon=True).start()
    objects: dict[int, Any] = {}
    reply({"value": "ready"})
    while True:
        reply(answer(json.loads(lines.get()), objects))


def answer(message: Mapping[str, Any], objects: dict[int, Any]) -> dict[str, Any]:
    """Do what a message asks, with the objects that earlier messages made. Returns the value, or the error in words."""
    with boundary() as caught:
        done = {"value": to_plain(_do(message, objects))}
    return {"error": _in_plain_words(caught.error)} if caught.error else done


def _do(message: Mapping[str, Any], objects: dict[int, Any]) -> Any:
    if message["do"] == "load":
        return load(message["path"], message["folder"])
    if message["do"] == "make":
        made = imported(message["path"], message["folder"])(**from_plain(message["keywords"]))
        objects[message["id"]] = made
        return None
    if message["do"] == "call":
        return getattr(objects[message["id"]], message["name"])(*from_plain(message["arguments"]))
    if message["do"] == "drop":
        return closed(objects.pop(message["id"], None))
    assert message["do"] == "function", message
    return imported(message["path"], message["folder"])(*from_plain(message["arguments"]))


def load(path: str, folder: str | None) -> None:
    """Import the module. Raises TaskError, with this machine's name, where this process does not find it."""
    name = path.partition(":")[0]
    try:
        imported(path, folder)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        there = "" if folder is None else f" in {folder}{'' if Path(folder).is_dir() else ', which is not there'}, or"
        raise TaskError(
            f"a worker process on {socket.gethostname()} finds no module {error.name!r}{there} among the installed packages",
            "on a cluster, put it into a folder that all nodes share, install it on every node, or submit the run with"
            " `ray job submit --working-dir`",
        ) from None


def imported(path: str, folder: str | None) -> Any:
    """What `package.module:Name` names; the folder's modules are found too, after the installed ones. Raises what the import
    raises."""
    if folder and folder not in sys.path:
        sys.path.append(folder)
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def closed(game: Any) -> None:
    """Call the game's `close`, where it has one."""
    close = getattr(game, "close", None)
    if callable(close):
        close()


def _in_plain_words(error: BaseException) -> dict[str, str]:
    from redline.telemetry.stalls.stacks import place_of, users_place  # takes longer to load than everything else here

    frames = traceback.extract_tb(error.__traceback__)
    where = users_place(frames) or ("" if isinstance(error, RedlineError) else place_of(frames))
    return {"reason": in_words(error), "where": where, "hint": error.hint if isinstance(error, RedlineError) else ""}


def _read_input(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # at once: the main thread may be in a call that never returns


if __name__ == "__main__":
    main()
