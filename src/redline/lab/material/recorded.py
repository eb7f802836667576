"""The lengths of the attempts that a recorded run trained on, step by step, to train on or to sample again. Tokens are not
read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from redline.errors import RunFolderError
from redline.models.sizes.flops import TrainLoad
from redline.runs import Run
from redline.runs.stored import StoredRun


@dataclass(slots=True, frozen=True)
class RecordedStep:
    """The S attempts of the groups that one step was trained on."""

    indices: tuple[int, ...]
    """Indices of the groups; their tasks follow from them."""
    prompt_lengths: np.ndarray
    """int64[S]: tokens that the policy did not choose."""
    lengths: np.ndarray
    """int64[S], prompt included."""
    group_offsets: np.ndarray
    """int64[groups + 1]."""

    @property
    def new_tokens(self) -> np.ndarray:
        """int64[S]: tokens that the policy chose."""
        return self.lengths - self.prompt_lengths

    @property
    def load(self) -> TrainLoad:
        own = self.new_tokens
        return TrainLoad.of_families(own, self.prompt_lengths, self.prompt_lengths[self.group_offsets[:-1]], int(own.sum()))

    @property
    def shares_prompts(self) -> bool:
        """Whether the attempts of each group have prompts of one length: those of several turns, or roles, do not."""
        firsts = np.repeat(self.prompt_lengths[self.group_offsets[:-1]], np.diff(self.group_offsets))
        return bool((self.prompt_lengths == firsts).all())

    def of_group(self, index: int) -> np.ndarray:
        """Tokens that the policy chose in each attempt of that group."""
        place = self.indices.index(index)
        return self.new_tokens[self.group_offsets[place] : self.group_offsets[place + 1]]


def recorded_steps(run: Path) -> list[RecordedStep]:
    """Return every step of which all groups are still stored, in order. Raises `RunFolderError` where there is none."""
    if not Run.open(run).folder.trajectories.is_dir():
        raise RunFolderError(f"{run}: no trajectories to replay", "take a run with buffer.max_bytes above 0")
    stored = StoredRun(run)
    trained = sorted(
        (group for group in stored.groups() if group.state == "trained" and group.trained_version is not None),
        key=lambda group: (group.trained_version, group.index),
    )
    steps = []
    for _, members in groupby(stored.lengths(trained), key=lambda found: found[0].trained_version):
        found = list(members)
        if all(lengths is not None for _, lengths in found):
            steps.append(_step([(group.index, lengths) for group, lengths in found if lengths is not None]))
    if not steps:
        raise RunFolderError(f"{run}: no step of it can be replayed", "take a run that has trained and kept its trajectories")
    return steps


def _step(groups: Sequence[tuple[int, tuple[np.ndarray, np.ndarray]]]) -> RecordedStep:
    totals, chosen = ([lengths[part] for _, lengths in groups] for part in (0, 1))
    sizes = [len(lengths) for lengths in totals]
    whole = np.concatenate(totals)
    return RecordedStep(
        indices=tuple(index for index, _ in groups),
        prompt_lengths=whole - np.concatenate(chosen),
        lengths=whole,
        group_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
    )
