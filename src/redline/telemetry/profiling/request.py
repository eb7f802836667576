"""How a running job is asked to profile: a file in its folder, which it takes when the next step begins."""

from __future__ import annotations

import fcntl
import json
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from redline.config.sections.telemetry import ProfileKind
from redline.errors import RunFolderError
from redline.telemetry.files.durable import write_json
from redline.telemetry.files.run_folder import RunFolder

POLL_S = 0.2


@dataclass(slots=True, frozen=True)
class ProfileRequest:
    """Profile the next `steps` steps."""

    what: ProfileKind
    steps: int
    id: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def request_path(folder: RunFolder) -> Path:
    return folder.path / "profile-request.json"


def step_folder(folder: RunFolder, step: int) -> Path:
    return folder.profiles / f"step-{step:06d}"


def ask(folder: RunFolder, what: ProfileKind, steps: int) -> ProfileRequest:
    """Leave a request for the process that runs in the folder."""
    if not _is_running(folder):
        raise RunFolderError(
            f"{folder.path}: no run goes on in this folder",
            f"profile a new one: redline train RECIPE telemetry.profile={what} telemetry.profile.steps=[3]",
        )
    request = ProfileRequest(what, steps, uuid.uuid4().hex)
    write_json(request_path(folder), request.as_json())
    return request


def take(folder: RunFolder) -> ProfileRequest | None:
    """The request that lies there, if any; it is ours now. One that cannot be read is thrown away."""
    path = request_path(folder)
    if not path.exists():
        return None
    try:
        request = _parse(json.loads(path.read_text()))
    except (OSError, ValueError):
        request = None
    path.unlink(missing_ok=True)
    return request


def _parse(document: Any) -> ProfileRequest | None:
    if not isinstance(document, dict) or document.keys() != {"what", "steps", "id"}:
        return None
    is_sound = document["what"] in get_args(ProfileKind) and isinstance(document["steps"], int) and document["steps"] > 0
    return ProfileRequest(**document) if is_sound else None


def wait_for_summaries(folder: RunFolder, request: ProfileRequest) -> list[Path]:
    """The folders of the profiled steps, once the last is complete. Raises when the run ends first."""
    while True:
        done = _finished(folder, request)
        if len(done) >= request.steps:
            return done
        if not _is_running(folder):
            if done := _finished(folder, request):
                return done
            request_path(folder).unlink(missing_ok=True)
            raise RunFolderError(f"{folder.path}: the run ended before a step was profiled", "ask earlier, or for fewer steps")
        time.sleep(POLL_S)


def _finished(folder: RunFolder, request: ProfileRequest) -> list[Path]:
    asked = [path for path in folder.profiles.glob("step-*/request.json") if json.loads(path.read_text())["id"] == request.id]
    return sorted(path.parent for path in asked if (path.parent / "summary.json").exists())


def _is_running(folder: RunFolder) -> bool:
    """Somebody holds the lock. Looks without taking it away from a run that is about to begin."""
    try:
        with (folder.path / ".lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
