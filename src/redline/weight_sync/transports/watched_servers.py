"""Servers between two updates: one that is started again has the weights of its model, not those that it was sent.

engine                           servers
has an answer ──► are_there ────► do they still have the weights that they were left with?
                  yes             the answer was sampled from them: a server does not get them back by itself
                  no              the answer counts for nothing
                    restore ────► the current version once more, and a probe; then the engine asks again

An update brings weights back too, and `are_there` then says yes of answers that came before it. `num_losses` goes up right
after such an update, and the engine asks again what was under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from redline.errors import EngineLostError, ServerAwayError
from redline.telemetry import span
from redline.types import WeightSet
from redline.weight_sync.transports.http import PAUSE_S, HttpWeights

AtRest = Callable[[str], AbstractContextManager[WeightSet]]
"""Given who asks, the weights that the engines have, while the trainer does not write them."""


class WatchedServers:
    """Looks after the weights of servers. Implements `engine.adapters.openai_server.WeightsThere`."""

    def __init__(self, transport: HttpWeights, at_rest: AtRest) -> None:
        self._transport, self._at_rest = transport, at_rest

    @property
    def num_losses(self) -> int:
        """How often a server was given weights in place of others than it was left with."""
        return self._transport.num_losses

    def are_there(self) -> bool:
        """Whether every server says that it has the weights that it was left with. One that does not answer has not."""
        try:
            return self._transport.look()
        except ServerAwayError:
            return False

    def restore(self) -> None:
        """Bring every server back to the current version. Blocks until it has it: for as long as an update under way lasts, and
        for the transport's patience where a server is away. Raises WeightSyncError or EngineLostError where it does not come
        back, or not with this model."""
        deadline = time.monotonic() + self._transport.patience_s
        while True:
            try:
                with self._at_rest("a server that was started again") as weights, span("weight_sync.catch_up"):
                    self._transport.restore(weights)
                return
            except (ServerAwayError, EngineLostError):
                if time.monotonic() > deadline:
                    raise
            time.sleep(PAUSE_S)
