"""What a run measures of itself: each number is explained in docs/observability.md, and what is explained there is measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.processes import only_run, rows, succeed, write_letters

from redline.telemetry import RunFolder
from redline.telemetry.machine.nvml import FIELDS
from redline.telemetry.summary.phases import TRAINER_PARTS

PAGE = ROOT / "docs" / "observability.md"
FILES = ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl")
OF_EVERY_ROW = {"step", "time", "host"}


@dataclass
class Run:
    folder: RunFolder
    summary: dict[str, Any]

    def rows(self, file: str) -> list[dict[str, Any]]:
        return rows(self.folder.path / file)


@pytest.fixture(scope="module")
def lockstep(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("lockstep"), run={"steps": 4})


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Rollouts beside the trainer, which corrects for their lag; a critic, a reference and a known peak."""
    return run(
        tmp_path_factory.mktemp("everything"),
        run={"steps": 4},
        buffer={"max_lag": 2},
        trainer={"algorithm": "ppo", "kl_coef": 0.1},
        telemetry={"peak_tflops": 1.0},
    )


GAME = """
from redline import Task


class Game:
    def __init__(self, seed=0):
        self.plays = 0

    def train(self, index):
        return Task(f"game/{index}", [{"role": "user", "content": f"round {index}"}])

    def held_out(self, count):
        return [Task(f"held/{i}", [{"role": "user", "content": f"held {i}"}]) for i in range(count)]

    async def play(self, task, policy):
        self.plays += 1
        play = self.plays
        white = await policy.say(task.messages, role="white")
        again = [*task.messages, white.message, {"role": "user", "content": "and now?"}]
        white = await policy.say(again, role="white")
        black = await policy.say([{"role": "user", "content": "your turn"}], role="black")
        if play % 7 == 0:
            raise RuntimeError("the board fell over")
        return {"white": len(set(white.text)) / 8, "black": len(set(black.text)) / 8}
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A game of two roles, of which some attempts fail."""
    folder = tmp_path_factory.mktemp("played")
    (folder / "game.py").write_text(GAME)
    rollouts = {"environment": {"name": "game:Game", "retries": 0}, "group_size": 4, "groups_per_step": 4}
    rollouts |= {"max_new_tokens": 8, "evaluation": {"num_tasks": 2, "every": 2}}
    settings = {"name": "game", "steps": 3, "device": "cpu", "num_threads": 1}
    recipe = {"model": {"path": "builtin:tiny"}, "rollouts": rollouts, "run": settings, "buffer": {"max_lag": 1}}
    (folder / "game.yaml").write_text(json.dumps(recipe))
    summary = json.loads(succeed("train", "game.yaml", "--json", cwd=folder).splitlines()[-1])
    return Run(only_run(folder), summary)


def run(folder: Path, **sections: dict[str, Any]) -> Run:
    telemetry = {"sample_every_s": 0.05} | sections.pop("telemetry", {})
    sections["run"] = {"name": "letters", "num_threads": 1} | sections["run"]
    recipe = write_letters(folder, telemetry=telemetry, **sections)
    summary = json.loads(succeed("train", recipe.name, "--json", cwd=folder).splitlines()[-1])
    return Run(only_run(folder), summary)


# ── the page ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Explained:
    name: str
    only_where: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """Words in capitals stand for any name."""
        return re.compile(re.sub(r"[A-Z]+", r"[\\w-]+", self.name.replace(".", r"\.")))


def explained(file: str) -> list[Explained]:
    """The table under the file's heading."""
    _, _, after = PAGE.read_text().partition(f"\n### {file}\n")
    table = re.split(r"\n#+ ", after)[0]
    found = re.findall(r"^\| `([^`]+)` \|[^|]*\|[^|]*\| *([^|]*?) *\|$", table, re.MULTILINE)
    return [Explained(name, only_where) for name, only_where in found]


def unexplained(run: Run, file: str) -> set[str]:
    patterns = [entry.pattern for entry in explained(file)]
    keys = {key for row in run.rows(file) for key in row} - OF_EVERY_ROW
    return {key for key in keys if not any(pattern.fullmatch(key) for pattern in patterns)}


def missing(runs: list[Run], file: str, entries: list[Explained]) -> set[str]:
    keys = {key for run in runs for row in run.rows(file) for key in row}
    return {entry.name for entry in entries if not any(entry.pattern.fullmatch(key) for key in keys)}


@pytest.mark.parametrize("file", FILES)
def test_every_number_is_explained(lockstep: Run, everything: Run, played: Run, file: str) -> None:
    assert unexplained(lockstep, file) == unexplained(everything, file) == unexplained(played, file) == set()


@pytest.mark.parametrize("file", FILES)
def test_what_is_explained_without_a_condition_is_in_every_run(lockstep: Run, everything: Run, file: str) -> None:
    always = [entry for entry in explained(file) if not entry.only_where]
    assert always, f"no table for {file}"
    assert missing([lockstep], file, always) == missing([everything], file, always) == set()


@pytest.mark.parametrize("file", FILES)
def test_what_is_explained_with_a_condition_is_there_where_it_holds(
    lockstep: Run, everything: Run, played: Run, file: str
) -> None:
    elsewhere = ("on a GPU", "there are children", "something is offloaded", "any were dropped", "any had one")
    elsewhere += ("the task says which are right", "some were", "games run in processes", "rewards run in processes")
    elsewhere += ("the kernel counts it", "the model has experts", "a task came again", "tokens were guessed")
    elsewhere += ("several ranks train",)
    here = [entry for entry in explained(file) if entry.only_where and not entry.only_where.startswith(elsewhere)]
    assert missing([lockstep, everything, played], file, here) == set()


def test_a_game_counts_attempts_and_its_environments_lane_accounts_for_its_time(played: Run) -> None:
    rows = played.rows("metrics.jsonl")
    assert sum(row["rollouts/attempts"] for row in rows) == 4 * sum(row["rollouts/groups"] for row in rows)
    failed = sum(row["rollouts/failures"] for row in rows)
    assert failed == sum(row.get("rollouts/failures_environment", 0) for row in rows) > 0
    assert played.summary["failures_by_kind"][0]["attempts"] == failed
    assert {row["rollouts/turns_max"] for row in rows if row["rollouts/groups"]} == {3}
    lanes = json.loads(played.folder.ledger.read_text())["lanes"]
    assert not [name for name in lanes if "/task" in name]
    lane = lanes["environments"]
    assert lane["unaccounted_ns"] < 0.3 * lane["wall_ns"]  # moments, of which a busy machine makes long ones
    assert {"rollouts.environment", "rollouts.prompts", "rollouts.parse", "wait.for_replies"} <= lane["rows"].keys()


def test_what_a_gpu_tells_is_explained() -> None:
    named = {entry.name for entry in explained("samples.jsonl") if entry.name.startswith("gpu/")}
    assert named == {f"gpu/N/{name}" for name in FIELDS}


# ── the numbers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def each_row(*runs: Run) -> Iterator[dict[str, Any]]:
    for one in runs:
        yield from one.rows("metrics.jsonl")


def test_percentiles_rise_and_latencies_contain_their_parts(lockstep: Run, everything: Run) -> None:
    for row in each_row(lockstep, everything):
        for key in [key for key in row if key.endswith("_p50_s") and row[key] is not None]:
            assert row[key] <= row[key.replace("p50", "p90")] <= row[key.replace("p50", "p99")]
        if row["rollouts/groups"]:
            assert row["engine/queue_p50_s"] <= row["engine/first_token_p50_s"] <= row["rollouts/attempt_latency_p50_s"]
            assert row["rollouts/attempt_latency_p50_s"] <= row["rollouts/latency_p99_s"]


def test_the_trainers_parts_sum_to_its_time_and_mfu_is_operations_over_the_peak(everything: Run) -> None:
    for row in each_row(everything):
        parts = {key: row[key] for key in row if re.fullmatch(r"trainer/\w+(?<!_per)_s", key)}
        assert {f"trainer/{part}_s" for part in (*TRAINER_PARTS, "reference", "values", "critic")} <= parts.keys()
        assert sum(parts.values()) == pytest.approx(row["time/trainer_s"], rel=1e-6)
        assert row["trainer/mfu"] == pytest.approx(row["trainer/flops_per_s"] / 1e12)
        assert 0 < row["trainer/mfu"] < 1


def test_nothing_is_padded_and_the_cache_was_used(lockstep: Run, everything: Run) -> None:
    for row in each_row(lockstep, everything):
        assert row["trainer/padding_tokens"] == 0
        assert row["trainer/imbalance"] < 1.5
        if row["engine/generated_tokens"]:  # beside a trainer, all may be there before the last steps
            assert 0 < row["engine/kv_use_peak"] < 1
            assert row["engine/batch_size_mean"] <= 256
    for row in each_row(lockstep):
        assert row["engine/generated_tokens"]
        assert row["engine/batch_size_mean"] >= 1


def test_in_lockstep_the_engine_generates_what_arrives(lockstep: Run) -> None:
    for row in each_row(lockstep):
        assert row["engine/generated_tokens"] == row["engine/new_tokens"]
        assert row["buffer/policy_lag_max_steps"] == row["buffer/policy_lag_p50_steps"] == 0


def test_lag_is_at_most_what_the_recipe_allows(everything: Run) -> None:
    lags = [row["buffer/policy_lag_max_steps"] for row in each_row(everything)]
    assert max(lags) <= 2
    assert all(row["buffer/policy_lag_p50_steps"] <= row["buffer/policy_lag_max_steps"] for row in each_row(everything))


def test_samples_cover_the_run_and_show_its_memory(lockstep: Run) -> None:
    samples, steps = lockstep.rows("samples.jsonl"), lockstep.rows("metrics.jsonl")
    assert samples[0]["time"] <= steps[-1]["run/time_s"] <= samples[-1]["time"]
    assert samples[-1]["step"] == len(steps)
    last = samples[-1]
    kinds = ("weights", "kv_cache", "gradients", "optimizer", "other")
    assert all(last[f"memory/{kind}_bytes"] > 0 for kind in kinds)
    assert sum(last[f"memory/{kind}_bytes"] for kind in kinds) == pytest.approx(last["host/rss_bytes"], rel=0.05)


def test_the_sampler_is_a_lane_that_is_accounted_for(lockstep: Run) -> None:
    lane = json.loads(lockstep.folder.ledger.read_text())["lanes"]["sampler"]
    assert lane["rows"].keys() == {"telemetry.sample", "wait.for_next_sample"}
    assert lane["unaccounted_ns"] < 0.3 * lane["wall_ns"]


def test_the_summary_ends_with_verdicts(lockstep: Run) -> None:
    found = {verdict["name"]: verdict for verdict in lockstep.summary["targets"]}
    assert found["padding"]["met"] is True
    assert found["weight sync"]["met"] is (found["weight sync"]["value"] < 2.0)
    assert (found["GPU utilisation"]["met"], found["GPU utilisation"]["value"]) == (None, None)
    assert found["peak memory"]["value"] > 0


def test_no_samples_are_taken_where_none_are_wanted(tmp_path: Path) -> None:
    quiet = run(tmp_path, run={"steps": 1}, telemetry={"sample_every_s": 0})
    assert not quiet.folder.samples.exists()
    [memory] = [verdict for verdict in quiet.summary["targets"] if verdict["name"] == "peak memory"]
    assert memory["met"] is None
