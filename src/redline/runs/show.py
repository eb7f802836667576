"""`redline show RUN`: the groups of a run and their attempts, for people and for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from redline.buffer.store.columns import Mark
from redline.buffer.store.group_store import GroupState
from redline.buffer.store.index import GroupRow
from redline.errors import RunFolderError
from redline.runs.conversations import played
from redline.runs.decoding import Texts
from redline.runs.run import Run
from redline.runs.stored import StoredRun, step_of
from redline.runs.told import printable, told
from redline.telemetry.console.tables import Fitted

TOKENS_SHOWN = 64
"""Tokens shown of each attempt; `--json` has all of them."""
PANEL_WIDTH = 140
"""Columns of an attempt, at most: its text wraps there, also where a table would not."""
_STYLES = {
    GroupState.IN_FLIGHT: "cyan",
    GroupState.READY: "yellow",
    GroupState.LEASED: "magenta",
    GroupState.TRAINED: "green",
    GroupState.DROPPED: "red",
}


@dataclass(slots=True, frozen=True)
class Wanted:
    """Which groups of a run to show."""

    step: int | None = None
    """Those that this step, counted from 1, was trained on; with their attempts."""
    index: int | None = None
    """This one, with its attempts."""
    failures: bool = False
    """Those with an attempt that failed, and of them those attempts alone."""
    attempt: int | None = None
    """Only this attempt of the group `index`, turn by turn."""
    limit: int = 20
    """At most this many, the last ones; 0 is all."""

    @property
    def has_attempts(self) -> bool:
        """Whether attempts are wanted, not groups alone."""
        return self.failures or self.step is not None or self.index is not None


def show(run: Path, wanted: Wanted, console: Console) -> None:
    """Print groups of a run as a table; for one group, and for failures, their attempts below it; or one attempt by turns."""
    stored = StoredRun(run)
    found = _found(stored, wanted)
    if wanted.attempt is not None:
        [(group, rows)] = found
        [attempt] = played(rows or ())
        console.print(told(group.index, attempt, Texts.of(Run.open(run))), width=min(console.width, PANEL_WIDTH))
        return
    console.print(Fitted(group_table([group for group, _ in found])))
    if wanted.index is not None or wanted.failures:
        for group, attempts in found:
            console.print(attempt_panels(group, attempts, stored.why_let_go()), width=min(console.width, PANEL_WIDTH))
    elif missing := stored.let_go():
        console.print(Text(missing.sentence, style="dim"))


def document(run: Path, wanted: Wanted) -> dict[str, Any]:
    """Return the same groups for a machine, with all tokens of their attempts."""
    stored = StoredRun(run)
    groups = [_group_json(group, attempts, wanted.has_attempts) for group, attempts in _found(stored, wanted)]
    missing = stored.let_go()
    return {"run": str(run), "groups": groups, **({"let_go": asdict(missing)} if missing else {})}


def _found(stored: StoredRun, wanted: Wanted) -> list[tuple[GroupRow, list[dict[str, Any]] | None]]:
    """Return the wanted groups, each with its attempts where those are wanted and still there, else None."""
    groups = stored.groups(step=wanted.step, index=wanted.index)
    if wanted.failures:
        failed = list(stored.with_failures(groups))[-wanted.limit :]
        return [(group, [row for row in rows or () if row["failure"]]) for group, rows in stored.attempts(failed)]
    if wanted.attempt is not None:
        return [(group, _of_attempt(stored, group, rows, wanted.attempt)) for group, rows in stored.attempts(groups)]
    groups = groups[-wanted.limit :]
    return list(stored.attempts(groups)) if wanted.has_attempts else [(group, None) for group in groups]


def _of_attempt(stored: StoredRun, group: GroupRow, rows: list[dict[str, Any]] | None, index: int) -> list[dict[str, Any]]:
    if rows is None:
        raise RunFolderError(f"group {group.index}: its attempts were let go, {stored.why_let_go()}", "choose a newer group")
    found = [row for row in rows if row["attempt"] == index]
    if not found:
        there = ", ".join(str(attempt.index) for attempt in played(rows)) or "none yet"
        raise RunFolderError(f"group {group.index} has no attempt {index}", f"its attempts: {there}")
    return found


# ── for people ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def group_table(groups: Sequence[GroupRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("group", "state", "versions", "step", "attempts", "tokens", "reward", "signal"):
        table.add_column(title, justify="left" if title == "state" else "right", no_wrap=title != "state")
    for group in groups:
        complete = group.num_attempts > 0
        table.add_row(
            str(group.index),
            Text(f"{group.state}: {group.reason}" if group.reason else group.state.value, style=_STYLES[group.state]),
            _span(group.oldest_version, group.newest_version) if complete else f"from {group.begun_version}",
            "" if (step := step_of(group)) is None else str(step),
            str(group.num_attempts) if complete else "",
            f"{group.num_tokens:,}" if complete else "",
            "" if group.reward is None else f"{group.reward:.3f}",
            ("yes" if group.has_signal else "no") if complete else "",
        )
    return table


def attempt_panels(group: GroupRow, attempts: Sequence[Mapping[str, Any]] | None, why_let_go: str) -> Group | Text:
    if attempts is None:
        return Text(f"group {group.index}: its attempts were let go, {why_let_go}", style="dim")
    if not attempts:
        return Text(f"group {group.index}: no attempt is complete", style="dim")
    return Group(*(_panel(group.index, attempt) for attempt in attempts))


def _turn(turn: Mapping[str, Any]) -> str:
    """`12–40 by v3`, or `12–40 by v3–v4 (from token 25 by v4)` where the weights changed in the middle of it."""
    begun = [f"from token {turn['start'] + token} by v{version}" for token, version in json.loads(turn["switches"] or "[]")]
    where = f" ({', '.join(begun)})" if begun else ""
    return f"{turn['start']}–{turn['end']} by {_span(turn['oldest_version'], turn['newest_version'])}{where}"


def _panel(group: int, attempt: Mapping[str, Any]) -> Panel:
    parts = "  ".join(f"{name} {value:g}" for name, value in attempt["reward_parts"].items())
    turns = "  ".join(_turn(turn) for turn in attempt["turns"])
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
    role = f", {printable(attempt['role'])}" if attempt["role"] else ""
    title = Text(f"group {group}, attempt {attempt['attempt']}{role}")
    return Panel(Group(*lines), title=title, title_align="left", box=box.ROUNDED)


def _fate(version: int) -> str:
    fates = {Mark.WAITING: "not trained on yet", Mark.DROPPED: "dropped", Mark.FORGOTTEN: "forgotten"}
    return f"trained at step {version + 1}" if version >= 0 else fates[Mark(version)]


def _line(name: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{name:<9}", "dim"), Text(printable(value), style=style))


def _plain(text: str) -> Text:
    return Text(printable(text))


def _span(oldest: int | None, newest: int | None) -> str:
    return f"v{oldest}" if oldest == newest else f"v{oldest}–v{newest}"


# ── for machines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _group_json(group: GroupRow, attempts: list[dict[str, Any]] | None, with_attempts: bool) -> dict[str, Any]:
    return asdict(group) | {"step": step_of(group)} | ({"attempts": attempts} if with_attempts else {})
