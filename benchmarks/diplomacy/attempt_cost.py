"""What an attempt at Diplomacy costs beside the engine, with each thing that makes it fast switched off: CPU time, no model.

    PYTHONPATH=tests python benchmarks/diplomacy/attempt_cost.py --rounds 8

In every round each arm plays the same attempts once, in an order drawn by lot: whole years from the middle of games, by a
policy that gives random legal orders out of those that its prompt lists. The time that this policy takes to read its prompts is
left out. A gain is the time of an arm over that with everything on, from pairs.
"""

from __future__ import annotations

import random
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.diplomacy_games import read_compact, read_full

from redline.environments.diplomacy.environment import Diplomacy
from redline.environments.driver import Asked, Driver, Reply
from redline.environments.states import write_states
from redline.lab.evidence.statistics import compare
from redline.lab.measure.pairs import interleave

TASKS, ATTEMPTS = 3, 4
WARM_UP = 8
STATES = 64
ON = "everything on"
OFF: Mapping[str, Mapping[str, Any]] = {
    "compact: false": {"compact": False},
    "keep_prompts: false": {"keep_prompts": False},
    f"warm_up: {WARM_UP} in place of states": {"warm_up": WARM_UP},
    "clone: deepcopy": {"clone": "deepcopy"},
    "memoise: false": {"memoise": False},
}
"""Arm → params that are not the default."""


@dataclass(slots=True)
class OrderGiver:
    """A policy for one attempt, and the CPU time that it took."""

    seed: str
    seconds: float = 0.0

    def __call__(self, asked: Asked) -> Reply:
        began = time.process_time()
        text = str(asked.messages[-1]["content"])
        seen = read_full(text) if text.startswith("{") else read_compact(text)
        rng = random.Random(f"{self.seed}/{asked.role}/{seen.phase}")
        subjects = sorted(subject for subject in seen.legal if subject != "WAIVE")
        subjects = rng.sample(subjects, seen.due) if seen.due < len(subjects) else subjects
        orders = "\n".join(rng.choice(sorted(seen.legal[subject])) for subject in subjects)
        self.seconds += time.process_time() - began
        return Reply(orders)


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, help="default %(default)s; 6 are the fewest for an interval")
    rounds = parser.parse_args().rounds
    with TemporaryDirectory() as folder:
        states = Path(folder) / "states.bin"
        write_states(states, Diplomacy(warm_up=WARM_UP), STATES)
        sides = {name: lambda number, params=params: played(params, number) for name, params in arms(str(states)).items()}
        rows = interleave(sides, rounds, 0, tell)
    print_table(rows)


def arms(states: str) -> dict[str, dict[str, Any]]:
    """Name of an arm → its params."""
    begin = {"states": states}
    singly = {name: dict(params) if "warm_up" in params else begin | params for name, params in OFF.items()}
    everything = {key: value for params in OFF.values() for key, value in params.items()}
    return {ON: begin, **singly, "all of them off": everything | {"gather": False}}


def tell(number: int, row: Mapping[str, float]) -> None:
    print(f"round {number + 1}:", ", ".join(f"{name} {ms:.1f} ms" for name, ms in row.items()), flush=True)


def print_table(rows: Sequence[Mapping[str, float]]) -> None:
    print(f"| | ms per attempt | times everything on, 95% interval of {len(rows)} pairs |\n| --- | ---: | ---: |")
    for name in rows[0]:
        found = compare([row[name] for row in rows], [row[ON] for row in rows])
        interval = f" ({found.interval[0]:.2f}–{found.interval[1]:.2f})" if found.interval else ""
        ratio = "" if name == ON else f"{found.ratio:.2f}{interval}"
        print(f"| {name} | {statistics.median(row[name] for row in rows):.1f} | {ratio} |")


def played(params: Mapping[str, Any], number: int) -> float:
    """Milliseconds of CPU time for an attempt, beside the policy's. What an environment keeps is new in every round."""
    environment = Diplomacy(years=1, **params)
    driver = Driver(environment)
    speakers = [OrderGiver(f"{number}/{index}/{attempt}") for index in range(TASKS) for attempt in range(ATTEMPTS)]
    began = time.process_time()
    tasks = [environment.train(number * TASKS + index) for index in range(TASKS) for _ in range(ATTEMPTS)]
    episodes = driver.play_all(list(zip(tasks, speakers, strict=True)), 600)
    seconds = time.process_time() - began - sum(speaker.seconds for speaker in speakers)
    driver.close()
    for episode in episodes:
        if episode.error is not None:
            raise episode.error
    return 1e3 * seconds / len(episodes)


if __name__ == "__main__":
    main()
