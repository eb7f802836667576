"""What it saves to begin the longest attempts first, and whether the next batch fills the rows that come free: in decode steps.

    PYTHONPATH=src python benchmarks/rollouts/longest_first.py [--tasks 32] [--group 4] [--rows 32] [--batches 4] [--seed 0]

The real dispatcher and engine on the built-in tiny model, whose replies are as long as drawn (`ForcedLengths`): each task has a
log-normal length of its own, and each attempt at it a log-normal factor (spreads 0.8 and 0.5). A batch is all tasks, so that
from the second on every length is expected by the one before. In lockstep a batch begins when the one before it is complete;
beside a trainer with lag 1 when the one before that is, and both share the rows.

Counts steps, not seconds: a step of few rows costs almost as much as one of many. The bound of a batch is its tokens over the
rows, or its longest attempt; beside a trainer that of all batches together.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch

from redline.config.sections.engine import EngineConfig
from redline.config.sections.rollouts import RolloutsConfig
from redline.engine import EngineSession
from redline.environments.single_turn import SingleTurn
from redline.lab.material.forced_lengths import ForcedLengths
from redline.lab.material.networks import make_network
from redline.launch.engines import make_engine
from redline.rollouts import Chat, Dispatcher, RolloutSetup
from redline.types import EngineStats, Task

MEAN, LONGEST = 60, 480
SPREAD_OF_TASKS, SPREAD_OF_ATTEMPTS = 0.8, 0.5


class Tasks:
    """The same tasks in every epoch."""

    def __init__(self, count: int) -> None:
        self._count = count

    def train(self, index: int) -> Task:
        return Task(f"task/{index % self._count}", [{"role": "user", "content": f"Question {index % self._count}."}])

    def held_out(self, count: int) -> list[Task]:
        return []

    def score(self, task: Task, text: str) -> float:
        return float(len(text))


class Bench:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.network = make_network("builtin:tiny", torch.device("cpu"), torch.float32, seed=0)
        random = np.random.default_rng(asked.seed)
        tasks = np.exp(random.normal(0, SPREAD_OF_TASKS, asked.tasks))
        attempts = np.exp(random.normal(0, SPREAD_OF_ATTEMPTS, (asked.batches, asked.tasks, asked.group)))
        scale = MEAN / np.exp((SPREAD_OF_TASKS**2 + SPREAD_OF_ATTEMPTS**2) / 2)
        drawn = np.clip(scale * tasks[:, None] * attempts, 1, LONGEST).astype(np.int64)
        self.lengths = dict(enumerate(drawn.reshape(-1, asked.group)))
        """Index of a group → tokens of its attempts."""

    def dispatcher(self, *, beside: bool) -> tuple[Dispatcher, ForcedLengths]:
        sizes = EngineConfig(max_num_seqs=self.asked.rows, max_model_len=LONGEST + 64)
        engine = ForcedLengths(make_engine(self.network.decoder, sizes), self.lengths)
        config = RolloutsConfig.model_validate(
            {"task": {"kind": "import", "path": "here:Tasks"}, "group_size": self.asked.group, "max_new_tokens": LONGEST}
        )
        chat = Chat(self.network.tokenizer, None, "")
        setup = RolloutSetup(Tasks(self.asked.tasks), SingleTurn, chat, config, (), seed=self.asked.seed)
        return Dispatcher(EngineSession(engine), setup, beside=beside), engine

    def batch(self, number: int) -> range:
        return range(number * self.asked.tasks, (number + 1) * self.asked.tasks)

    def lockstep(self, *, learns: bool) -> list[tuple[EngineStats, EngineStats]]:
        """Batch after batch; without `learns`, each by a dispatcher that knows of none before it."""
        done = []
        rollouts, engine = self.dispatcher(beside=False)
        for number in range(self.asked.batches):
            if not learns:
                rollouts.close()
                rollouts, engine = self.dispatcher(beside=False)
            before = engine.stats
            rollouts.begin(self.batch(number), number)
            rollouts.finished()
            done.append((before, engine.stats))
        rollouts.close()
        return done

    def beside(self) -> list[tuple[EngineStats, EngineStats]]:
        """The next batch begins when all but one of those before it are complete."""
        rollouts, engine = self.dispatcher(beside=True)
        before, missing = engine.stats, [set(self.batch(number)) for number in range(self.asked.batches)]
        rollouts.begin(self.batch(0), 0)
        for number, waited_for in enumerate(missing):
            if number + 1 < len(missing):
                rollouts.begin(self.batch(number + 1), number)
            while waited_for:
                arrived = {group.index for group in rollouts.finished()}
                for some in missing:
                    some -= arrived
        done = [(before, engine.stats)]
        rollouts.close()
        return done

    def bound(self, *batches: int) -> int:
        """Fewest decode steps of these together. The first token of an attempt comes with its prompt."""
        lengths = np.concatenate([self.lengths[index] for number in batches for index in self.batch(number)]) - 1
        return int(max(lengths.max(), -(-lengths.sum() // self.asked.rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("tasks", 32), ("group", 4), ("rows", 32), ("batches", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    bench = Bench(parser.parse_args())
    numbers = range(bench.asked.batches)
    print(f"{'':44} {'steps':>6} {'bound':>6} {'rows busy':>9}")
    for name, learns in (("lockstep, in the order of the tasks", False), ("lockstep, longest first", True)):
        tell(name, bench.lockstep(learns=learns), sum(bench.bound(number) for number in numbers), bench.asked.rows)
    tell("beside a trainer, longest first", bench.beside(), bench.bound(*numbers), bench.asked.rows)


def tell(name: str, done: Sequence[tuple[EngineStats, EngineStats]], bound: int, rows: int) -> None:
    steps = sum(after.decode_steps - before.decode_steps for before, after in done)
    busy = sum(after.decoded_rows - before.decoded_rows for before, after in done)
    print(f"{name:44} {steps:6} {bound:6} {busy / max(1, steps) / rows:9.0%}", flush=True)


if __name__ == "__main__":
    main()
