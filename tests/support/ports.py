"""Ports for those who cannot be given a socket."""

from __future__ import annotations

import random
import socket

BELOW_THE_SYSTEMS = range(20_000, 32_000)
"""The system hands out none of these by itself: what is free now is not taken by the next connection of another test."""


def free_port() -> int:
    """A port of this machine at which nobody listens."""
    while True:
        port = random.SystemRandom().choice(BELOW_THE_SYSTEMS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
