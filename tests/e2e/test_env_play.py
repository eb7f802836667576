"""`redline env play --model` says what a run says: the same recipe both ways, with a model that calls tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.chat_templates import HERMES_TOOLS
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

import redline
from redline.cli import app
from redline.models.files.tiny import shape_config, tiny_tokenizer
from redline.rollouts.chat import Chat
from redline.rollouts.conversation import Conversation

WORDS = '''
from redline import Task, ToolEnvironment, schema_of, tool

QUESTION = {"role": "user", "content": "What is e?"}


class Words(ToolEnvironment):
    """The score says what the environment saw: the calls, those that began early, and how long the answer is."""

    max_calls = 2

    def __init__(self, seed, brief=False):
        super().__init__(seed)
        self.ends_at_call = brief

    def train(self, index):
        return Task(f"word-{index}", [QUESTION])

    def held_out(self, count):
        return []

    @tool(early=True)
    async def look_up(self, word: str) -> str:
        """What a word means."""
        return f"{word} is a letter"

    def score(self, task, answer, calls):
        early = sum(call.began_early for call in calls)
        return {"calls": float(len(calls)), "early": float(early), "answer": float(len(answer))}


class Letters(Words):
    """Two replies, each of which ends where its text says."""

    async def play(self, task, policy):
        messages, seen = list(task.messages), []

        def is_long(reply):
            seen.append(reply.text)
            return "oo" in reply.text

        for _ in range(2):
            turn = await policy.say(messages, until=is_long)
            messages += [turn.message, {"role": "user", "content": "And?"}]
        return {"seen": float(sum(map(len, seen))), "looks": float(len(seen))}
'''
CALL = '<tool_call>{"name": "look_up", "arguments": {"word": "e"}}</tool_call>'
REPLIES = (f"Well. {CALL} I think so.", "A letter.")
TEMPLATE = HERMES_TOOLS.replace("{{ tool | tojson }}", "{{ tool.function.name }}")
"""Short, so that the model below has little to learn."""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environments, and a model that was taught to reply as `REPLIES`; it errs now and then."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "words_looked_up.py").write_text(WORDS)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    taught(lesson(tokenizer)).save_pretrained(folder / "model")
    return folder


def lesson(tokenizer: Any) -> torch.Tensor:
    """The tokens of the conversation, as a run renders it."""
    conversation = Conversation(Chat(tokenizer, None, ""), [tokenizer.eos_token_id])
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    messages = [{"role": "user", "content": "What is e?"}]
    for reply in REPLIES:
        conversation.ask(messages, tools)
        said = conversation.replied(np.array([*tokenizer.encode(reply), tokenizer.eos_token_id], np.int32))
        messages += [said.message, {"role": "tool", "name": "look_up", "content": "e is a letter"}]
    return torch.tensor(conversation.sequences[-1].token_ids.tolist())


def taught(tokens: torch.Tensor) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(shape_config())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(400):
        loss = model(tokens[None], labels=tokens[None]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.05:
            break
    return model


def recipe(folder: Path, environment: str, params: dict[str, Any], where: Path, **engine: Any) -> Path:
    values = {
        "engine": engine,
        "run": {"name": "words", "steps": 1, "seed": 3, "num_threads": 1, "folder": str(where / "runs")},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "rollouts": {
            "environment": {"name": f"words_looked_up:{environment}", "folder": str(folder), "params": params, "max_turns": 4},
            "groups_per_step": 4,
            "group_size": 2,
            "max_new_tokens": 120,
            "evaluation": {"num_tasks": 0},
        },
    }
    path = where / "words.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def of_a_run(recipe: Path) -> dict[int, dict[str, Any]]:
    """What the first attempt at each task said and came to, by task."""
    tokenizer, found = tiny_tokenizer(), {}
    for row in redline.train(recipe).trajectories().to_pylist():
        if row["attempt"] == 0:
            texts = [tokenizer.decode(row["token_ids"][t["start"] : t["end"]], skip_special_tokens=True) for t in row["turns"]]
            ends = [(turn["end"] - turn["start"], turn["finish_reason"]) for turn in row["turns"]]
            parts = {part["name"]: part["value"] for part in row["reward_parts"]}
            found[row["group"]] = {"texts": texts, "ends": ends, "parts": parts}
    return found


def played(recipe: Path, model: Path, task: int) -> dict[str, Any]:
    asked = ["env", "play", str(recipe), "--model", str(model), "--task", str(task), "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    return {
        "texts": [turn["text"] for turn in said["turns"]],
        "ends": [(turn["tokens"], turn["finish_reason"]) for turn in said["turns"]],
        "parts": said["reward_parts"][""],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "params", "kind"),
    [
        ("Words", {}, "native"),
        ("Words", {"brief": True}, "native"),
        ("Words", {"brief": True}, "transformers"),
        ("Letters", {}, "native"),
    ],
    ids=["early", "brief", "brief, by transformers", "until"],
)
def test_a_model_that_plays_says_what_it_says_in_a_run(
    words: Path, tmp_path: Path, environment: str, params: dict[str, Any], kind: str
) -> None:
    path = recipe(words, environment, params, tmp_path, kind=kind)
    expected = of_a_run(path)
    assert len(expected) == 4
    assert {task: played(path, words / "model", task) for task in expected} == expected
    said = [text for one in expected.values() for text in one["texts"]]
    if environment == "Words":
        assert any(one["parts"].get("early") for one in expected.values()), "some called the function"
        assert any(CALL in text for text in said)
        assert any(text.endswith(CALL) for text in said) == bool(params)
    else:
        assert all("oo" not in text[:-1] for text in said)
        assert sum(text.endswith("oo") for text in said) >= 2
