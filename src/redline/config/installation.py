"""Optional packages of the redline that is running: which are missing, and how to add them. An extra of the package index is no
help in a checkout."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "redline-rl"
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


@cache
def how_to_install(extra: str) -> str:
    """The command that adds the packages of an extra to this installation."""
    if (project := _project_file()).is_file():
        return f"{_pip_install()} -e '{project.parent}[{extra}]'"
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


def missing_packages(extra: str) -> tuple[str, ...]:
    """Packages that an extra names and that are not installed. What those need in turn is pip's affair."""
    names = [found.group() for line in _requirements(extra) if (found := _NAME.match(line))]
    return tuple(name for name in names if name != DISTRIBUTION and not _is_installed(name))


def _requirements(extra: str) -> Sequence[str]:
    """In a checkout the installer's notes may be older than the code."""
    if (project := _project_file()).is_file():
        extras: dict[str, list[str]] = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
        return extras.get(extra, [])
    return [line for line in importlib.metadata.requires(DISTRIBUTION) or () if extra in _EXTRA.findall(line)]


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _project_file() -> Path:
    """It is there where the code that runs lies in a checkout."""
    return Path(__file__).resolve().parents[3] / "pyproject.toml"


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
