"""The sandbox's protections in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redline.errors import ConfigError

MEANING = {
    "namespaces": "programs see no processes, files or network but their own",
    "own_uid": "programs run under a user id of their own, which counts their processes",
    "seccomp": "no sockets, no reaching into other processes, no memory that no limit counts",
    "landlock": "no files but the system's libraries and the scratch folder",
}


def in_words(ground: Mapping[str, Any]) -> list[str]:
    """One line per protection."""
    missing: Mapping[str, str] = ground["missing"]
    lines = [f"a program could {gap}" for gap in gaps(ground)]
    lines.append("limits on time, memory, files, output: on")
    for name, meaning in MEANING.items():
        if name in missing:
            lines.append(f"{name}: off: {missing[name]}")
        elif name == "landlock" and ground["namespaces"]:
            continue  # what it would refuse is not there
        else:
            lines.append(f"{name}: on: {meaning}")
    return lines


def gaps(ground: Mapping[str, Any]) -> list[str]:
    """What a program could still do on this machine, in words; empty where all that is meant to be stopped is."""
    found = []
    if not ground["namespaces"] and not ground["landlock"]:
        found.append("read and write files that this user can")
    if not ground["namespaces"] and not ground["seccomp"]:
        found.append("use the network, and signal this user's processes")
    if not ground["seccomp"] and not ground["first_uid"] and ground["namespaces"] != "user":
        found.append("start processes without end until its time is over")
    if not ground["seccomp"]:
        found.append("use memory that no limit counts")
    return found


def check_required(ground: Mapping[str, Any], protection: str) -> None:
    """Refuse a machine that leaves gaps, where the recipe wants none."""
    if protection == "full" and (found := gaps(ground)):
        raise ConfigError(
            f"rollouts.environment.params.protection = full: on this machine a program could {'; '.join(found)}",
            "run where user namespaces, seccomp or Landlock are allowed, or set protection=auto",
        )
