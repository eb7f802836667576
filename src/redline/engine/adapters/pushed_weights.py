"""Versions of weights that an engine holds for itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from redline.engine.adapters.stepped import SteppedAdapter
from redline.errors import EngineError
from redline.types import WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor


class PushedWeights(SteppedAdapter):
    """New weights come in two steps: an engine's `update_weights` brings them, `apply` says which version they are."""

    _have_come = False

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors by their Hugging Face names; no prompt computed with the old ones is found again. For the thread that
        has the engine between two steps. Calls `weights_have_come` once all are loaded."""

    def weights_have_come(self) -> None:
        """Let `apply` give the weights their version."""
        self._have_come = True

    def apply(self, update: WeightUpdate) -> None:
        """Sample from this version from now on. Raises EngineError where its weights never came."""
        if update.changed and update.version != self.version and not self._have_come:
            raise EngineError(
                f"the weights of version {update.version} never came", "call update_weights before apply, as a weight sync does"
            )
        self._have_come = False
        super().apply(update)
