"""How to add an optional package to the redline that is running: an extra of the package index is no help in a checkout."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "redline-rl"


@cache
def how_to_install(extra: str) -> str:
    """The command that adds the packages of an extra to this installation."""
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file():  # the code that runs lies in a checkout
        return f"{_pip_install()} -e '{checkout}[{extra}]'"
    return f"{_pip_install()} '{requirement(extra, _direct_url())}'"


def requirement(extra: str, direct_url: dict[str, Any] | None) -> str:
    """What pip must be given. `direct_url` is the installer's note of where the package came from (PEP 610); None means a
    package index."""
    if direct_url is None:
        return f"{DISTRIBUTION}[{extra}]"
    url, vcs = direct_url["url"], direct_url.get("vcs_info")
    if vcs:
        return f"{DISTRIBUTION}[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    if url.startswith("file:"):
        return f"{unquote(urlsplit(url).path)}[{extra}]"
    return f"{DISTRIBUTION}[{extra}] @ {url}"


def _direct_url() -> dict[str, Any] | None:
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    return json.loads(text) if text else None


def _pip_install() -> str:
    """With the pip of this interpreter, which need not be the one that the shell finds."""
    here, found = Path(sys.executable), shutil.which("pip")
    if found and Path(found).parent == here.parent:
        return "pip install"
    has_pip = Path(sysconfig.get_path("purelib"), "pip").is_dir()
    return f"{here} -m pip install" if has_pip else f"uv pip install --python {here}"
