"""Conversations of stored attempts: on pages and in the terminal, message by message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.conversations import EVIL, TOKENIZER, write_games
from typer.testing import CliRunner

from redline.cli import app
from redline.errors import ConfigError, RunFolderError
from redline.runs import trajectories
from redline.runs.decoding import Texts
from redline.runs.run import Run
from redline.runs.trajectories import Trajectories


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One group at step 1: a game, and one that failed at its second try."""
    (tmp_path / "config.json").write_text("{}")
    write_games(tmp_path)
    return tmp_path


def shown(run: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["show", str(run), *options], env={"COLUMNS": "140"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_messages_are_cut_at_control_tokens_and_not_at_text_that_spells_one(run: Path) -> None:
    [group] = Trajectories(Run.open(run)).of_step(1)["groups"]
    white, black = group["attempts"][0]["sequences"]
    said = [(message["by"], message["text"]) for message in white["messages"]]
    assert said == [("system", "Play."), ("user", "Your move?"), ("policy", "e4"), ("user", EVIL), ("policy", "d4")]
    assert [(m["by"], m["text"]) for m in black["messages"]] == [("user", "And you?"), ("policy", "c5")]
    assert group["prompt"] is None, "the two roles were asked different things"


def test_page_has_each_role_once_with_its_parts_and_each_turn_with_tools_and_seconds(run: Path) -> None:
    [group] = Trajectories(Run.open(run)).of_step(1)["groups"]
    attempt, failed = group["attempts"]
    assert [(role["role"], role["reward"], role["parts"]) for role in attempt["roles"]] == [
        ("white", 1.0, {"won": 1.0}),
        ("black", -1.0, {}),
    ]
    assert (attempt["turns"], attempt["failure"], failed["retries"]) == (3, None, 1)
    first = attempt["sequences"][0]["messages"][2]
    assert first["calls"] == ["move(to='e4')", "unreadable: no JSON"]
    assert first["seconds"] == {"environment": 0.8, "prompt": 0.01, "queue": 0.1, "prefill": 0.2, "decode": 0.4, "parse": 0.02}
    assert first["tokens"] == len(TOKENIZER.encode("e4<|im_end|>", add_special_tokens=False))
    assert failed["failure"].startswith("environment: RuntimeError")


def test_group_with_more_text_than_a_page_takes_lists_the_rest_of_its_attempts(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectories, "GROUP_CHARACTERS", 20)
    [group] = Trajectories(Run.open(run)).of_step(1)["groups"]
    assert [len(attempt["sequences"]) for attempt in group["attempts"]] == [2, 0]
    assert group["attempts"][1]["turns"] == 3


def test_attempt_is_told_turn_by_turn_in_the_terminal(run: Path) -> None:
    lines = [" ".join(line.split()) for line in shown(run, "--group", "0", "--attempt", "0").splitlines()]
    text = "\n".join(lines)
    for part in ("task chess/1 3 turns", "white: reward 1 (won 1) advantage 0.5", "black: reward -1 advantage -0.5"):
        assert part in text
    places = [lines.index(line) for line in ("system Play.", "user Your move?", "white e4", "→ move(to='e4')", "white d4")]
    assert places == sorted(places)
    assert "decode 400 ms" in text
    assert "\x1b" not in text, "a model's terminal codes are not obeyed"
    assert "begun 2 times" in shown(run, "--group", "0", "--attempt", "1")


def test_attempts_and_sequences_of_a_game_are_counted_apart(run: Path) -> None:
    [line] = [line.split() for line in shown(run).splitlines() if line.strip()[:1].isdigit()]
    assert line[4] == "2", "attempts"
    found = json.loads(shown(run, "--group", "0", "--attempt", "1", "--json"))["groups"][0]
    assert [row["role"] for row in found["attempts"]] == ["white", "black"]
    assert (found["num_attempts"], found["num_sequences"]) == (2, 4)
    assert Run.open(run).trajectories()["attempt"].to_pylist() == [0, 0, 1, 1]


def test_attempt_that_is_not_there_and_options_that_do_not_go_together_are_refused(run: Path) -> None:
    with pytest.raises(RunFolderError, match="group 0 has no attempt 7") as caught:
        shown(run, "--group", "0", "--attempt", "7")
    assert caught.value.hint == "its attempts: 0, 1"
    with pytest.raises(ConfigError, match="--attempt needs --group"):
        shown(run, "--attempt", "0")


def test_without_a_tokenizer_what_the_policy_said_is_still_there(run: Path) -> None:
    (run / "model" / "tokenizer.json").unlink()
    (run / "config.json").write_text('{"model": {"path": "no/such-model"}}')
    assert Texts.of(Run.open(run)) is None
    text = shown(run, "--group", "0", "--attempt", "0")
    assert "the tokenizer is not at hand" in text
    assert "e4" in text
