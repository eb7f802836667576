"""What the pages say exists: commands parse, keys are keys, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from support.pages import PAGES, commands
from support.paths import ROOT

from redline.cli import app
from redline.config.schema import Config

COMMANDS = sorted({command for page in PAGES for command in commands(page)})
VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SECTIONS = "run|model|rollouts|buffer|trainer|weight_sync|engine|placement|telemetry"
_KEY = re.compile(rf"`((?:{SECTIONS})\.(?!py`)[a-z_]+(?:\.[a-z_]+)*)(?=[`:=])")
_LINK = re.compile(r"\]\(([^)#\s:]*)(#[^)\s]*)?\)")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_pages_has_a_verb_and_options_that_exist(command: str) -> None:
    verb, *words = shlex.split(command.partition("|")[0])[1:]
    if verb.startswith("-"):
        return  # of redline itself
    found = VERBS.get(verb)
    assert found is not None, f"redline has no verb {verb}"
    if hasattr(found, "commands"):
        verb, *words = words
        assert verb in found.commands, f"redline has no verb {command}"
        found = found.commands[verb]
    if not {"--help", "-h"} & set(words) and not any(word.isupper() for word in words):  # RUN, MODEL: the reader's own
        found.make_context(verb, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_key_of_the_pages_is_a_key_of_recipes_or_the_name_of_a_span(page: Path) -> None:
    unknown = {name for name in _KEY.findall(page.read_text()) if not _is_key(name) and name not in SPANS}
    assert unknown == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_of_the_pages_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in _LINK.findall(_without_code(page.read_text())):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor and there.suffix == ".md":
            assert anchor[1:] in _anchors(there), f"{page.name}: {target}{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_file_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(r"`((?:src/redline|tests|examples|recipes|docs)/[\w/.-]+\.\w+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [
        page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md" and f"({page.name})" not in index
    ] == []


def _is_key(name: str) -> bool:
    model: object = Config
    for part in name.split("."):
        fields = getattr(model, "model_fields", None)
        if fields is None:
            return True  # inside a mapping, or a union of task kinds
        if part not in fields:
            return False
        model = fields[part].annotation
    return True


def _span_names() -> set[str]:
    sources = (ROOT / "src").rglob("*.py")
    return {name for source in sources for name in re.findall(r'"([a-z_]+\.[a-z_]+)"', source.read_text())}


SPANS = _span_names()


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, spaces to dashes, without punctuation."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
