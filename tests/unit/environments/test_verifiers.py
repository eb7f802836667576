"""Environments of the `verifiers` package, played as they are with the package itself."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.environments.driver import Asked, Driver, Episode, Reply
from redline.errors import TaskError
from redline.types import ToolCall

pytest.importorskip("verifiers.envs", reason="the extra `verifiers` has its own environment")

from redline.environments.verifiers import Verifiers  # needs the package

ENVIRONMENTS = '''
import verifiers as vf
from datasets import Dataset


def rows(count, first=0):
    return Dataset.from_list([{"question": f"{i} + 1", "answer": str(i + 1)} for i in range(first, first + count)])


def says_it(completion, answer):
    return float(answer in completion[-1]["content"])


def is_short(completion):
    return float(len(completion[-1]["content"]) < 20)


def single(**kwargs):
    rubric = vf.Rubric(funcs=[says_it, is_short], weights=[1.0, 0.5])
    return vf.SingleTurnEnv(dataset=rows(20), system_prompt="Add.", rubric=rubric, **kwargs)


def load_environment(num_held_out=5):
    rubric = vf.Rubric(funcs=[says_it])
    return vf.SingleTurnEnv(dataset=rows(20), eval_dataset=rows(num_held_out, first=17), rubric=rubric)


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        guess = messages[-1]["content"]
        if guess == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"Not {guess}."}]


def guess():
    return Guess(dataset=rows(20), rubric=vf.Rubric(funcs=[says_right]), max_turns=4)


def says_right(completion):
    return float(completion[-1]["content"] == "Right.")


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: one number
        second: the other
    """
    return first + second


def tools():
    return vf.ToolEnv(dataset=rows(20), tools=[add], rubric=vf.Rubric(funcs=[says_it]), max_turns=4)


def broken(completion):
    raise ValueError("no verdict")


def with_broken_reward():
    return vf.SingleTurnEnv(dataset=rows(20), rubric=vf.Rubric(funcs=[broken]))


def ranks(completions):
    return [0.0 for _ in completions]


def with_group_reward():
    return vf.SingleTurnEnv(dataset=rows(20), rubric=vf.Rubric(funcs=[ranks]))
'''


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Verifiers]:
    (tmp_path / "sums_of_mine.py").write_text(ENVIRONMENTS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "sums_of_mine", raising=False)

    def make(function: str = "", seed: int = 0, **params: Any) -> Verifiers:
        return Verifiers(seed, f"sums_of_mine{function and ':'}{function}", folder=str(tmp_path), **params)

    return make


def played(environment: Verifiers, speak: Callable[[Asked], Reply], index: int = 0) -> Episode:
    driver = Driver(environment)
    episode = driver.play(environment.train(index), speak, limit_s=300)
    driver.close()
    return episode


def answer(environment: Verifiers, index: int = 0) -> str:
    return environment.train(index).answer


def test_a_single_turn_environment_asks_once_and_its_rubric_scores_in_weighted_parts(make: Callable[..., Verifiers]) -> None:
    environment = make("single")
    episode = played(environment, lambda asked: Reply(f"it is {answer(environment)}"))
    assert (episode.error, episode.score) == (None, {"says_it": 1.0, "is_short": 0.5})
    [exchange] = episode.exchanges
    assert [message["role"] for message in exchange.asked.messages] == ["system", "user"]
    assert exchange.asked.messages == environment.train(0).messages
    assert played(environment, lambda asked: Reply("?")).score == {"says_it": 0.0, "is_short": 0.5}


def test_a_conversation_goes_on_with_what_the_policy_said(make: Callable[..., Verifiers]) -> None:
    environment = make("guess")
    replies = iter(["7", "8", answer(environment)])
    episode = played(environment, lambda asked: Reply(next(replies)))
    assert (episode.error, episode.score) == (None, {"says_right": 1.0})
    first, second, third = (exchange.asked.messages for exchange in episode.exchanges)
    assert second == [*first, episode.exchanges[0].turn.message, {"role": "user", "content": "Not 7."}]
    assert third == [*second, episode.exchanges[1].turn.message, {"role": "user", "content": "Not 8."}]


def test_an_environment_ends_after_its_own_number_of_turns(make: Callable[..., Verifiers]) -> None:
    episode = played(make("guess"), lambda asked: Reply("no"))
    assert (len(episode.exchanges), episode.score) == (4, {"says_right": 0.0})


def test_tools_are_offered_called_by_the_environment_and_answered(make: Callable[..., Verifiers]) -> None:
    environment = make("tools")
    number = int(answer(environment)) - 1

    def speak(asked: Asked) -> Reply:
        if len(asked.messages) == 1:
            return Reply("", [ToolCall("add", {"first": number, "second": 1})])
        return Reply(f"it is {asked.messages[-1]['content']}")

    episode = played(environment, speak)
    assert (episode.error, episode.score) == (None, {"says_it": 1.0})
    first, second = (exchange.asked for exchange in episode.exchanges)
    [tool] = first.tools
    assert (tool["function"]["name"], set(tool["function"]["parameters"]["properties"])) == ("add", {"first", "second"})
    assert second.messages[1] == episode.exchanges[0].turn.message
    assert (second.messages[2]["role"], second.messages[2]["content"]) == ("tool", str(number + 1))


def test_an_environment_that_ships_with_verifiers_is_played_by_its_import_path() -> None:
    pytest.importorskip("reasoning_gym", reason="the extra `demo` has it")
    args = {"gym": "chain_sum", "num_train_examples": 10, "num_eval_examples": 4}
    path = "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv"
    environment = Verifiers(0, path, args)
    assert len(environment.held_out(100)) == 4

    def right(asked: Asked) -> Reply:
        return Reply(f"<answer>{environment.env.rg_dataset[int(task.answer)]['answer']}</answer>")

    task = environment.train(0)
    assert sum(played(environment, right).score.values()) == 1.0
    assert sum(played(environment, lambda asked: Reply("?")).score.values()) == 0.0


def test_held_out_rows_are_those_it_brings_for_that_or_a_share_and_are_never_trained_on(make: Callable[..., Verifiers]) -> None:
    for environment, count in ((make(args={"num_held_out": 5}), 5), (make("guess", held_out_fraction=0.2), 4)):
        held_out = {task.messages[-1]["content"] for task in environment.held_out(100)}
        train = {environment.train(index).messages[-1]["content"] for index in range(100)}
        assert len(held_out) == count
        assert not held_out & train
        assert [task.id for task in environment.held_out(2)] == [task.id for task in environment.held_out(100)][:2]
    assert len(train) == 16
    assert [make("guess", seed=1).train(index).id for index in range(16)] != [
        environment.train(index).id for index in range(16)
    ]


def test_a_reward_function_that_raises_fails_the_attempt_instead_of_scoring_nothing(make: Callable[..., Verifiers]) -> None:
    episode = played(make("with_broken_reward"), lambda asked: Reply("?"))
    assert "Error calling reward function broken: no verdict" in str(episode.error)


def test_a_policy_that_cannot_answer_ends_the_attempt_with_its_reason(make: Callable[..., Verifiers]) -> None:
    def speak(asked: Asked) -> Reply:
        raise TaskError("the budget is spent")

    assert "the budget is spent" in str(played(make("guess"), speak).error)


def test_the_handlers_of_signals_stay_the_runs(make: Callable[..., Verifiers]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    made: list[Verifiers] = [make("single")]
    thread = threading.Thread(target=lambda: made.append(make("single")))
    thread.start()
    thread.join()
    assert len(made) == 2, "it can be made in any thread"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("function", "params", "problem"),
    [
        ("nothing", {}, "AttributeError: module 'sums_of_mine' has no attribute 'nothing'"),
        ("", {"args": {"size": 3}}, "TypeError: load_environment() got an unexpected keyword argument 'size'"),
        ("with_group_reward", {}, "its rubric scores whole groups"),
    ],
)
def test_what_cannot_be_played_is_refused(make: Callable[..., Verifiers], function: str, params: Any, problem: str) -> None:
    with pytest.raises(TaskError, match="verifiers environment sums_of_mine") as caught:
        make(function, **params)
    assert problem in caught.value.message
    assert caught.value.hint


def test_an_environment_that_is_not_installed_is_refused_with_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"(?s)no-such-env: ModuleNotFoundError.*put no_such_env.py into"):
        Verifiers(0, "no-such-env", folder=str(tmp_path))
