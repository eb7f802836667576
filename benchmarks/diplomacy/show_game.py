"""Show one game of Diplomacy that a run has stored: a table per phase, and the map of each as an SVG.

    redline train recipes/diplomacy.yaml
    python benchmarks/diplomacy/show_game.py runs/diplomacy-001 --group 3 --attempt 0 --maps game/

The game is played again from what the policy said: the position that its task begins with, then phase by phase the orders that
can be read from the stored replies. What comes out must have the rewards that are stored beside them.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redline
from redline.environments.diplomacy.adjudicator import Adjudicator
from redline.environments.diplomacy.environment import Diplomacy
from redline.environments.diplomacy.options import Legal
from redline.environments.diplomacy.orders import Reading, read_orders
from redline.environments.diplomacy.position import Position

ADJUDICATOR = Adjudicator()


@dataclass(slots=True, frozen=True)
class Phase:
    """One phase as it was played."""

    position: Position
    legal: Legal
    readings: Mapping[str, Reading]
    """Power → what was read from its reply."""
    replies: Mapping[str, str]
    after: Position


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--group", type=int, default=0, help="the index of the game's task, default %(default)s")
    parser.add_argument("--attempt", type=int, default=0, help="which attempt at it, default %(default)s")
    parser.add_argument("--maps", type=Path, help="a folder for the maps")
    args = parser.parse_args()
    run = redline.Run.open(args.run)
    rows = stored_rows(run, args.group, args.attempt)
    phases = list(played_again(run, args.group, rows))
    if not phases:
        raise SystemExit(f"the attempt has no whole phase: {rows[0]['failure']}")
    check_rewards(phases, rows)
    for phase in phases:
        print_table(phase)
        if args.maps is not None:
            args.maps.mkdir(parents=True, exist_ok=True)
            orders = {power: reading.orders for power, reading in phase.readings.items()}
            (args.maps / f"{phase.position.phase}.svg").write_text(ADJUDICATOR.svg(phase.position, orders))


def stored_rows(run: redline.Run, group: int, attempt: int) -> list[dict[str, Any]]:
    """The sequences of one attempt, in the order in which they were asked."""
    table = run.trajectories()
    rows = [row for row in table.to_pylist() if row["group"] == group and row["attempt"] == attempt]
    if not rows:
        raise SystemExit(f"no attempt {attempt} of group {group} is stored; groups: {sorted(set(table['group'].to_pylist()))}")
    return rows


def played_again(run: redline.Run, group: int, rows: Sequence[Mapping[str, Any]]) -> Iterator[Phase]:
    """The phases of a game in which each power says what is stored."""
    params = run.config["rollouts"]["environment"]["params"]
    environment = Diplomacy(seed=run.config["run"]["seed"], **params)
    if any(len(row["turns"]) > 1 for row in rows):
        raise SystemExit("this game was one conversation per power; only games asked phase by phase can be shown")
    said = {role: iter([row["text"] for row in rows if row["role"] == role]) for role in {row["role"] for row in rows}}
    position = environment.start(environment.train(group))
    while True:
        legal = ADJUDICATOR.legal(position)
        replies = {power: text for power in legal if (text := next(said.get(power, iter(())), None)) is not None}
        if len(replies) < len(legal) or not legal:
            return
        readings = {power: read_orders(text, legal[power]) for power, text in replies.items()}
        after = ADJUDICATOR.advance(position, {power: reading.orders for power, reading in readings.items()})
        yield Phase(position, legal, readings, replies, after)
        position = after


def check_rewards(phases: Sequence[Phase], rows: Sequence[Mapping[str, Any]]) -> None:
    """End where the stored centres are not those that the game came to."""
    first, last = phases[0].position, phases[-1].after
    for row in rows:
        stored = {part["name"]: part["value"] for part in row["reward_parts"]}["centres"]
        gained = len(last.of(row["role"]).centres) - len(first.of(row["role"]).centres)
        if stored != gained:
            raise SystemExit(f"{row['role']} gained {gained} centres here, and {stored:g} in the run: another version's game?")


def print_table(phase: Phase) -> None:
    before, after = phase.position.centres(), phase.after.centres()
    print(f"\n**{phase.position.phase}**\n")
    print("| power | orders that count | not legal or missing | centres |\n| --- | --- | ---: | ---: |")
    for power, reading in phase.readings.items():
        change = f"{before[power]} → {after[power]}" if before[power] != after[power] else f"{before[power]}"
        print(f"| {power} | {', '.join(reading.orders) or 'none'} | {reading.faults} of {reading.expected} | {change} |")


if __name__ == "__main__":
    main()
