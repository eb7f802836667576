"""`redline env play`: what a person, or a served model, says and sees."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from redline.engine.adapters.json_client import JsonClient
from redline.environments.driver import Asked, Speaker
from redline.errors import BudgetError, EngineError
from redline.lab.environments.made import Made
from redline.lab.environments.play import play
from redline.lab.environments.players import Person, Served, as_openai
from redline.types import Task

HERE = "test_play"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


class Sums:
    """Answer a sum; a tool adds."""

    def __init__(self, seed: int) -> None:
        pass

    def train(self, index: int) -> Task:
        return Task("sum", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}], answer="5")

    def held_out(self, count: int) -> list[Task]:
        return []

    async def play(self, task, policy):
        messages = list(task.messages)
        turn = await policy.say(messages, tools=[ADD])
        while turn.tool_calls:
            [call] = turn.tool_calls
            result = str(call.arguments["a"] + call.arguments["b"])
            messages += [turn.message, {"role": "tool", "name": call.name, "content": result}]
            turn = await policy.say(messages, tools=[ADD])
        return {"correct": float(turn.text == task.answer), "short": 1.0}


@pytest.fixture(autouse=True)
def _this_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


def person(*lines: str) -> Person:
    left: Iterator[str] = iter(lines)
    return Person(lambda prompt: next(left, None), shown.append)


shown: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_shown() -> None:
    shown.clear()


def test_a_person_sees_each_message_once_calls_a_tool_and_gets_the_parts_of_the_reward() -> None:
    played = play(Made(f"{HERE}:Sums"), 0, person('/call add {"a": 2, "b": 3}', "5"), shown.append, 10)
    assert played.parts == {"": {"correct": 1.0, "short": 1.0}}
    assert shown == [
        "task sum",
        "system: Be brief.",
        "user: 2 + 3?",
        'tool add(a: integer, b: integer): adds    (/call NAME {"argument": value})',
        'assistant: calls add({"a": 2, "b": 3})',
        "tool: 5",
        "assistant: 5",
        "reward: correct 1, short 1",
    ]


def test_a_call_that_cannot_be_read_is_asked_for_again() -> None:
    played = play(Made(f"{HERE}:Sums"), 0, person("/call sub {}", "/call add {", "6"), shown.append, 10)
    assert played.parts[""]["correct"] == 0.0
    assert "there is no tool 'sub' here; there is add" in shown
    assert any(line.startswith("the arguments are no JSON") for line in shown)


def test_arguments_of_a_call_are_converted_as_in_a_run() -> None:
    play(Made(f"{HERE}:Sums"), 0, person('/call add {"a": "3", "b": "4"}', "7"), shown.append, 10)
    assert "tool: 7" in shown


@pytest.mark.parametrize("value", ['"three"', "3.5", "true"])
def test_arguments_that_a_run_would_refuse_are_asked_for_again(value: str) -> None:
    lines = (f'/call add {{"a": {value}, "b": 4}}', '/call add {"a": 3, "b": 4}', "7")
    play(Made(f"{HERE}:Sums"), 0, person(*lines), shown.append, 10)
    assert any(line.startswith("a run would not make this call: the argument a of add is of type integer") for line in shown)
    assert "tool: 7" in shown


def test_input_that_ends_early_leaves_no_reward_and_says_so() -> None:
    played = play(Made(f"{HERE}:Sums"), 0, person(), shown.append, 10)
    assert (played.problem, played.exit_code) == ("the input ended before the game did", 1)


def test_an_attempt_whose_budget_is_used_up_is_worth_what_it_is_in_a_run() -> None:
    class Brief(Person):
        """Has one turn, which calls the tool."""

        def begin(self, task: Task, index: int) -> Speaker:
            lines = iter(['/call add {"a": 2, "b": 3}'])
            once = Person(lambda prompt: next(lines, None), shown.append).begin(task, index)

            def speak(asked: Asked) -> Any:
                if len(asked.messages) > 2:
                    raise BudgetError("the attempt has had its 1 turns", "raise max_turns")
                return once(asked)

            return speak

    played = play(Made(f"{HERE}:Sums"), 0, Brief(lambda prompt: None, shown.append), shown.append, 10)
    assert (played.parts, played.problem) == ({"": {"truncated": 1.0}}, "")


class Completions(BaseHTTPRequestHandler):
    """The API of a model that first calls the tool."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "some-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        call = {"type": "function", "id": "x", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
        message = {"role": "assistant", "content": "5"} if len(self.asked) > 1 else {"content": None, "tool_calls": [call]}
        self._answer({"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}})

    def _answer(self, value: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    Completions.asked = []
    with HTTPServer(("127.0.0.1", 0), Completions) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_served_model_plays_with_tools(server: HTTPServer) -> None:
    client = JsonClient(f"http://127.0.0.1:{server.server_port}/v1", None, 10, 0)
    played = play(Made(f"{HERE}:Sums"), 0, Served(client, None, 0.5, 20), shown.append, 10)
    assert played.parts[""]["correct"] == 1.0
    first, second = Completions.asked
    assert (first["model"], first["temperature"], first["max_tokens"], first["tools"]) == ("some-model", 0.5, 20, [ADD])
    call, result = second["messages"][2:]
    assert call["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]


def test_a_server_that_is_not_there_is_an_error_with_a_hint() -> None:
    with pytest.raises(EngineError, match="cannot reach"):
        Served(JsonClient("http://127.0.0.1:1/v1", None, 1, 0), None, 1.0, None)


def test_messages_without_calls_go_to_the_api_as_they_are() -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert list(as_openai(messages)) == messages


@pytest.mark.slow
def test_the_verb_works_in_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(Path(__file__).read_text())
    command = [sys.executable, "-m", "redline.cli", "env", "play", "sums:Sums", "--json"]
    done = subprocess.run(command, cwd=tmp_path, input="5\n", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reward_parts"] == {"": {"correct": 1.0, "short": 1.0}}
    assert "user: 2 + 3?" in done.stderr
