"""The second set of an engine of others in a process of its own: beside it lies a copy of the trainer's tensors, in two sets.
New bytes are exchanged into the first, and the engine loads from there by its own names, while it stands still.

    begin ──► buckets fill the second set ──► adopt: exchange ──► load ──► check
                                                        └── where one fails: exchange back ──► load the old version again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from redline.errors import TornWeightsError, in_words
from redline.weight_sync.second_set import SecondSet, Take


class LoadingSet(SecondSet):
    """Implements `receiver.ReceivedSet`."""

    def __init__(self, copy: Mapping[str, Tensor], load: Callable[[], None], version: int = 0) -> None:
        """`copy` are tensors of the trainer's names and forms, with the values of `version`. `load` has the engine load them
        all; called by the thread that has the engine between two steps."""
        super().__init__(copy, version)
        self._load = load

    def adopt(self, take: Take, check: Callable[[], None] = lambda: None) -> None:
        super().adopt(self._loading(take, goes_back=False), check)

    def revert(self, version: int, take: Take) -> None:
        super().revert(version, self._loading(take, goes_back=True))

    def _loading(self, take: Take, *, goes_back: bool) -> Take:
        def load_and_take(version: int, names: tuple[str, ...], nbytes: int) -> None:
            nonlocal goes_back
            is_before, goes_back = goes_back, True  # what follows a new version that failed is the one before
            try:
                self._load()
            except BaseException as error:
                if not is_before:
                    raise
                why = f"the engine cannot load the version before again: {in_words(error)}"
                raise TornWeightsError(why, "start the engine again") from error
            take(version, names, nbytes)

        return load_and_take
