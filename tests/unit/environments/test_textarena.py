"""TextArena's games, with the real package."""

from __future__ import annotations

import random
import re

import pytest

from redline.environments.driver import Asked, Driver, Episode, Reply
from redline.errors import ConfigError

pytest.importorskip("textarena")
from redline.environments.textarena import TextArena


def play(environment: TextArena, speak: object, index: int = 0) -> Episode:
    driver = Driver(environment)
    episode = driver.play(environment.train(index), speak, 20.0)  # type: ignore[arg-type]
    driver.close()
    assert episode.error is None, episode.error
    return episode


class Bisecting:
    """Finds a number from 1 to 20 by its hints."""

    def __init__(self) -> None:
        self.low, self.high, self.last = 1, 20, 0

    def __call__(self, asked: Asked) -> Reply:
        said = str(asked.messages[-1]["content"])
        if self.last and "higher" in said:
            self.low = self.last + 1
        elif self.last:
            self.high = self.last - 1
        self.last = (self.low + self.high) // 2
        return Reply(f"I guess [{self.last}]")


def test_a_game_for_one_is_played_in_one_conversation_and_won() -> None:
    episode = play(TextArena("GuessTheNumber-v0"), Bisecting())
    assert episode.score == 1.0
    last = episode.exchanges[-1].asked
    assert last.role == ""
    roles = [message["role"] for message in last.messages]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    for exchange in episode.exchanges[1:]:
        hint = str(exchange.asked.messages[-1]["content"])
        assert re.fullmatch(r"\[GAME\] The target number is (higher|lower)\.", hint), hint


def moves(asked: Asked) -> Reply:
    """The first free square."""
    available = str(asked.messages[-1]["content"]).rpartition("Available Moves:")[2]
    return Reply(re.findall(r"\[\d\]", available)[0])


def test_two_play_against_each_other_as_two_roles_with_rewards_of_their_own() -> None:
    episode = play(TextArena("TicTacToe-v0", players=2), moves)
    assert episode.roles == ("player_0", "player_1")
    assert episode.score == {"player_0": 1.0, "player_1": -1.0}
    firsts = [str(exchange.asked.messages[0]["content"]) for exchange in episode.exchanges]
    assert "You are Player 0" in firsts[0]
    assert "You are Player 1" in firsts[1]
    zero = [exchange.asked.messages for exchange in episode.exchanges if exchange.asked.role == "player_0"]
    assert zero[1][:1] == zero[0], "a conversation goes on"


def test_an_invalid_move_is_told_and_then_lost_as_the_game_has_it() -> None:
    episode = play(TextArena("TicTacToe-v0", players=2), lambda asked: Reply("hello"))
    assert episode.score == {"player_0": -1.0, "player_1": 1.0}
    assert [exchange.asked.role for exchange in episode.exchanges] == ["player_0", "player_0"]


def test_the_game_follows_from_the_task_also_with_others_beside_it() -> None:
    environment = TextArena("KuhnPoker-v0", players=2)
    driver = Driver(environment)

    def speak(asked: Asked) -> Reply:
        options = re.findall(r"'(\[\w+\])'", str(asked.messages[-1]["content"]))
        return Reply(options[0] if options else "[check]")

    random.seed(7)
    expected = random.random()
    random.seed(7)
    alone = [driver.play(environment.train(index), speak, 20.0) for index in range(3)]
    beside = driver.play_all([(environment.train(index), speak) for index in range(3)], 20.0)
    driver.close()
    assert [texts(episode) for episode in alone] == [texts(episode) for episode in beside]
    assert texts(alone[0]) != texts(alone[1])
    assert random.random() == expected, "the run's own random numbers are untouched"


def texts(episode: Episode) -> list[object]:
    return [[message["content"] for message in exchange.asked.messages] for exchange in episode.exchanges] + [episode.score]


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({"env_id": "Chess"}, "no game 'Chess'"),
        ({"env_id": "TicTacToe-v0", "players": 1}, "1 player"),
        ({"env_id": "TicTacToe-v0", "players": 2, "kwargs": {"size": 9}}, "size"),
    ],
)
def test_a_game_that_cannot_begin_is_refused_with_the_key(params: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)) as caught:
        TextArena(**params)  # type: ignore[arg-type]
    assert "rollouts.environment.params" in caught.value.hint
