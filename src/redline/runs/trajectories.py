"""What a run sampled, for people to read: the prompt, what was said, the parts of its reward, the versions it was said with."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from redline.buffer.store.index import GroupRow
from redline.errors import RunFolderError
from redline.runs.columns import Json, spread
from redline.runs.run import Run, setting
from redline.runs.stored import StoredRun, step_of

MAX_CHARACTERS = 20_000
"""Characters of one text on a page."""
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
        self._decode = functools.cache(lambda: _decoder(run))
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
        return {"groups": groups, "failed": failed}

    def _stored(self) -> StoredRun:
        if not (self._run / "trajectories").is_dir():  # a copy of the logs alone
            raise RunFolderError(f"{self._run}: no trajectories to show")
        stored = StoredRun(self._run)
        self._why_let_go = stored.why_let_go()
        return stored

    def _pages(self, stored: StoredRun, groups: Iterable[GroupRow], only_failed: bool = False) -> list[dict[str, Json]]:
        return [
            self._page(
                group, attempts is None, [attempt for attempt in attempts or () if attempt["failure"] or not only_failed]
            )
            for group, attempts in stored.attempts(groups)
        ]

    def _page(self, group: GroupRow, is_evicted: bool, attempts: Sequence[dict[str, Any]]) -> dict[str, Json]:
        return {
            "number": group.number,
            "state": f"{group.state}: {group.reason}" if group.reason else str(group.state),
            "step": step_of(group),
            "reward": group.reward,
            "let_go": self._why_let_go if is_evicted else None,
            "task": attempts[0]["task_id"] if attempts else None,
            "prompt": self._prompt(attempts[0]) if attempts else None,
            "about": self._about(attempts[0]) if attempts else None,
            "attempts": [self._attempt(attempt) for attempt in attempts],
        }

    def _prompt(self, attempt: dict[str, Any]) -> str | None:
        decode = self._decode()
        return None if decode is None else _cut(decode(_prompt_tokens(attempt), skip_special_tokens=False))

    def _about(self, attempt: dict[str, Any]) -> str | None:
        """What the user said last, on one line, as far as the chat template lets it be told; else the end of the prompt."""
        decode = self._decode()
        if decode is None:
            return None
        lines = decode(_prompt_tokens(attempt), skip_special_tokens=True).split("\n")
        last = max((i for i, line in enumerate(lines) if line.strip() == "user"), default=-1)
        line = " ".join(" ".join(lines[last + 1 :]).split()).removesuffix(" assistant")
        return line if len(line) <= _ABOUT_CHARACTERS else f"… {line[-_ABOUT_CHARACTERS:]}"

    def _attempt(self, attempt: dict[str, Any]) -> dict[str, Json]:
        return {
            "number": attempt["attempt"],
            "reward": attempt["reward"],
            "parts": attempt["reward_parts"],
            "advantage": attempt["advantage"],
            "versions": [attempt["oldest_version"], attempt["newest_version"]],
            "tokens": sum(attempt["loss_mask"]),
            "finish": attempt["finish_reason"],
            "failure": attempt["failure"],
            "said": self._said(attempt),
        }

    def _said(self, attempt: dict[str, Any]) -> list[dict[str, Json]]:
        """What the policy said, and between its turns what it was told."""
        turns, decode, tokens = attempt["turns"], self._decode(), attempt["token_ids"]
        if len(turns) < 2 or decode is None:
            return [{"by": "policy", "text": _cut(attempt["text"])}]
        said: list[dict[str, Json]] = []
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            said.append({"by": "policy", "text": _cut(decode(tokens[turn["start"] : turn["end"]], skip_special_tokens=False))})
            told = tokens[turn["end"] : following["start"] if following else len(tokens)]
            if told:
                said.append({"by": "environment", "text": _cut(decode(told, skip_special_tokens=False))})
        return said


def _best(stored: StoredRun, step: int) -> list[GroupRow]:
    """Groups of a step, those that taught something before the others."""
    return sorted(stored.groups(step=step), key=lambda group: (not group.has_signal, group.number))[:GROUPS_IN_REPORT]


def _prompt_tokens(attempt: dict[str, Any]) -> list[int]:
    tokens: list[int] = attempt["token_ids"]
    return tokens[: attempt["turns"][0]["start"]] if attempt["turns"] else tokens


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} … {len(text) - MAX_CHARACTERS:,} more characters"


def _decoder(run: Run) -> Callable[..., str] | None:
    """Return a function from tokens to text; None where the tokenizer is not at hand, since nothing is fetched to show a
    page."""
    from tokenizers import Tokenizer

    config = run.config
    path = _tokenizer_file(run.path, str(setting(config, "model", "path", "")), int(setting(config, "run", "seed", 0)))
    return None if path is None else Tokenizer.from_file(str(path)).decode


def _tokenizer_file(run: Path, model: str, seed: int) -> Path | None:
    for folder in (run / "model", Path(model).expanduser()):
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    return _cached_tokenizer(model, seed)


def _cached_tokenizer(model: str, seed: int) -> Path | None:
    """The tokenizer of a built-in model, a converted .gguf file or a hub id, if it lies in the user's cache."""
    from redline.models.files.sources import cached_folder

    folder = cached_folder(model, seed)
    if folder is not None:
        return folder / "tokenizer.json" if (folder / "tokenizer.json").is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
