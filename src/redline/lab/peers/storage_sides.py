"""Ways to keep trajectories on disk until the trainer wants them. All get the same groups and give the same tokens back."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from redline.buffer.packing import pack
from redline.buffer.store.stored_groups import pack_stored
from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.lab.bench.settings import SerializeSettings
from redline.lab.material.train_batches import long_tailed_lengths
from redline.lab.peers import tensordicts
from redline.lab.peers.contest import OURS
from redline.types import FinishReason, TrainBatch, Trajectory, TrajectoryGroup, VersionSpan

ONE_BY_ONE = f"{OURS}, group by group"
POOL = 128
"""Groups that are made; stored again and again under other numbers they cost no time and little memory."""
VOCABULARY = 151_936
CHARACTERS_PER_TOKEN = 4

Step = Sequence[TrajectoryGroup]


class StorageSide(Protocol):
    def write(self, folder: Path, steps: Iterable[Step]) -> list[float]:
        """Seconds of each step, and of what comes after the last."""
        ...

    def batches(self, folder: Path) -> Iterator[TrainBatch]:
        """All steps, the first one first."""
        ...

    def last_batch(self, folder: Path) -> TrainBatch:
        """The one that was not trained on yet, by a process that has just begun."""
        ...


# ── what is stored ─────────────────────────────────────────────────────────────────────────────────────────────────────


def make_pool(settings: SerializeSettings) -> list[TrajectoryGroup]:
    count = POOL * settings.group_size
    lengths = long_tailed_lengths(count, count * settings.tokens, settings.prompt_tokens + 1, settings.longest, settings.seed)
    random = np.random.default_rng(settings.seed)
    letters = "".join(map(chr, random.integers(97, 123, settings.longest * CHARACTERS_PER_TOKEN)))
    attempts = [_attempt(int(length), settings.prompt_tokens, letters, random) for length in lengths]
    size = settings.group_size
    groups = [attempts[start : start + size] for start in range(0, count, size)]
    return [
        TrajectoryGroup(f"sums/{i}", members, random.standard_normal(size, dtype=np.float32))
        for i, members in enumerate(groups)
    ]


def _attempt(length: int, prompt_tokens: int, letters: str, random: np.random.Generator) -> Trajectory:
    loss_mask = np.arange(length) >= prompt_tokens
    return Trajectory(
        token_ids=random.integers(0, VOCABULARY, length, dtype=np.int32),
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask, -random.random(length, dtype=np.float32), np.float32(0)),
        versions=VersionSpan(0, 0),
        finish_reason=FinishReason.STOP,
        text=letters[: (length - prompt_tokens) * CHARACTERS_PER_TOKEN],
        reward=float(random.random()),
        reward_parts={"correct": 1.0, "format": 0.5},
    )


def make_steps(pool: Sequence[TrajectoryGroup], num_steps: int, groups_per_step: int) -> Iterator[Step]:
    for step in range(num_steps):
        indices = range(step * groups_per_step, (step + 1) * groups_per_step)
        yield [replace(pool[index % len(pool)], index=index) for index in indices]


def least_bytes(group: TrajectoryGroup) -> int:
    """Uncompressed and without any structure: 4 bytes for a token, 4 for the logprob of one that was chosen, the text."""
    return sum(4 * len(t.token_ids) + 4 * t.num_completion_tokens + len(t.text) for t in group.trajectories)


# ── ours ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


class StoreSide:
    """The trajectory store: all groups of a step at once, as in lockstep, or each by itself, as beside the trainer."""

    def __init__(self, groups_per_step: int, *, at_once: bool) -> None:
        self._groups_per_step, self._at_once = groups_per_step, at_once

    def write(self, folder: Path, steps: Iterable[Step]) -> list[float]:
        store, seconds = TrajectoryStore(folder), []
        for version, groups in enumerate(steps):
            started = time.perf_counter()
            store.begin([group.index for group in groups], version)
            for some in [groups] if self._at_once else [[group] for group in groups]:
                store.add(*some)
            seconds.append(time.perf_counter() - started)
            if version:  # by now the step before would have been trained on
                before = range((version - 1) * self._groups_per_step, version * self._groups_per_step)
                store.lease(before, version)
                store.trained(before, version)
        started = time.perf_counter()
        store.close()
        return [*seconds, time.perf_counter() - started]

    def batches(self, folder: Path) -> Iterator[TrainBatch]:
        store = TrajectoryStore(folder)
        for first in range(0, store.next_index, self._groups_per_step):
            yield pack_stored(store.read(range(first, first + self._groups_per_step)), 0, keep_no_signal=True)
        store.close()

    def last_batch(self, folder: Path) -> TrainBatch:
        store = TrajectoryStore(folder)
        batch = pack_stored(store.read([info.index for info in store.ready()]), 0, keep_no_signal=True)
        store.close()
        return batch


# ── one file per step ──────────────────────────────────────────────────────────────────────────────────────────────────


class FilePerStep:
    """What the others have in common."""

    def save(self, path: Path, groups: Step) -> None:
        raise NotImplementedError

    def load(self, path: Path) -> TrainBatch:
        raise NotImplementedError

    def write(self, folder: Path, steps: Iterable[Step]) -> list[float]:
        folder.mkdir(parents=True, exist_ok=True)
        seconds = []
        for number, groups in enumerate(steps):
            started = time.perf_counter()
            self.save(folder / f"step-{number:06d}", groups)
            seconds.append(time.perf_counter() - started)
        return [*seconds, 0.0]

    def batches(self, folder: Path) -> Iterator[TrainBatch]:
        for path in sorted(folder.iterdir()):
            yield self.load(path)

    def last_batch(self, folder: Path) -> TrainBatch:
        return self.load(max(folder.iterdir()))


class PickleSide(FilePerStep):
    """A list of dicts with arrays in them."""

    def save(self, path: Path, groups: Step) -> None:
        with path.open("wb") as file:
            pickle.dump(rows_of(groups), file, protocol=pickle.HIGHEST_PROTOCOL)

    def load(self, path: Path) -> TrainBatch:
        with path.open("rb") as file:
            return batch_of_rows(pickle.load(file))


class PaddedSide(FilePerStep):
    """Tensors as wide as the longest attempt of the step, with torch.save."""

    def save(self, path: Path, groups: Step) -> None:
        torch.save(padded(groups) | {"others": others(groups)}, path)

    def load(self, path: Path) -> TrainBatch:
        return from_padded(torch.load(path, weights_only=True))


class SafetensorsSide(FilePerStep):
    """The same tensors in a safetensors file, with all else as JSON in its head."""

    def save(self, path: Path, groups: Step) -> None:
        from safetensors.torch import save_file

        save_file(padded(groups), path, {"others": json.dumps(others(groups))})

    def load(self, path: Path) -> TrainBatch:
        from safetensors.torch import load_file

        return from_padded(load_file(path))


class TensorDictSide(FilePerStep):
    """The same tensors in a TensorDict: a memory-mapped file each, or consolidated into one."""

    def __init__(self, *, consolidated: bool) -> None:
        self._consolidated = consolidated

    def save(self, path: Path, groups: Step) -> None:
        tensordicts.save(path, padded(groups), json.dumps(others(groups)), consolidated=self._consolidated)

    def load(self, path: Path) -> TrainBatch:
        return from_padded(tensordicts.load(path, consolidated=self._consolidated))


def make_side(name: str, settings: SerializeSettings) -> StorageSide:
    if name in (OURS, ONE_BY_ONE):
        return StoreSide(settings.groups_per_step, at_once=name == OURS)
    return make_file_side(name)


def make_file_side(name: str) -> FilePerStep:
    if name == "pickle":
        return PickleSide()
    if name == "padded":
        return PaddedSide()
    if name == "safetensors":
        return SafetensorsSide()
    if name in ("tensordict", "consolidated"):
        return TensorDictSide(consolidated=name == "consolidated")
    raise AssertionError(name)


# ── conversions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def rows_of(groups: Step) -> list[dict[str, Any]]:
    """One dict per attempt."""
    return [_as_dict(group, i) for group in groups for i in range(len(group.trajectories))]


def batch_of_rows(rows: Sequence[Mapping[str, Any]]) -> TrainBatch:
    by_group: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_group.setdefault(row["group"], []).append(row)
    return pack([_from_dicts(members) for members in by_group.values()], 0, keep_no_signal=True)


def _as_dict(group: TrajectoryGroup, attempt: int) -> dict[str, Any]:
    t = group.trajectories[attempt]
    return {
        "group": group.index,
        "attempt": attempt,
        "token_ids": t.token_ids,
        "loss_mask": t.loss_mask,
        "logprobs": t.logprobs,
        "advantage": float(group.advantages[attempt]),
        **_scalars(group, t),
    }


def _scalars(group: TrajectoryGroup, t: Trajectory) -> dict[str, Any]:
    return {
        "task_id": group.task_id,
        "reward": t.reward,
        "reward_parts": dict(t.reward_parts),
        "finish_reason": str(t.finish_reason),
        "versions": (t.versions.oldest, t.versions.newest),
        "text": t.text,
    }


def others(groups: Step) -> list[dict[str, Any]]:
    return [_scalars(group, t) for group in groups for t in group.trajectories]


def _from_dicts(rows: Sequence[Mapping[str, Any]]) -> TrajectoryGroup:
    attempts = [
        Trajectory(
            token_ids=row["token_ids"],
            loss_mask=row["loss_mask"],
            logprobs=row["logprobs"],
            versions=VersionSpan(*row["versions"]),
            finish_reason=FinishReason(row["finish_reason"]),
            text=row["text"],
            reward=row["reward"],
            reward_parts=row["reward_parts"],
        )
        for row in rows
    ]
    return TrajectoryGroup(rows[0]["task_id"], attempts, np.array([row["advantage"] for row in rows], dtype=np.float32))


def padded(groups: Step) -> dict[str, torch.Tensor]:
    attempts = [t for group in groups for t in group.trajectories]
    lengths = np.array([len(t.token_ids) for t in attempts])
    shape = (len(attempts), int(lengths.max()))
    tokens, mask, logprobs = (np.zeros(shape, dtype=dtype) for dtype in (np.int32, np.bool_, np.float32))
    for i, t in enumerate(attempts):
        tokens[i, : lengths[i]], mask[i, : lengths[i]], logprobs[i, : lengths[i]] = t.token_ids, t.loss_mask, t.logprobs
    arrays = {
        "tokens": tokens,
        "loss_mask": mask,
        "logprobs": logprobs,
        "lengths": lengths,
        "advantages": np.concatenate([group.advantages for group in groups]),
        "sizes": np.array([len(group.trajectories) for group in groups]),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def from_padded(tensors: Any) -> TrainBatch:
    tokens, mask, logprobs, lengths, advantages, sizes = (
        tensors[name].numpy() for name in ("tokens", "loss_mask", "logprobs", "lengths", "advantages", "sizes")
    )
    real = np.arange(tokens.shape[1]) < lengths[:, None]
    return TrainBatch(
        tokens=tokens[real],
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        group_offsets=np.concatenate([[0], np.cumsum(sizes)]),
        loss_mask=mask[real],
        old_logprobs=logprobs[real],
        advantages=advantages,
        group_sequences=sizes,
        group_tokens=np.add.reduceat(mask.sum(axis=1), np.cumsum(sizes) - sizes),
        versions=VersionSpan(0, 0),
        version=0,
    )
