"""The checkpoint of ranks that divide the weights: each writes its part. The threads that write agree through the store, while
the next steps are taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from redline.errors import RankLostError, RunFolderError
from redline.trainer.checkpoints.folder import file_name, make_scratch, scratch_of
from redline.trainer.checkpoints.parts import WholeCheckpoint
from redline.trainer.parallel.pulse import HINT, Pulse

LOOK_S = 0.02
AFTER_LOSS_S = 15.0
"""How long the first rank waits for parts that are still being written once a rank is lost that has written its own."""
WRITTEN, FAILED = "written ", "failed "
BEGIN, SKIP = 1.0, 0.0
WHY_ALL = "and with trainer.sharding or trainer.pipeline_parallel_size every rank writes its part of a checkpoint there"
ALL_MUST_SEE = "put run.folder on a file system that all machines have, or leave the two out"


class RankCheckpoint(WholeCheckpoint):
    """This rank's part of a checkpoint. Ranks of a second group that holds the same weights write none."""

    def __init__(
        self,
        store: dist.Store,
        pulse: Pulse,
        part: int,
        parts: int,
        rank: int,
        max_of: Callable[[Tensor], Tensor],
    ) -> None:
        """`store` is a connection of its own, for the thread that writes. `max_of` gives every rank the largest of each number
        that the ranks have."""
        self._store, self._pulse, self._rank, self._max_of = store, pulse, rank, max_of
        self.part, self.parts = part, parts

    def begin(self, folder: Path) -> bool:
        """Block until all ranks have called it, and agree. Raises `RunFolderError`, on every rank, where one does not see the
        run folder."""
        problem = self._make_scratch(folder) if self._rank == 0 else ""
        wanted = BEGIN if self._rank == 0 and not folder.exists() and not problem else SKIP
        begins = float(self._max_of(torch.tensor([wanted]))) == BEGIN
        if problem:
            raise RunFolderError(f"{folder}: the checkpoint could not be written: {problem}", "make room on the disk")
        if not begins:
            return False
        writes = self._rank < self.parts
        is_blind = writes and not scratch_of(folder).is_dir()
        blind = int(self._max_of(torch.tensor([float(self._rank if is_blind else -1)])))
        if blind >= 0:
            raise RunFolderError(f"{folder}: rank {blind} of the trainer does not see this folder, {WHY_ALL}", ALL_MUST_SEE)
        return writes

    def _make_scratch(self, folder: Path) -> str:
        """Returns what went wrong."""
        try:
            if not folder.exists():
                make_scratch(folder)
        except OSError as error:
            return str(error)
        return ""

    def prepare(self, folder: Path) -> None:
        pass

    def finish(self, folder: Path, digest: str) -> Mapping[str, str] | None:
        self._say(folder, WRITTEN + digest)
        if self._rank:
            return None
        return {file_name(part, self.parts): self._await(folder, part) for part in range(self.parts)}

    def fail(self, folder: Path, why: str) -> bool:
        self._say(folder, FAILED + why)
        return self._rank == 0

    def _say(self, folder: Path, what: str) -> None:
        self._store.set(_key(folder, self.part), what)

    def _await(self, folder: Path, part: int) -> str:
        """Block until a part is written, and return its digest."""
        key, lost_at = _key(folder, part), None
        while not self._store.check([key]):
            if self._pulse.lost:
                lost_at = lost_at or time.monotonic()
                if part == self._pulse.lost_rank or time.monotonic() - lost_at > AFTER_LOSS_S:
                    raise RankLostError(self._pulse.lost, HINT)
            time.sleep(LOOK_S)
        said = self._store.get(key).decode()
        self._store.delete_key(key)
        if said.startswith(FAILED):
            raise RunFolderError(
                f"{folder}: rank {part} of the trainer could not write its part of the checkpoint: {said.removeprefix(FAILED)}",
                "make room there, on the disk or in memory, then resume from the one before",
            )
        return said.removeprefix(WRITTEN)


def _key(folder: Path, part: int) -> str:
    return f"checkpoint/{folder.name}/{part}"
