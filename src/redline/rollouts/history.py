"""What a chat template makes of earlier turns, found by trying: whether a conversation that goes on token by token reads as the
template would write it anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redline.errors import TaskError

if TYPE_CHECKING:
    from redline.rollouts.chat import Chat

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
CALL = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": {"word": "red"}}}

PLAIN = "replies"


@dataclass(slots=True, frozen=True)
class Trial:
    """A conversation that the template is tried with."""

    what: str
    begins: Sequence[dict[str, Any]]
    reply: str
    """What the policy says each time."""
    message: dict[str, Any]
    """The same as the assistant's message."""
    answer: dict[str, Any]
    """What the environment says to it."""
    tools: Sequence[dict[str, Any]] = ()


def history_notes(chat: Chat) -> list[str]:
    """What to know of the template before attempts of several turns, each a sentence. None where the template writes earlier
    turns as they were said."""
    notes: dict[str, str] = {}
    for trial in _trials(chat):
        try:
            said = _tried(chat, trial)
        except TaskError as error:
            said = f"refused ({error.message})"
        if said and said != notes.get(PLAIN):  # what holds of every reply is said once
            notes[trial.what] = said
    return [f"chat template, {what}: {said}" for what, said in notes.items()]


def _trials(chat: Chat) -> list[Trial]:
    question, system = {"role": "user", "content": "Well?"}, {"role": "system", "content": "Be brief."}
    thought = "<think>\nHm.\n</think>\n\nYes."
    call = chat.tool_use.format.write("look_up", {"word": "red"}).strip()
    return [
        Trial(PLAIN, [question], "Yes.", _said("Yes."), question),
        Trial("a system prompt", [system, question], "Yes.", _said("Yes."), question),
        Trial("thinking", [question], thought, _said(thought), question),
        Trial("spaces around a reply", [question], " Yes. \n", _said(" Yes. \n"), question),
        Trial(
            "tools",
            [question],
            call,
            _said("") | {"tool_calls": [CALL]},
            {"role": "tool", "content": "A colour.", "name": "look_up", "tool_call_id": "call00000"},
            [TOOL],
        ),
    ]


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _tried(chat: Chat, trial: Trial, num_replies: int = 3) -> str:
    """Say the same `num_replies` times, as it goes on and as it is written anew. Returns how they differ, if they do."""
    messages = chat.first_messages(trial.begins, trial.tools)
    text = chat.rendered(messages, trial.tools)
    for _ in range(num_replies):
        answer = chat.prepared([trial.answer], [trial.message])
        tail = chat.rendered_tail(messages, answer, trial.tools)
        if tail is None:
            return "replies are not shown as they were, so that each turn begins a new sequence"
        text += trial.reply + tail
        messages += [*chat.prepared([trial.message]), *answer]
    if text == chat.rendered(messages, trial.tools):
        return ""
    return "earlier turns are written differently from how they were said; here they stay as they were"
