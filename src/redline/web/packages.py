"""What only the dashboard needs; a report needs none of it."""

from __future__ import annotations

import importlib.util

from redline.config.installation import how_to_install
from redline.errors import ConfigError

PACKAGES = ("starlette", "uvicorn")


def refuse_missing_packages() -> None:
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"redline dash needs {' and '.join(missing)}", how_to_install("serve"))
