"""Versions of weights that an engine holds for itself."""

from __future__ import annotations

from redline.errors import EngineError
from redline.types import WeightUpdate


class PushedWeights:
    """New weights come in two steps: an engine's `update_weights` brings them, `apply` says which version they are."""

    def __init__(self) -> None:
        self.version = 0
        self._have_come = False

    def weights_have_come(self) -> None:
        self._have_come = True

    def apply(self, update: WeightUpdate) -> None:
        """Sample from this version from now on."""
        if update.changed and update.version != self.version and not self._have_come:
            raise EngineError(
                f"the weights of version {update.version} never came", "call update_weights before apply, as a weight sync does"
            )
        self._have_come = False
        self.version = update.version
