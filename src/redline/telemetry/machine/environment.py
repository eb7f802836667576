"""What a run's numbers depend on besides its recipe. Says nothing about who ran it: no host, no user, no home folder."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import redline
from redline.config.processor import bfloat16_flags
from redline.config.user_cache import user_home

PACKAGES = ("torch", "transformers", "numpy", "pyarrow", "safetensors")


def describe_environment() -> dict[str, Any]:
    """A JSON document. Asks the package metadata for versions, so it imports none of the packages."""
    return {
        "redline": redline.__version__,
        "source": _source(Path(redline.__file__).parents[2]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "packages": {name: _version(name) for name in PACKAGES},
        "command": [Path(sys.argv[0]).name, *(_without_home(argument) for argument in sys.argv[1:])],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _source(root: Path) -> dict[str, Any] | None:
    """Commit and state of the source tree; None for an installed package. A tree that travels without its git folder is named
    by `REDLINE_COMMIT`."""
    if not (root / ".git").exists():  # git itself would go on and find whatever repository a virtual environment lies in
        stated = os.environ.get("REDLINE_COMMIT")
        return {"commit": stated, "dirty": None} if stated else None
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    changes = _output(["git", "-C", str(root), "--no-optional-locks", "status", "--porcelain", "--", "src"])
    return {"commit": commit, "dirty": bool(changes)} if commit and changes is not None else None


def _cpu() -> dict[str, Any]:
    facts: dict[str, str] = {}
    if Path("/proc/cpuinfo").exists():
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    return {
        "model": facts.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "flags": bfloat16_flags(),
    }


def _gpus() -> list[dict[str, str]]:
    fields = ("name", "memory.total", "driver_version")
    listing = _output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]) or ""
    return [dict(zip(("name", "memory", "driver"), line.split(", "), strict=False)) for line in listing.splitlines()]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(command: Sequence[str]) -> str | None:
    """What the command prints, or None where it is missing, fails or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _without_home(argument: str) -> str:
    """`key=/home/someone/data` → `key=~/data`."""
    home = user_home()
    own = argument if home in (None, Path("/")) else argument.replace(str(home), "~")
    return re.sub(r"(^|[=:,])(?:/home/[^/]+|/Users/[^/]+|/root)(?=/|$)", r"\1~", own)
