"""Alerts to a URL, from a thread beside the run: a server that is down cannot hold it up."""

from __future__ import annotations

import json
import os
import queue
import threading
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from redline.errors import ConfigError, boundary

MAX_QUEUED = 100


class Webhook:
    """Posts each alert as JSON. The first failure is told; the run goes on, and so do the posts."""

    def __init__(self, url: str, timeout_s: float, tell: Callable[[str], None]) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._tell = tell
        self._told = False
        self._rows: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MAX_QUEUED)
        """None is the last."""
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
        self._thread.start()

    def post(self, row: Mapping[str, Any]) -> None:
        """Does not wait; while a hundred others are queued, the alert is in the run folder only."""
        with boundary():
            self._rows.put_nowait(row)

    def close(self) -> None:
        """Wait for the last posts, for no longer than one may take."""
        with boundary():
            self._rows.put(None, timeout=self._timeout_s)
        self._thread.join(self._timeout_s)

    def _work(self) -> None:
        while (row := self._rows.get()) is not None:
            with boundary() as caught:
                self._send(row)
            if caught.error is not None and not self._told:
                self._told = True
                self._tell(f"telemetry.alert_webhook: {type(caught.error).__name__}: {caught.error}; alerts.jsonl has them all")

    def _send(self, row: Mapping[str, Any]) -> None:
        request = urllib.request.Request(
            self._url, data=json.dumps(row).encode(), headers={"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
            answer.read()


def webhook_url(setting: str) -> str:
    """`env:NAME` → what the variable holds."""
    if not setting.startswith("env:"):
        return setting
    name = setting.removeprefix("env:")
    url = os.environ.get(name, "")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"telemetry.alert_webhook = {setting!r}: the environment variable {name} holds no URL",
            f"export {name}=https://…, or leave the webhook out",
        )
    return url
