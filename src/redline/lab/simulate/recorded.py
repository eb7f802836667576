"""What a simulation needs of a recorded run: how long attempts are, what each stage takes, how the run was set up."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from redline.errors import RunFolderError
from redline.lab.doctor.facts import FEWEST, TRAINER_WAITS, Facts
from redline.lab.simulate.costs import EngineCost, Prompts, Replies, TrainerCost, engine_cost, trainer_cost
from redline.runs.run import Run
from redline.runs.stored import StoredRun
from redline.telemetry.summary.timeline import PREFIX

MOST_STORED = 20_000
"""Attempts that are read, of the newest steps: a store may hold millions."""
FEWEST_REPLIES = 32
"""That tell what a row of the engine costs."""
_SIMULATED = (
    *TRAINER_WAITS, "generation", "training", "environment", "reward", "weight_sync",
    "wait_for_engine", "wait_for_environments", "wait_for_rewards",
)  # fmt: skip
"""Phases of the main thread that the simulation makes itself; everything else is `other_s`."""


@dataclass(slots=True, frozen=True)
class Group:
    """A group as it was sampled."""

    tokens: tuple[int, ...]
    """Sampled in each attempt."""
    environment_s: tuple[float, ...]
    """Seconds of each attempt between its turns and for its reward."""
    prompt_tokens: int
    """Tokens of its prompt that were computed for the first attempt, without those that the prefix cache had."""
    again_tokens: float = 0.0
    """Tokens of its prompt, and of later turns, that were computed for each further attempt."""

    @property
    def mean_tokens(self) -> float:
        return sum(self.tokens) / len(self.tokens)


@dataclass(slots=True, frozen=True)
class Recording:
    """A run, as a simulation takes it."""

    groups: tuple[Group, ...]
    engine: EngineCost
    trainer: TrainerCost
    sync_s: float
    other_s: float
    """Seconds of a step in the main thread for everything else."""
    trained_share: float
    """Tokens through the trainer over those sampled: prompts come on top, and count once per micro-batch."""
    config: dict[str, Any]
    step_s: np.ndarray
    """As measured, of the steady steps."""
    begin_s: float = 0.0
    """Seconds that the host takes to begin an attempt, while its engine waits."""
    is_scored_last: bool = False
    """Whether the source scores a step's attempts after sampling: twice as many take twice as long."""

    @classmethod
    def of(cls, run: Run) -> Recording:
        """Read a run. Raises `RunFolderError` where it recorded too little. Blocks for as long as its logs take to read."""
        facts = Facts.of(run)
        if facts.num_steps < FEWEST:
            raise RunFolderError(
                f"{run.folder.shown}: {facts.num_steps} steps after the first ones are too few to simulate from",
                f"record at least {FEWEST + 2} steps",
            )
        step_s = facts.steps["run/step_s"][np.isfinite(facts.steps["run/step_s"])]
        if not step_s.sum() > 0:
            raise RunFolderError(f"{run.folder.shown}: its steps do not say how long they took", "record a run again")
        rows = _stored(run, facts, MOST_STORED)
        if not rows:
            raise RunFolderError(
                f"{run.folder.shown}: no attempt is stored", "set buffer.max_bytes so that the store keeps any"
            )
        groups = _groups(rows, facts)
        engine = _engine(rows, groups, facts)
        if engine.decode_s(1) <= 0:
            raise RunFolderError(f"{run.folder.shown}: no time of decoding is recorded", "simulate a run whose engine sampled")
        return cls(
            groups=groups,
            engine=engine,
            trainer=trainer_cost(facts.phase("training"), _column(facts, "trainer/tokens")),
            sync_s=float((facts.phase("weight_sync")).mean()),
            other_s=_other_s(facts),
            trained_share=float(_column(facts, "trainer/tokens").mean() / max(1.0, _sampled_per_step(groups, facts))),
            config=dict(run.config),
            step_s=step_s,
            begin_s=_begin_s(rows, facts),
            is_scored_last=_scored_s(facts) > 0,
        )


def engine_cost_of(run: Run, facts: Facts, most_stored: int) -> EngineCost:
    """What a step of the engine costs, where nothing else is asked of the run: no attempt of it need be stored. Raises
    `RunFolderError` where it recorded no time of decoding."""
    rows = _stored(run, facts, most_stored)
    engine = _engine(rows, _groups(rows, facts) if rows else (), facts)
    if engine.decode_s(1) <= 0:
        raise RunFolderError(f"{run.folder.shown}: no time of decoding is recorded", "take a run whose engine sampled")
    return engine


def _engine(rows: list[dict[str, Any]], groups: tuple[Group, ...], facts: Facts) -> EngineCost:
    engines = max(1, int(facts.setting("placement.engines", 0)))  # their steps and tokens are recorded as sums
    passes = _passes(groups, facts, engines) if groups else 1.0
    prefill = _prefill_s(rows, facts, passes)
    return engine_cost(
        seconds=np.maximum(0.0, facts.phase("generation", "rollouts") - prefill),
        steps=_column(facts, "engine/steps") / engines,
        tokens=_column(facts, "engine/generated_tokens") / engines,
        prompts=Prompts(float(prefill.mean()), float(_column(facts, "engine/prompt_tokens").mean()) / engines, passes),
        most_rows=_most_rows(facts),
        replies=_replies(rows, facts, engines),
    )


def _column(facts: Facts, metric: str) -> np.ndarray:
    return np.nan_to_num(facts.steps.get(metric, np.zeros(facts.num_steps)))


def _prefill_s(rows: list[dict[str, Any]], facts: Facts, passes: float) -> np.ndarray:
    """Seconds of prompts in each step. Engines in processes of their own keep their spans to themselves: then as long as the
    attempts say, for each pass."""
    own = _column(facts, "engine/prefill_s")
    if own.any() or not facts.setting("placement.engines", 0):
        return own
    turns = [turn for row in rows for turn in row["turns"]]
    usual = float(np.median([turn["prefill_s"] or 0.0 for turn in turns])) if turns else 0.0
    return np.full(facts.num_steps, usual * passes)


def _passes(groups: tuple[Group, ...], facts: Facts, engines: int) -> float:
    """How often an engine takes prompts in a step, on average, as the simulation counts it: once when the step begins, and
    where rows are fewer than attempts, each time that some end while others wait."""
    per_step, most = facts.setting("rollouts.groups_per_step", 1), facts.setting("engine.max_num_seqs", 256)
    attempts = [
        [tokens for group in groups[at : at + per_step] for tokens in group.tokens] for at in range(0, len(groups), per_step)
    ]
    return float(np.mean([_fills(own[place::engines], most) for own in attempts for place in range(engines)]))


def _fills(tokens: list[int], most: int) -> int:
    """How often free rows are given to attempts that wait, where `most` answers are sampled at once."""
    rows, waiting, fills = sorted(tokens[:most]), deque(tokens[most:]), 1
    while waiting:
        now, fills = rows[0], fills + 1
        while waiting and rows[0] == now:
            heapq.heapreplace(rows, now + waiting.popleft())
    return fills


def _together(rows: list[dict[str, Any]], facts: Facts) -> dict[int, list[dict[str, Any]]]:
    """Step → its attempts, for steps whose replies all began together."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in rows if facts.is_lockstep else ():
        steps.setdefault(row["step"], []).append(row)
    attempts = facts.setting("rollouts.groups_per_step", 1) * facts.setting("rollouts.group_size", 1)
    return {step: each for step, each in steps.items() if len(each) == attempts and _began_together(each)}


def _begin_s(rows: list[dict[str, Any]], facts: Facts) -> float:
    """What a step waits for environments beyond what these took after its replies, over its attempts: their prompts are made
    before the engine has any work, and their ends are seen to after it."""
    waited = dict(zip(_column(facts, "step"), facts.phase("wait_for_environments"), strict=True))
    found = []
    for step, attempts in _together(rows, facts).items():
        turns = [attempt["turns"][0] for attempt in attempts]
        sampled = [turn["decode_s"] or 0.0 for turn in turns]
        over = [
            end + (turn["environment_s"] or 0.0) + (row["score_s"] or 0.0)
            for end, turn, row in zip(sampled, turns, attempts, strict=True)
        ]
        if waited.get(step):
            found.append((waited[step] - (max(over) - max(sampled))) / len(attempts))
    return max(0.0, float(np.mean(found))) if found else 0.0


def _replies(rows: list[dict[str, Any]], facts: Facts, engines: int) -> Replies | None:
    """The replies of steps in which all began together; None where they do not tell what a row costs."""
    found = [_rows_of_steps(each, engines) for each in _together(rows, facts).values()]
    if not found:
        return None
    seconds, num_steps, summed = np.concatenate(found, axis=1)
    usual = summed / num_steps
    if len(usual) < FEWEST_REPLIES or usual.max() < 1.5 * usual.min():
        return None
    return Replies(seconds, num_steps, summed)


def _began_together(rows: list[dict[str, Any]]) -> bool:
    """Whether each is one reply, and none waited for another to end."""
    turns = [row["turns"][0] for row in rows if len(row["turns"]) == 1]
    longest_s = max((turn["decode_s"] or 0.0 for turn in turns), default=0.0)
    return len(turns) == len(rows) and all((turn["queue_s"] or 0.0) < 0.1 * longest_s for turn in turns)


def _rows_of_steps(rows: list[dict[str, Any]], engines: int) -> np.ndarray:
    """float[3, replies]: seconds from the first token of each reply to its last, steps of the engine, their rows in all."""
    turns = [row["turns"][0] for row in rows]
    steps = np.array([turn["end"] - turn["start"] - 1 for turn in turns])
    at_once = (steps[:, None] >= np.arange(1, steps.max() + 1)).sum(axis=0) / engines
    summed = np.concatenate([[0.0], np.cumsum(at_once)])[steps]
    return np.stack([np.array([turn["decode_s"] or 0.0 for turn in turns]), steps, summed])[:, steps > 0]


def _scored_s(facts: Facts) -> float:
    """Seconds from the last reply of a step to its last reward, where the source scores after sampling, in lockstep. Attempts
    of environments say that themselves."""
    if facts.setting("rollouts.environment.name") or not facts.is_lockstep:
        return 0.0
    return float(facts.phases(("reward", "wait_for_rewards")).mean())


def _stored(run: Run, facts: Facts, most: int) -> list[dict[str, Any]]:
    """Rows of attempts that the newest steady steps were trained on, `most` or a step more, by group; of other steps
    where the store has none of those. The first attempts wait for what is loaded and compiled."""
    stored = StoredRun(run.folder.shown)
    kept = stored.trained_steps()
    steady = set(_column(facts, "step").tolist())
    found: list[dict[str, Any]] = []
    for step in sorted([step for step in kept if step in steady] or kept, reverse=True):
        found += _rows(stored.table(step))
        if len(found) >= most:
            break
    return sorted(found, key=lambda row: row["group"])


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table, with how many tokens of each were sampled instead of a value for every token."""
    rows = table.select(["step", "group", "attempt", "turns", "score_s"]).to_pylist()
    masks = (mask.values.to_numpy() for mask in table["loss_mask"])
    return [{**row, "length": len(mask), "sampled": int(mask.sum())} for row, mask in zip(rows, masks, strict=True)]


def _groups(rows: list[dict[str, Any]], facts: Facts) -> tuple[Group, ...]:
    found: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for row in rows:
        found.setdefault(row["group"], {}).setdefault(row["attempt"], []).append(row)
    scored_s = _scored_s(facts)
    groups = tuple(_group(attempts, scored_s) for attempts in found.values())
    asked = max(1.0, float(np.mean([group.prompt_tokens for group in groups])))
    computed = float(_column(facts, "engine/prompt_tokens").mean()) / facts.setting("rollouts.groups_per_step", 1)
    others = float(np.mean([len(group.tokens) for group in groups])) - 1
    share, again = computed / asked, 0.0
    if others > 0 and share > 1:
        share, again = 1.0, (computed - asked) / others
    return tuple(replace(group, prompt_tokens=round(group.prompt_tokens * share), again_tokens=again) for group in groups)


def _group(attempts: dict[int, list[dict[str, Any]]], scored_s: float) -> Group:
    tokens, environment, prompts = [], [], []
    for rows in attempts.values():
        tokens.append(sum(row["sampled"] for row in rows))
        turns = [turn for row in rows for turn in row["turns"]]
        own_s = max(row["score_s"] or 0.0 for row in rows)
        environment.append(sum(turn["environment_s"] or 0.0 for turn in turns) + (own_s or scored_s))
        prompts.append(sum(row["length"] - row["sampled"] for row in rows))
    return Group(tuple(tokens), tuple(environment), min(prompts))


def _most_rows(facts: Facts) -> float:
    """Rows of an engine that had work at once: a whole batch begins together."""
    attempts = facts.setting("rollouts.groups_per_step", 8) * facts.setting("rollouts.group_size", 8)
    at_once = attempts * (facts.setting("buffer.max_lag", 0) + 1) / max(1, facts.setting("placement.engines", 0))
    return float(min(facts.setting("engine.max_num_seqs", 256), at_once))


def _sampled_per_step(groups: tuple[Group, ...], facts: Facts) -> float:
    mean = float(np.mean([sum(group.tokens) for group in groups]))
    return mean * float(facts.setting("rollouts.groups_per_step", 1))


def _other_s(facts: Facts) -> float:
    names = {name.removeprefix(PREFIX).removesuffix("_s") for name in facts.steps if name.startswith(PREFIX)}
    return float(facts.phases(sorted(names - set(_SIMULATED))).mean()) if names else 0.0
