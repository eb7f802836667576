"""safetensors makes files that their owner alone may read; what a run leaves behind has the mode of its other files."""

from __future__ import annotations

from pathlib import Path


def give_usual_mode(*paths: Path) -> None:
    """Give files the mode that any new file in their folder has. It is looked up with a file: reading the umask would change it
    for the other threads meanwhile."""
    for path in paths:
        usual = path.with_name(f".{path.name}.mode")
        usual.touch()
        try:
            path.chmod(usual.stat().st_mode & 0o777)
        finally:
            usual.unlink()
