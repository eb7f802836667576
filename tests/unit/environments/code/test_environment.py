from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from redline.environments.code.environment import Code
from redline.environments.code.examine import SHOWN, program_of
from redline.environments.code.protections import check_required, in_words
from redline.environments.driver import Asked, Driver, Reply
from redline.environments.speakers import ScriptedSpeaker
from redline.errors import BudgetError, ConfigError, TaskError
from redline.types import FinishReason, Message, Task, Turn, VersionSpan

ADD = Task("add", [{"role": "user", "content": "add"}], data={"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]})
RIGHT, HALF = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", "```\ndef add(a, b):\n    return 3\n```"


@pytest.fixture(scope="module")
def environment() -> Iterator[Code]:
    environment = Code(max_turns=3, time_s=60, memory_mb=256, runs_at_once=2)
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def driver(environment: Code) -> Iterator[Driver]:
    driver = Driver(environment)
    yield driver
    driver.close()


def test_the_program_is_the_last_fenced_block_or_the_whole_reply() -> None:
    assert program_of("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```\nc") == "y = 2\n"
    assert program_of("print(1)") == "print(1)"
    assert program_of("```python\nprint(1)") == "print(1)"
    assert program_of("a\n```py\nprint('`')\nprint('```')\n```") == "print('`')\nprint('```')\n"


def test_a_right_program_has_every_part_of_the_reward(driver: Driver) -> None:
    episode = driver.play(ADD, ScriptedSpeaker([RIGHT]), 300)
    assert episode.error is None
    assert episode.score == {"passed": 1.0, "correct": 1.0, "runs": 1.0}
    assert len(episode.exchanges) == 1


def test_a_failed_program_may_be_mended_and_what_was_expected_is_not_told(driver: Driver) -> None:
    episode = driver.play(ADD, ScriptedSpeaker([HALF, "no", RIGHT]), 300)
    assert episode.score == {"passed": 1.0, "correct": 1.0, "runs": 1.0}
    told = [str(exchange.asked.messages[-1]["content"]) for exchange in episode.exchanges[1:]]
    assert told[0] == (
        "1 of 2 tests passed. The first that failed:\nadd(2, 2)\nWrong result:\n3\n"
        "Send the whole corrected program in one code block."
    )
    assert "4" not in told[0]
    assert "NameError: name 'no' is not defined" in told[1]
    for before, after in zip(episode.exchanges, episode.exchanges[1:], strict=False):
        assert list(after.asked.messages[: len(before.asked.messages)]) == list(before.asked.messages)


def test_the_last_try_counts_and_an_error_is_shown_in_bounded_length(driver: Driver) -> None:
    episode = driver.play(ADD, ScriptedSpeaker([RIGHT.replace("a + b", "a"), "raise ValueError('x' * 100_000)"]), 300)
    assert episode.score == {"passed": 0.0, "correct": 0.0, "runs": 0.0}
    assert len(episode.exchanges) == 3
    assert all(len(str(message["content"])) < 3 * SHOWN for message in episode.exchanges[-1].asked.messages[2::2])


def test_programs_run_while_the_event_loop_goes_on(driver: Driver) -> None:
    slow = "import time\ntime.sleep(1.5)\ndef add(a, b):\n    return a + b"
    driver.longest_hold_s = 0.0
    episodes = driver.play_all([(ADD, lambda asked: Reply(slow))] * 2, 300)
    assert [episode.score["correct"] for episode in episodes] == [1.0, 1.0]
    assert driver.longest_hold_s < 1.5, "a loop that waits for a program stands still for all of that"


def test_built_in_problems_can_be_solved(environment: Code, driver: Driver) -> None:
    linear = next(task for task in map(environment.train, range(100)) if "linear" in str(task.messages))
    words = str(linear.messages[0]["content"]).split()
    a, b = words[words.index("times") - 1], words[words.index("plus") + 1].rstrip(".")
    episode = driver.play(linear, ScriptedSpeaker([f"```python\ndef linear(x):\n    return {a} * x + {b}\n```"]), 300)
    assert episode.score["correct"] == 1.0


def test_a_task_without_tests_is_an_error_that_says_so(driver: Driver) -> None:
    episode = driver.play(Task("t", [{"role": "user", "content": "?"}]), lambda asked: Reply("x"), 300)
    assert isinstance(episode.error, TaskError)
    assert "task t: tests: no list of tests" in episode.error.message


def test_a_parameter_that_cannot_be_meant_is_refused_by_its_name() -> None:
    wrong = {"time_s": 0, "max_turns": -1, "memory_mb": "much", "processes": True, "command": "sh x", "packages": ["/nowhere"]}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"params.{name}"):
            Code(**{name: value})


def test_replies_without_a_program_cost_nothing_but_the_attempt(driver: Driver) -> None:
    def say(asked: Asked) -> Reply:
        return Reply(["", "\0", "```\n"][len(asked.messages) // 2])

    episode = driver.play(ADD, say, 300)
    assert episode.error is None
    assert episode.score == {"passed": 0.0, "correct": 0.0, "runs": 0.0}


def test_a_check_says_which_protections_are_on(environment: Code) -> None:
    lines = environment.notes()
    assert any(line.startswith("limits on time") for line in lines)
    assert all(any(line.startswith(name) for line in lines) for name in ("namespaces: o", "own_uid: o", "seccomp: o"))


def test_a_machine_that_leaves_gaps_says_which_and_is_refused_where_none_may_be() -> None:
    bare = {"missing": dict.fromkeys(("namespaces", "own_uid", "seccomp", "landlock"), "darwin does not have it")}
    bare |= {"namespaces": "", "landlock": 0, "seccomp": False, "first_uid": 0}  # type: ignore[assignment]
    assert [line for line in in_words(bare) if "could" in line] == [
        "a program could read and write files that this user can",
        "a program could use the network, and signal this user's processes",
        "a program could start processes without end until its time is over",
        "a program could use memory that no limit counts",
    ]
    assert "seccomp: off: darwin does not have it" in in_words(bare)
    with pytest.raises(ConfigError, match="protection = full"):
        check_required(bare, "full")
    check_required(bare, "auto")
    for whole in ({**bare, "namespaces": "user", "seccomp": True}, {**bare, "seccomp": True, "landlock": 4}):
        check_required(whole, "full")


def test_an_attempt_without_turns_left_has_the_reward_of_its_last_program(environment: Code) -> None:
    class TwoTurns:
        said = 0

        async def say(self, messages: Sequence[Message], **asked: Any) -> Turn:
            self.said += 1
            if self.said > 1:
                raise BudgetError("no turns left")
            return Turn(HALF, 0, 1, VersionSpan(0, 0), FinishReason.STOP, 0, 0, 0, {"role": "assistant", "content": HALF})

    assert asyncio.run(environment.play(ADD, TwoTurns())) == {"passed": 0.5, "correct": 0.0, "runs": 1.0}
