"""Gymnasium's environments as games in text, with the real package."""

from __future__ import annotations

import pytest

from redline.environments.driver import Driver, Reply
from redline.environments.stepped import Stepped
from redline.environments.workers.held import GameClass
from redline.environments.workers.loop import LoopWorkers
from redline.errors import ConfigError

pytest.importorskip("gymnasium")
from redline.environments.gymnasium import Gymnasium, as_plain_text

SAFE_WAY = ("down", "Down.", "2", "I go right, then down", "right", "right")
"""Over the ice of the usual lake."""


def test_the_frozen_lake_is_crossed_by_names_and_numbers() -> None:
    game = Gymnasium("FrozenLake-v1", kwargs={"is_slippery": False})
    first = game.reset(game.train(0))
    assert first.splitlines()[1:] == ["[S]FFF", "FHFH", "FFFH", "HFFG", "Actions: 0 left, 1 down, 2 right, 3 up."]
    reactions = [game.step(reply) for reply in SAFE_WAY]
    assert [reaction.reward for reaction in reactions] == [0, 0, 0, 0, 0, 1]
    assert reactions[0].observation == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG".replace("(Down)", "  (Down)")
    assert reactions[-1].done
    game.close()


def test_a_whole_attempt_is_played_and_its_rewards_are_added_up() -> None:
    params = {"env_id": "CliffWalking-v1", "max_steps": 5}
    driver = Driver(Stepped(GameClass("m:G", params, loaded=Gymnasium), LoopWorkers()))
    episode = driver.play(Gymnasium(**params).train(0), lambda asked: Reply("up"), 10.0)  # type: ignore[arg-type]
    driver.close()
    assert episode.score == -5.0
    assert len(episode.exchanges) == 5


def test_replies_without_an_action_are_told_what_there_is_and_end_the_attempt_when_there_are_too_many() -> None:
    game = Gymnasium("Blackjack-v1", max_invalid=2)
    assert "the dealer shows" in game.reset(game.train(1))
    told = game.step("what?")
    assert told.observation == "No action. Actions: 0 stick, 1 hit."
    assert not told.done
    assert game.step("7").done
    game.reset(game.train(1))
    assert not game.step("7").done, "the next attempt begins anew"
    assert game.step("stick").done


def test_the_taxi_is_seen_without_colours() -> None:
    game = Gymnasium("Taxi-v4")
    shown = game.reset(game.train(0))
    assert "\x1b" not in shown
    assert "(" in shown and "<" in shown and "[" in shown  # noqa: PT018
    assert "5 dropoff" in shown


def test_tasks_are_seeds_that_no_held_out_task_has() -> None:
    game = Gymnasium("Taxi-v4", seed=3)
    assert game.reset(game.train(5)) == Gymnasium("Taxi-v4", seed=3).reset(game.train(5))
    seeds = {task.data["seed"] for task in game.held_out(100)}
    assert len(seeds) == 100
    assert seeds.isdisjoint(game.train(index).data["seed"] for index in range(1000))


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({"env_id": "FrozenLake-v0"}, "FrozenLake"),
        ({"env_id": "NoSuch-v0"}, "NoSuch"),
        ({"env_id": "FrozenLake-v1", "kwargs": {"size": 3}}, "size"),
        ({"env_id": "Pendulum-v1"}, "Box"),
        ({"env_id": "Blackjack-v1", "actions": ["a", "b", "c"]}, "3 names for 2 actions"),
    ],
)
def test_what_cannot_be_played_in_text_is_refused_with_the_key(params: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        Gymnasium(**params)  # type: ignore[arg-type]
    assert "rollouts.environment.params" in caught.value.hint


def test_colours_become_marks() -> None:
    assert as_plain_text("\x1b[41mS\x1b[0mF\n\x1b[35mR\x1b[0m\x1b[1mx\n") == "[S]F\n<R>x"
