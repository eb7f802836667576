"""One attempt in the terminal, turn by turn: what the policy saw, what it said, which tools it called, what it earned."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from redline.runs.conversations import POLICY, Message, Played, conversation, prompt
from redline.runs.decoding import Texts

_STYLES = {POLICY: "bold cyan", "system": "dim", "user": "green", "tool": "yellow", "environment": "green", "prompt": "dim"}


def told(group: int, attempt: Played, texts: Texts | None) -> Group:
    """The attempt as it was played."""
    return Group(*_head(group, attempt), *(part for i in range(len(attempt.rows)) for part in _sequence(attempt, i, texts)))


def _head(group: int, attempt: Played) -> Iterator[RenderableType]:
    first = attempt.rows[0]
    retried = f"  begun {first['retries'] + 1} times" if first["retries"] else ""
    scored = f"  scored {seconds(first['score_s'])} after the last reply" if first["score_s"] else ""
    yield Text(f"group {group}, attempt {attempt.index}", style="bold")
    yield Text(
        f"task {printable(first['task_id'])}  {_count(attempt.num_turns, 'turn')}, {_count(attempt.num_tokens, 'token')}"
        + retried
        + scored
    )
    for row in attempt.by_role:
        parts = "  ".join(f"{printable(name)} {value:g}" for name, value in row["reward_parts"].items())
        of = f"{printable(row['role'])}: " if row["role"] else ""
        yield Text(f"{of}reward {row['reward']:g}" + (f"  ({parts})" if parts else "") + f"  advantage {row['advantage']:g}")
    if attempt.failure:
        yield Text(printable(attempt.failure), style="red")


def _sequence(attempt: Played, place: int, texts: Texts | None) -> Iterator[RenderableType]:
    row, count = attempt.rows[place], len(attempt.rows)
    name = ", ".join(filter(None, [printable(row["role"]), f"sequence {place + 1} of {count}" if count > 1 else ""]))
    yield Rule(
        Text(f"{name}{' · ' if name else ''}{sum(row['loss_mask'])} of {len(row['token_ids'])} tokens are the policy's"),
        align="left",
    )
    if texts is None:
        yield Text("the tokenizer is not at hand: what the policy was told cannot be shown", style="dim")
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for message in [*prompt(row, texts), *conversation(row, texts)]:
        speaker = row["role"] or POLICY if message.by == POLICY else message.by
        table.add_row(Text(printable(speaker), style=_STYLES.get(message.by, "")), Text(printable(message.text)))
        for line in _details(message):
            table.add_row("", Text(printable(line), style="dim"))
    yield table


def _details(message: Message) -> Iterator[str]:
    """What stands below a turn: the tools that it called, and where its time went."""
    yield from (f"→ {call}" for call in message.calls)
    if message.turn is not None:
        spent = "  ".join(f"{name} {seconds(value)}" for name, value in message.seconds.items())
        ended = message.turn["finish_reason"]
        yield _count(message.num_tokens, "token") + (f", ended by {ended}" if ended else "") + (f"  {spent}" if spent else "")


def seconds(value: float) -> str:
    """`12 ms`, `1.50 s`."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def printable(text: str) -> str:
    """What a model wrote, as characters: neither markup nor terminal codes are obeyed."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
