"""`redline show RUN`: the groups of a run and their attempts, for people and for machines. It only reads; a run may go on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from redline.buffer.store.columns import Mark, Rows
from redline.buffer.store.group_store import GroupState
from redline.buffer.store.index import DamagedIndexError, GroupIndex, GroupRow, index_files
from redline.buffer.store.segments import DamagedSegmentError, read_segment, segment_files
from redline.errors import RunFolderError

TOKENS_SHOWN = 64
"""Of each attempt; `--json` has all of them."""
_STYLES = {
    GroupState.IN_FLIGHT: "cyan",
    GroupState.READY: "yellow",
    GroupState.LEASED: "magenta",
    GroupState.TRAINED: "green",
    GroupState.DROPPED: "red",
}
_OWN = ("group", "checksum", "begun_version")
"""Columns of an attempt that its group has already, or that nobody wants to see."""


@dataclass(slots=True, frozen=True)
class LetGo:
    """Groups whose attempts are no longer there; what became of them is still in the index."""

    groups: int
    why: str

    @property
    def sentence(self) -> str:
        return f"trajectories/ holds the newest groups; the attempts of {self.groups:,} older ones were let go, {self.why}."


class StoredRun:
    """The trajectories of a run, to look at."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the run's."""
        self._run, self._folder = folder, folder / "trajectories"
        if not index_files(self._folder):
            raise RunFolderError(
                f"{folder}: no trajectories to show",
                f"redline repair {folder}" if segment_files(self._folder) else "it kept none (buffer.keep_trajectories: false)",
            )

    def groups(self, *, step: int | None = None, number: int | None = None) -> list[GroupRow]:
        """By number: all, those that a step was trained on, or one."""
        wanted: tuple[Any, ...] = ()
        if number is not None:
            wanted = ("number = ?", number)
        elif step is not None:
            wanted = ("trained_version = ? AND state = 'trained'", step)
        with self._index() as index:
            found = list(index.rows(*wanted))
        if not found and number is not None:
            raise RunFolderError(f"{self._run}: no group {number}", f"list them with: redline show {self._run}")
        if not found and step is not None:
            raise RunFolderError(
                f"{self._run}: nothing was trained at step {step}", f"steps count from 0: redline show {self._run}"
            )
        return found

    def newest(self) -> Iterator[GroupRow]:
        """All groups that are complete, the newest first, one at a time."""
        with self._index() as index:
            yield from index.newest()

    def trained_steps(self) -> list[int]:
        """The steps, counted from 0, that were trained on groups whose attempts are still there."""
        with self._index() as index:
            return index.trained_steps({file.number for file in segment_files(self._folder)})

    @contextmanager
    def _index(self) -> Iterator[GroupIndex]:
        try:
            index = GroupIndex(self._folder, "ro")
            try:
                yield index
            finally:
                index.close()
        except DamagedIndexError as error:
            raise self._damaged(error) from error

    def let_go(self) -> LetGo | None:
        """What is no longer there, and why; None where all is."""
        with self._index() as index:
            groups = index.count_outside({file.number for file in segment_files(self._folder)})
        return LetGo(groups, self.why_let_go()) if groups else None

    def why_let_go(self) -> str:
        """Which key of the recipe lets old attempts go, in words."""
        try:
            buffer = json.loads((self._run / "config.json").read_text())["buffer"]
            max_bytes, max_age = buffer["max_bytes"], buffer["max_age_steps"]
        except (OSError, ValueError, KeyError, TypeError):
            max_bytes = max_age = None
        reasons = [f"buffer.max_bytes = {max_bytes:,}"] if max_bytes else []
        reasons += [f"buffer.max_age_steps = {max_age:,}"] if max_age else []
        return f"as {' and '.join(reasons)} asks for" if reasons else "and no key of config.json says why"

    def attempts(self, groups: Iterable[GroupRow]) -> Iterator[tuple[GroupRow, list[dict[str, Any]] | None]]:
        """Each group with the rows of its attempts; None where its segment was evicted, nothing while it is in flight."""
        for group, batch in self._batches(groups, must_be_intact=True):
            if batch is None:
                yield group, None if group.num_attempts else []
            else:
                yield group, [_attempt(row) for row in batch.to_pylist()]

    def with_failures(self, groups: Iterable[GroupRow]) -> Iterator[GroupRow]:
        """Those of which an attempt failed; tokens are not read for that."""
        for group, batch in self._batches(groups):
            if batch is not None and batch.column("failure").null_count < batch.num_rows:
                yield group

    def lengths(self, groups: Iterable[GroupRow]) -> Iterator[tuple[GroupRow, tuple[np.ndarray, np.ndarray] | None]]:
        """Each group with the tokens of its attempts, all and those that the policy chose, int64 each; None as for
        `attempts`."""
        for group, batch in self._batches(groups):
            if batch is None:
                yield group, None
                continue
            mask = batch.column("loss_mask")
            offsets = mask.offsets.to_numpy()
            values = mask.values.to_numpy()[offsets[0] : offsets[-1]]
            chosen = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
            yield group, (np.diff(offsets), np.diff(chosen[offsets - offsets[0]]))

    def _batches(self, groups: Iterable[GroupRow], *, must_be_intact: bool = False) -> Iterator[tuple[GroupRow, Any]]:
        """Each group's rows of its segment, which is mapped and not read; None where there are none. Rows that must be intact
        are compared with their checksum: an offset that leads nowhere would take the process with it."""
        paths = {file.number: file.path for file in segment_files(self._folder)}
        mapped: dict[int, Rows] = {}
        for group in groups:
            if group.segment is None or group.segment not in paths:
                yield group, None
                continue
            try:
                if group.segment not in mapped:
                    mapped = {group.segment: Rows(read_segment(paths[group.segment]))}
                if must_be_intact and not mapped[group.segment].is_intact(group.first_row, group.end_row):
                    raise DamagedSegmentError(f"{paths[group.segment]}: group {group.number} is not what was written")
            except DamagedSegmentError as error:
                raise self._damaged(error) from error
            yield group, mapped[group.segment].batch.slice(group.first_row, group.num_attempts)

    def _damaged(self, error: Exception) -> RunFolderError:
        return RunFolderError(f"the trajectories are damaged: {error}", f"save what is intact with: redline repair {self._run}")


def show(
    run: Path, *, step: int | None, number: int | None, failures: bool, limit: int, as_json: bool, console: Console
) -> dict[str, Any] | None:
    """Print to the console; with `as_json` return the document instead. At most `limit` groups, the last ones; 0 is all."""
    stored = StoredRun(run)
    groups = stored.groups(step=step, number=number)
    pairs: list[tuple[GroupRow, list[dict[str, Any]] | None]]
    with_attempts = failures or step is not None or number is not None
    if failures:
        failed = list(stored.with_failures(groups))[-limit:]
        pairs = [(group, [row for row in rows or () if row["failure"]]) for group, rows in stored.attempts(failed)]
    else:
        groups = groups[-limit:]
        pairs = list(stored.attempts(groups)) if with_attempts else [(group, None) for group in groups]
    missing = stored.let_go()
    if as_json:
        document = {"run": str(run), "groups": [_group_json(group, rows, with_attempts) for group, rows in pairs]}
        return document | ({"let_go": asdict(missing)} if missing else {})
    console.print(group_table([group for group, _ in pairs]))
    if number is not None or failures:
        for group, rows in pairs:
            console.print(attempt_panels(group, rows, stored.why_let_go()))
    elif missing:
        console.print(Text(missing.sentence, style="dim"))
    return None


# ── for people ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def group_table(groups: Sequence[GroupRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("group", "state", "versions", "step", "attempts", "tokens", "reward", "signal"):
        table.add_column(title, justify="left" if title == "state" else "right", no_wrap=True)
    for group in groups:
        complete = group.num_attempts > 0
        table.add_row(
            str(group.number),
            Text(f"{group.state}: {group.reason}" if group.reason else group.state.value, style=_STYLES[group.state]),
            _span(group.oldest_version, group.newest_version) if complete else f"from {group.begun_version}",
            "" if group.trained_version is None else str(group.trained_version),
            str(group.num_attempts) if complete else "",
            f"{group.num_tokens:,}" if complete else "",
            "" if group.reward is None else f"{group.reward:.3f}",
            ("yes" if group.has_signal else "no") if complete else "",
        )
    return table


def attempt_panels(group: GroupRow, attempts: Sequence[Mapping[str, Any]] | None, why_let_go: str) -> Group | Text:
    if attempts is None:
        return Text(f"group {group.number}: its attempts were let go, {why_let_go}", style="dim")
    if not attempts:
        return Text(f"group {group.number}: no attempt is complete", style="dim")
    return Group(*(_panel(group.number, attempt) for attempt in attempts))


def _panel(number: int, attempt: Mapping[str, Any]) -> Panel:
    parts = "  ".join(f"{name} {value:g}" for name, value in attempt["reward_parts"].items())
    turns = "  ".join(
        f"{turn['start']}–{turn['end']} by {_span(turn['oldest_version'], turn['newest_version'])}" for turn in attempt["turns"]
    )
    tokens = attempt["token_ids"]
    more = f" … {len(tokens) - TOKENS_SHOWN:,} more" if len(tokens) > TOKENS_SHOWN else ""
    lines = [
        _line("task", attempt["task_id"]),
        _line("reward", f"{attempt['reward']:g}" + (f"  ({parts})" if parts else "") + f"  advantage {attempt['advantage']:g}"),
        _line("versions", f"{_span(attempt['oldest_version'], attempt['newest_version'])}  {_fate(attempt['version'])}"),
        _line("chosen", f"{sum(attempt['loss_mask'])} of {len(tokens)} tokens: {turns}  ended by {attempt['finish_reason']}"),
        _line("tokens", " ".join(map(str, tokens[:TOKENS_SHOWN])) + more),
    ]
    if attempt["failure"]:
        lines.append(_line("failure", attempt["failure"], style="red"))
    lines += [Text(), _plain(attempt["text"]) if attempt["text"] else Text("(no text)", style="dim")]
    title = Text(f"group {number}, attempt {attempt['attempt']}")
    return Panel(Group(*lines), title=title, title_align="left", box=box.ROUNDED)


def _fate(version: int) -> str:
    fates = {Mark.WAITING: "not trained on yet", Mark.DROPPED: "dropped", Mark.FORGOTTEN: "forgotten"}
    return f"trained at step {version}" if version >= 0 else fates[Mark(version)]


def _line(name: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{name:<9}", "dim"), Text(_printable(value), style=style))


def _plain(text: str) -> Text:
    return Text(_printable(text))


def _printable(text: str) -> str:
    """What a model wrote, as characters: neither markup nor terminal codes are obeyed."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _span(oldest: int | None, newest: int | None) -> str:
    return f"v{oldest}" if oldest == newest else f"v{oldest}–v{newest}"


# ── for machines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _attempt(row: dict[str, Any]) -> dict[str, Any]:
    row["reward_parts"] = {part["name"]: part["value"] for part in row["reward_parts"]}
    return {name: value for name, value in row.items() if name not in _OWN}


def _group_json(group: GroupRow, attempts: list[dict[str, Any]] | None, with_attempts: bool) -> dict[str, Any]:
    return asdict(group) | ({"attempts": attempts} if with_attempts else {})
