"""What the sinks share: a row becomes numbers, and a resumed run tells no step twice."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redline.config.schema import Config
from redline.errors import ConfigError
from redline.telemetry.files.durable import write_json
from redline.telemetry.files.run_folder import RunFolder

CONNECT_S = 5.0


class Sink:
    """A `StepListener` whose library keeps a history by step. Says each step once: a run that is resumed goes back to its last
    checkpoint and takes some steps again, which the run folder replaces and a sink has already."""

    name: str

    def started(self, folder: RunFolder, config: Config) -> None:
        folder.sinks.mkdir(exist_ok=True)
        self.memory = Memory(folder.sinks / f"{self.name}.json")
        self.open(folder, config)

    def step(self, row: Mapping[str, Any]) -> None:
        if self.memory.is_new("step", row["step"]):
            self.write(row["step"], numbers(row))

    def evaluation(self, row: Mapping[str, Any]) -> None:
        if self.memory.is_new("evaluation", row["step"]):
            self.write(row["step"], numbers(row))
            self.write_samples(row["step"], row.get("evaluation/samples", []))

    def alert(self, row: Mapping[str, Any]) -> None:
        """Nothing, where the library has no place for it."""

    def open(self, folder: RunFolder, config: Config) -> None:
        """Get ready, or raise a `ConfigError` with the fix."""
        raise NotImplementedError

    def write(self, step: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Held-out questions and answers; nothing, where the library has no place for them."""

    def close(self) -> None:
        raise NotImplementedError


class Memory:
    """What a sink has been told, in a file of the run folder that outlives the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def is_new(self, kind: str, step: int) -> bool:
        """True the first time. Noted before the row is sent: what a kill cuts short is then missing, not there twice."""
        if step <= self._known.get(kind, -1):
            return False
        self.keep(kind, step)
        return True

    def get(self, key: str) -> Any:
        return self._known.get(key)

    def keep(self, key: str, value: Any) -> None:
        self._known[key] = value
        write_json(self._path, self._known)


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row, without its step. Truth values count as 0 and 1."""
    return {
        key: value for key, value in row.items() if key != "step" and isinstance(value, (int, float)) and math.isfinite(value)
    }


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"run": {"seed": 0}}` as `{"run.seed": 0}`."""
    result: dict[str, Any] = {}
    for key, value in document.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return result


def check_reachable(key: str, url: str) -> None:
    """Refuse an address where nothing listens, without the minutes of retries that client libraries allow themselves."""
    if error := connection_error(url):
        raise ConfigError(
            f"{key} = {url!r}: cannot connect: {error}", f"start what should listen there, or correct {key}"
        ) from error


def connection_error(url: str) -> Exception | None:
    """Why nothing can be reached there; None where a server listens."""
    parts = urlsplit(url)
    try:
        address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection(address, timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:  # ValueError: a port that is no number
        return error
    return None
