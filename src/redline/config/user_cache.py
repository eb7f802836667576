"""The user's folder for what can be made again: models that were converted, compiled C, measured machines."""

from __future__ import annotations

import os
from pathlib import Path

from redline.errors import ConfigError


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/redline`, by default `~/.cache/redline`. A relative `XDG_CACHE_HOME` does not count, as its
    specification has it: it would be another folder in every working directory. Raises ConfigError without a home."""
    named = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "."))
    if named.is_absolute():
        return named / "redline"
    home = user_home()
    if home is None:
        raise ConfigError(
            "this user has no home folder to keep models in", "set XDG_CACHE_HOME to the absolute path of a folder"
        )
    return home / ".cache" / "redline"


def user_home() -> Path | None:
    """None where neither HOME nor the system's list of users names one, as in a container under a number of its own."""
    try:
        return Path.home()
    except RuntimeError:
        return None
