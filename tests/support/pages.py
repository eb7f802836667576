"""The pages of the documentation, as a reader meets them: fenced blocks with their language, and what is said before them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
_FENCE = re.compile(
    r"^(?:<!-- (?P<note>[^>]*) -->\n)?```(?P<language>\w*)(?: file=(?P<file>\S+))?\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(slots=True, frozen=True)
class Block:
    language: str
    text: str
    file: str | None
    """The name under which the reader is told to save it."""
    is_run: bool
    """Whether the tests run it: a comment in front of a block says why not."""


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [
        Block(found["language"], found["text"], found["file"], "not run" not in (found["note"] or ""))
        for found in _FENCE.finditer(page.read_text())
    ]


def commands(page: Path) -> list[str]:
    """Every `redline …` of a page's blocks, without comments and without what is a placeholder or an ellipsis."""
    texts = [re.sub(r"\\\n\s*", "", block.text) for block in blocks(page) if block.language in ("", "sh", "console")]
    lines = [line for text in texts for line in text.splitlines()]
    found = [re.sub(r"\s+#\s.*$|\s{4,}.*$", "", line).removeprefix("$ ").strip() for line in lines]
    found = [re.sub(r"^(?:\S*/)?redline ", "redline ", line).removesuffix("&").strip() for line in found]
    return [line for line in found if line.startswith("redline ") and "…" not in line and "..." not in line]
