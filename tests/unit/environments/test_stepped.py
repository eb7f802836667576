"""Games in steps, played as environments."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path

import pytest
from support.odd_games import OddGame

from redline.environments.driver import Asked, Driver, Episode, Reply, turn_of
from redline.environments.guess_number import GuessNumber
from redline.environments.stepped import Stepped, as_environment, as_messages, is_game, total
from redline.environments.workers.held import GameClass
from redline.environments.workers.kinds import make_workers
from redline.environments.workers.loop import LoopWorkers
from redline.errors import BudgetError, TaskError
from redline.types import Message, Reaction, Task, Turn

TASK = Task("t1", [{"role": "user", "content": "hello"}])
SUPPORT = str(Path(__file__).parents[2])
ODD = GameClass("support.odd_games:OddGame", {"moves": 3}, SUPPORT, OddGame)


def played(game: GameClass, *replies: str, task: Task = TASK) -> Episode:
    left = iter(replies)
    driver = Driver(Stepped(game, LoopWorkers()))
    try:
        return driver.play(task, lambda asked: Reply(next(left)), 10.0)
    finally:
        driver.close()


def local(kind: type) -> GameClass:
    return GameClass(f"here:{kind.__name__}", {}, loaded=kind)


def test_rewards_are_added_up_part_by_part_until_the_game_is_done() -> None:
    episode = played(ODD, "a", "b", "c")
    assert episode.score == {"moves": 3.0}
    contents = [[message["content"] for message in exchange.asked.messages] for exchange in episode.exchanges]
    assert contents[0] == ["t1: hello"]
    assert contents[1][:2] == ["t1: hello", "a"]
    assert contents[1][2].startswith("a is move 1")
    assert contents[2][:3] == contents[1], "the conversation goes on"


def test_numbers_are_added_up_and_a_move_without_parts_may_score_0() -> None:
    assert total([1, 0.5]) == 1.5
    assert total([0.0, {"a": 1.0}, {"a": 1.0, "b": 2.0}]) == {"a": 2.0, "b": 2.0}
    with pytest.raises(TaskError, match="named parts"):
        total([1.0, {"a": 1.0}])


def test_messages_are_shown_as_they_are_and_anything_else_is_refused() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert as_messages(messages, "reset") == messages
    for wrong in (None, 3, [], ["a"]):
        with pytest.raises(TaskError, match="neither a text nor messages"):
            as_messages(wrong, "reset")


def test_a_step_that_returns_no_reaction_says_so() -> None:
    class Tuples:
        def reset(self, task: Task) -> str:
            return "go"

        def step(self, reply: str) -> tuple[str, float]:
            return "", 1.0

    assert "not a Reaction" in str(played(local(Tuples), "a").error)


def test_what_is_a_game_and_what_is_an_environment() -> None:
    assert is_game(GuessNumber)
    assert not is_game(Stepped)
    assert not is_game(int)


def test_a_game_that_brings_its_own_tasks_lends_them_to_the_environment() -> None:
    environment = as_environment(GameClass("m:G", {"seed": 1, "largest": 9}, loaded=GuessNumber), LoopWorkers())
    assert environment.train(3) == GuessNumber(seed=1, largest=9).train(3)  # type: ignore[attr-defined]
    assert not hasattr(as_environment(ODD, LoopWorkers()), "train")


def test_a_game_whose_attempt_has_no_turns_left_keeps_what_it_scored() -> None:
    class TwoTurns:
        """A policy with a budget of two replies."""

        left = 2

        async def say(self, messages: list[Message], **options: object) -> Turn:
            if not self.left:
                raise BudgetError("no turns left")
            self.left -= 1
            return turn_of(Reply("up"))

    score = asyncio.run(Stepped(ODD, LoopWorkers()).play(TASK, TwoTurns()))  # type: ignore[arg-type]
    assert score == {"moves": 2.0}


@pytest.mark.parametrize("run_in", ["threads", "processes"])
def test_a_crashing_game_is_an_error_of_its_attempt_with_the_reason_and_others_end(run_in: str) -> None:
    workers = make_workers(run_in, 2, 20.0)
    environment = Stepped(ODD, workers)
    driver = Driver(environment)

    def speak(asked: Asked) -> Reply:
        return Reply("raise" if asked.messages[0]["content"].startswith("bad") else "up")

    tasks = [Task("bad" if number == 1 else f"t{number}", TASK.messages) for number in range(4)]
    episodes = driver.play_all([(task, speak) for task in tasks], 20.0)
    driver.close()
    environment.close()
    assert [episode.score for episode in episodes] == [{"moves": 3.0}, None, {"moves": 3.0}, {"moves": 3.0}]
    assert "no such move" in str(episodes[1].error)


def test_two_thousand_games_in_flight_take_a_few_kilobytes_each() -> None:
    """All wait for the policy at once."""
    started = 0

    class Waiting:
        async def say(self, messages: list[Message], **options: object) -> Turn:
            nonlocal started
            started += 1
            await asyncio.Event().wait()
            raise AssertionError

    async def begin() -> int:
        environment = Stepped(GameClass("m:G", {"seed": 0}, loaded=GuessNumber), LoopWorkers())
        tasks = [GuessNumber().train(index) for index in range(2000)]
        tracemalloc.start()
        playing = [asyncio.ensure_future(environment.play(task, Waiting())) for task in tasks]  # type: ignore[arg-type]
        while started < 2000:
            await asyncio.sleep(0)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for play in playing:
            play.cancel()
        return held

    assert asyncio.run(begin()) < 2000 * 8192


@pytest.mark.slow
@pytest.mark.parametrize("run_in", ["threads", "processes"])
def test_two_thousand_games_at_once_end_with_two_workers(run_in: str) -> None:
    environment = Stepped(ODD, make_workers(run_in, 2, 60.0))
    driver = Driver(environment)
    tasks = [Task(f"t{number}", TASK.messages) for number in range(2000)]
    episodes = driver.play_all([(task, lambda asked: Reply("up")) for task in tasks], 120.0)
    driver.close()
    environment.close()
    assert [episode.score for episode in episodes] == [{"moves": 3.0}] * 2000


def test_reaction_of_a_guess() -> None:
    game = GuessNumber(largest=9, guesses=3)
    assert game.reset(Task("t", [{"role": "user", "content": "Guess."}], "5")) == "Guess."
    assert game.step("3") == Reaction("higher")
    state = game.snapshot()
    assert game.step("is it 7?") == Reaction("lower")
    assert game.step("none") == Reaction(reward={"correct": 0.0}, done=True)
    game.restore(state)
    assert game.step("x" * 5000 + "9" * 5000).observation == "Say a number from 1 to 9."
    assert game.step("5") == Reaction(reward={"correct": 1.0}, done=True)
