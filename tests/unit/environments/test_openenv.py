"""Environments of OpenEnv, in process and as servers, with the package itself."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ports import free_port

from redline.environments.driver import Asked, Driver, Episode, Reply
from redline.environments.stepped import as_environment
from redline.environments.workers.held import GameClass
from redline.environments.workers.kinds import make_workers
from redline.errors import TaskError

pytest.importorskip("openenv.core", reason="the extra `openenv` has its own environment")

from redline.environments.openenv import OpenEnvGame, OpenEnvServer  # needs the package

pytestmark = pytest.mark.slow  # its imports alone take 20 s

GUESS = """
import random

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int
    reason: str


class Seen(Observation):
    hint: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, highest=9):
        super().__init__()
        self._highest = highest

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._number = random.Random(seed).randint(1, self._highest)
        return Seen(hint=f"Guess from 1 to {self._highest}.")

    def step(self, action: Guess, timeout_s=None, **kwargs):
        if action.number == self._number:
            return Seen(hint="Right.", reward=1.0, done=True)
        return Seen(hint="Lower." if action.number > self._number else "Higher.", reward=-0.1)

    @property
    def state(self):
        return State()


app = create_app(GuessEnvironment, Guess, Seen, max_concurrent_envs=2)
"""
SEARCH = re.compile(r"(Lower|Higher)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an environment of our own, and the echo environment that `openenv init` writes."""
    folder = tmp_path_factory.mktemp("openenv")
    (folder / "guess_of_mine.py").write_text(GUESS)
    command = [sys.executable, "-c", "from openenv.cli.__main__ import main; main()", "init", "my_echo"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def guess(folder: Path, seed: int = 0, **params: Any) -> OpenEnvGame:
    return OpenEnvGame(seed, "guess_of_mine:GuessEnvironment", folder=str(folder), **params)


def echo(folder: Path, **params: Any) -> OpenEnvGame:
    return OpenEnvGame(0, "my_echo.server.my_echo_environment:MyEchoEnvironment", folder=str(folder), **params)


def halving(asked: Asked) -> Reply:
    """Halves what is left, as the conversation so far says."""
    low, high = 1, 9
    for said, seen in zip(asked.messages[1::2], asked.messages[2::2], strict=True):
        number = int(re.findall(r"\d+", said["content"])[0])
        low, high = (low, number - 1) if "Lower" in seen["content"] else (number + 1, high)
    return Reply(f'{{"number": {(low + high) // 2}, "reason": "the middle"}}')


def test_the_environment_that_openenv_init_writes_is_played_in_process(folder: Path) -> None:
    game = echo(folder, instructions="Say something long.", max_steps=2)
    [first] = game.reset(game.train(0))
    assert first["content"].startswith("Say something long.\n\n")
    assert "environment ready!" in first["content"]
    one, two = game.step("Hello!"), game.step("Bye")
    assert (one.observation, one.reward, one.done) == (
        '{"echoed_message": "Hello!", "message_length": 6}',
        pytest.approx(0.6),
        False,
    )
    assert two.done, "it never ends by itself, and has two steps"
    shown = echo(folder, observation_field="echoed_message")
    shown.reset(shown.train(0))
    assert shown.step("Hello!").observation == "Hello!"


def test_the_seed_of_a_task_decides_the_episode(folder: Path) -> None:
    def number(game: OpenEnvGame, index: int) -> int:
        game.reset(game.train(index))
        return int(game._playing._number)

    first, again, other = guess(folder), guess(folder), guess(folder, seed=1)
    assert [number(first, index) for index in range(20)] == [number(again, index) for index in range(20)]
    assert [number(first, index) for index in range(20)] != [number(other, index) for index in range(20)]
    held_out, train = (
        {task.data["seed"] for task in first.held_out(50)},
        {first.train(index).data["seed"] for index in range(500)},
    )
    assert len(held_out) == 50
    assert not held_out & train


def test_an_action_of_several_fields_is_a_json_object_in_the_reply_and_anything_else_is_answered(folder: Path) -> None:
    game = guess(folder)
    game.reset(game.train(0))
    assert game.step("three").observation == "No action: your reply has no JSON object with number, reason"
    wrong = game.step('{"number": "x", "reason": ""}')
    assert str(wrong.observation).startswith("No action: number: Input should be a valid integer")
    assert (wrong.reward, wrong.done) == (0.0, False)
    assert SEARCH.search(str(game.step('I say {"number": 100, "reason": "high"}.').observation))


def test_a_game_is_played_to_its_end_by_the_workers_of_a_run(folder: Path) -> None:
    params = {"seed": 0, "environment": "guess_of_mine:GuessEnvironment", "folder": str(folder)}
    kind = GameClass("redline.environments.openenv:OpenEnvGame", params, None, OpenEnvGame)
    environment = as_environment(kind, make_workers("threads", 2, 20.0))
    episodes = played(environment, halving, count=5)
    environment.close()  # type: ignore[attr-defined]
    assert all(episode.error is None and 0.6 < episode.score <= 1.0 for episode in episodes)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Callable[[str], str]]:
    """Starts a server of an app, and gives its address."""
    started: list[subprocess.Popen[bytes]] = []

    def start(app: str) -> str:
        port = free_port()
        command = [sys.executable, "-m", "uvicorn", app, "--port", str(port), "--log-level", "warning"]
        started.append(subprocess.Popen(command, cwd=folder))
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return f"http://127.0.0.1:{port}"
            time.sleep(0.1)
        raise AssertionError("the server did not start")

    yield start
    for process in started:
        process.terminate()
        process.wait(10)


def played(environment: Any, speak: Callable[[Asked], Reply], count: int = 1) -> list[Episode]:
    driver = Driver(environment)
    episodes = driver.play_all([(environment.train(index), speak) for index in range(count)], limit_s=40)
    driver.close()
    return episodes


def test_a_server_plays_as_many_attempts_at_once_as_it_has_sessions(folder: Path, server: Callable[[str], str]) -> None:
    url = server("guess_of_mine:app")
    episodes = played(OpenEnvServer(0, url, sessions=2), halving, count=6)
    assert [episode.error for episode in episodes] == [None] * 6
    assert all(0.6 < episode.score <= 1.0 for episode in episodes)
    babble = played(OpenEnvServer(0, url, max_steps=3), lambda asked: Reply('{"number": "x", "reason": ""}'))[0]
    assert (babble.error, babble.score, len(babble.exchanges)) == (None, 0.0, 3)
    assert babble.exchanges[1].asked.messages[-1]["content"].startswith("No action: ")
    too_many = played(OpenEnvServer(0, url, sessions=6), halving, count=6)
    refused = [str(episode.error) for episode in too_many if episode.error]
    assert refused
    # The server says CAPACITY_REACHED and closes; where that comes first, its client never reads it.
    assert all("CAPACITY" in error or "no room for 6 sessions" in error for error in refused), "each is said, none hangs"


def test_what_cannot_be_played_is_refused(folder: Path) -> None:
    with pytest.raises(TaskError, match=r"(?s)no OpenEnv server answers there.*hint: start it"):
        OpenEnvServer(0, "http://127.0.0.1:9")
    with pytest.raises(TaskError, match="must begin with http"):
        OpenEnvServer(0, "127.0.0.1:8000")
    with pytest.raises(TaskError, match=r"(?s)ModuleNotFoundError.*hint: write package.module:Class"):
        OpenEnvGame(0, "no_such_module:Environment", folder=str(folder))
    with pytest.raises(TaskError, match="is no class of OpenEnv environments"):
        OpenEnvGame(0, "guess_of_mine:Guess", folder=str(folder))
    with pytest.raises(TaskError, match=r"(?s)an action has no such field.*hint: one of number, reason"):
        guess(folder, action_field="text")
