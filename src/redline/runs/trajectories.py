"""What a run sampled, for people to read: the attempts of a group, and each as the conversation that it was."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from redline.buffer.store.index import GroupRow
from redline.errors import RunFolderError
from redline.runs.columns import Json, spread
from redline.runs.conversations import Message, Played, Row, conversation, played, prompt, prompt_tokens
from redline.runs.decoding import Texts
from redline.runs.run import Run
from redline.runs.stored import StoredRun, step_of

MAX_CHARACTERS = 20_000
"""Characters of one text on a page."""
GROUP_CHARACTERS = 200_000
"""Characters of all messages of a group; attempts beyond them are listed without theirs."""
GROUPS_PER_STEP = 16
STEPS_IN_REPORT = 6
GROUPS_IN_REPORT = 3
"""Groups of each of those steps."""
FAILURES_IN_REPORT = 6
_ABOUT_CHARACTERS = 160


class Trajectories:
    """The stored attempts of one run. It only reads; the run may go on."""

    def __init__(self, run: Run) -> None:
        self._run = run.folder.shown
        self._texts = functools.cache(lambda: Texts.of(run))
        self._why_let_go = ""

    def of_step(self, step: int) -> dict[str, Json]:
        """The groups that a step of `metrics.jsonl` was trained on."""
        try:
            stored = self._stored()
            groups = stored.groups(step=step)
            return {
                "step": step,
                "groups": self._pages(stored, groups[:GROUPS_PER_STEP]),
                "left_out": len(groups[GROUPS_PER_STEP:]),
            }
        except RunFolderError as error:
            return {"step": step, "groups": [], "missing": error.message}

    def chosen(self) -> dict[str, Json]:
        """Some of the first, the last and those between, and attempts that failed."""
        try:
            stored = self._stored()
            steps = spread(stored.trained_steps(), STEPS_IN_REPORT)
            groups = self._pages(stored, [group for step in steps for group in _best(stored, step)])
            newest = list(itertools.islice(stored.with_failures(stored.newest()), FAILURES_IN_REPORT))
            failed = self._pages(stored, newest[::-1], only_failed=True)
        except RunFolderError as error:
            return {"groups": [], "failed": [], "missing": error.message}
        return {"groups": groups, "failed": failed, "command": f"redline show {self._run} --group N --attempt M"}

    def _stored(self) -> StoredRun:
        if not (self._run / "trajectories").is_dir():  # a copy of the logs alone
            raise RunFolderError(f"{self._run}: no trajectories to show")
        stored = StoredRun(self._run)
        self._why_let_go = stored.why_let_go()
        return stored

    def _pages(self, stored: StoredRun, groups: Iterable[GroupRow], only_failed: bool = False) -> list[dict[str, Json]]:
        return [
            self._page(group, rows is None, [row for row in rows or () if row["failure"] or not only_failed])
            for group, rows in stored.attempts(groups)
        ]

    def _page(self, group: GroupRow, is_evicted: bool, rows: Sequence[dict[str, Any]]) -> dict[str, Json]:
        same_prompt = bool(rows) and all(prompt_tokens(row) == prompt_tokens(rows[0]) for row in rows)
        asked = prompt(rows[0], self._texts()) if same_prompt else []
        return {
            "index": group.index,
            "state": f"{group.state}: {group.reason}" if group.reason else str(group.state),
            "step": step_of(group),
            "reward": group.reward,
            "let_go": self._why_let_go if is_evicted else None,
            "task": rows[0]["task_id"] if rows else None,
            "about": self._about(rows[0]) if rows else None,
            "has_texts": self._texts() is not None,
            "prompt": [_message(found) for found in asked] or None,
            "attempts": self._attempts(rows, same_prompt),
        }

    def _about(self, row: dict[str, Any]) -> str | None:
        """What the user said last, on one line; else the end of the prompt."""
        texts = self._texts()
        if texts is None:
            return None
        line = " ".join(next((text for by, text in reversed(self._prompt(row)) if by == "user"), "").split())
        line = line or " ".join(texts.text(prompt_tokens(row), plain=True).split())
        return line if len(line) <= _ABOUT_CHARACTERS else f"… {line[-_ABOUT_CHARACTERS:]}"

    def _prompt(self, row: dict[str, Any]) -> list[tuple[str, str]]:
        return [(message.by, message.text) for message in prompt(row, self._texts())]

    def _attempts(self, rows: Sequence[dict[str, Any]], same_prompt: bool) -> list[dict[str, Json]]:
        """The attempts, each with its messages as long as the group has room for them."""
        found, room = [], GROUP_CHARACTERS
        for attempt in played(rows):
            sequences = [self._sequence(row, same_prompt) for row in attempt.rows] if room > 0 else []
            room -= sum(len(message["text"]) for sequence in sequences for message in sequence["messages"])
            found.append(_attempt(attempt) | {"sequences": sequences})
        return found

    def _sequence(self, row: Row, same_prompt: bool) -> dict[str, Json]:
        messages = [*([] if same_prompt else prompt(row, self._texts())), *conversation(row, self._texts())]
        return {
            "role": row["role"],
            "versions": [row["oldest_version"], row["newest_version"]],
            "length": len(row["token_ids"]),
            "tokens": sum(row["loss_mask"]),
            "finish": row["finish_reason"],
            "messages": [_message(found) for found in messages],
        }


def _attempt(attempt: Played) -> dict[str, Json]:
    return {
        "index": attempt.index,
        "roles": [
            {"role": row["role"], "reward": row["reward"], "parts": row["reward_parts"], "advantage": row["advantage"]}
            for row in attempt.by_role
        ],
        "turns": attempt.num_turns,
        "tokens": attempt.num_tokens,
        "retries": attempt.rows[0]["retries"] or 0,
        "failure": attempt.failure,
        "score_s": attempt.rows[0]["score_s"] or None,
        "is_single": attempt.is_single_turn,
    }


def _message(message: Message) -> dict[str, Json]:
    found: dict[str, Json] = {"by": message.by, "text": _cut(message.text)}
    if message.turn is None:
        return found
    turn = message.turn
    return found | {
        "tokens": message.num_tokens,
        "finish": turn["finish_reason"],
        "versions": [turn["oldest_version"], turn["newest_version"]],
        "seconds": {name: float(f"{value:.4g}") for name, value in message.seconds.items()},
        "calls": [_cut(call) for call in message.calls],
    }


def _best(stored: StoredRun, step: int) -> list[GroupRow]:
    """Groups of a step, those that taught something before the others."""
    return sorted(stored.groups(step=step), key=lambda group: (not group.has_signal, group.index))[:GROUPS_IN_REPORT]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} … {len(text) - MAX_CHARACTERS:,} more characters"
