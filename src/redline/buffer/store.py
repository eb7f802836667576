"""Groups on disk as Arrow files: one per step, one row per attempt. pyarrow, pandas, DuckDB and `datasets` open them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from redline.types import TrajectoryGroup

SCHEMA = pa.schema(
    [
        ("version", pa.int64()),
        ("group", pa.int32()),
        ("attempt", pa.int32()),
        ("task_id", pa.string()),
        ("token_ids", pa.large_list(pa.int32())),
        ("loss_mask", pa.large_list(pa.bool_())),
        ("logprobs", pa.large_list(pa.float32())),
        ("advantage", pa.float32()),
        ("reward", pa.float32()),
        ("reward_parts", pa.map_(pa.string(), pa.float32())),
        ("finish_reason", pa.string()),
        ("oldest_version", pa.int64()),
        ("newest_version", pa.int64()),
        ("text", pa.string()),
        ("failure", pa.string()),
    ]
)


class TrajectoryStore:
    """The `trajectories/` folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, version: int) -> Path:
        return self.folder / f"step-{version:06d}.arrow"

    def write(self, version: int, groups: Sequence[TrajectoryGroup]) -> None:
        """The groups that the batch of `version` was made from. A file is whole or absent."""
        scratch = self.folder / f".step-{version:06d}.partial"
        table = _table(version, groups)
        with pa.OSFile(str(scratch), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            writer.write_table(table)
        scratch.rename(self.path(version))

    def rewind(self, version: int) -> None:
        """Forget the steps from `version` on: a resumed run makes them again."""
        for path in self.folder.glob("step-*.arrow"):
            if int(path.stem.removeprefix("step-")) >= version:
                path.unlink()


def _table(version: int, groups: Sequence[TrajectoryGroup]) -> pa.Table:
    rows = [(g, a, group, t) for g, group in enumerate(groups) for a, t in enumerate(group.trajectories)]
    attempts = [t for *_, t in rows]
    columns = {
        "version": [version] * len(rows),
        "group": [g for g, *_ in rows],
        "attempt": [a for _, a, *_ in rows],
        "task_id": [group.task_id for _, _, group, _ in rows],
        "token_ids": [t.token_ids for t in attempts],
        "loss_mask": [t.loss_mask for t in attempts],
        "logprobs": [t.logprobs for t in attempts],
        "advantage": [group.advantages[a] for _, a, group, _ in rows],
        "reward": [t.reward for t in attempts],
        "reward_parts": [list(t.reward_parts.items()) for t in attempts],
        "finish_reason": [str(t.finish_reason) for t in attempts],
        "oldest_version": [t.versions.oldest for t in attempts],
        "newest_version": [t.versions.newest for t in attempts],
        "text": [t.text for t in attempts],
        "failure": [f"{t.failure.stage}: {t.failure.reason}" if t.failure else None for t in attempts],
    }
    return pa.table(columns, schema=SCHEMA)
