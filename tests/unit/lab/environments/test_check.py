"""`redline env check` finds what a run would stumble over, and nothing else."""

from __future__ import annotations

import io
import json
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from redline.environments.driver import Asked, Episode, Exchange, Reply, turn_of
from redline.lab.environments.check import Report, check
from redline.lab.environments.check_table import render
from redline.lab.environments.made import Made
from redline.lab.environments.prompts import MOST_TURNS, prompts
from redline.lab.environments.trials import Plan, Trial, Trials
from redline.types import Reaction, Task

HERE = "test_check"


class Guess:
    """A sound environment: guess a number in three turns."""

    def __init__(self, seed: int, largest: int = 20) -> None:
        self.seed, self.largest = seed, largest

    def train(self, index: int) -> Task:
        return self._task(2 * index)

    def held_out(self, count: int) -> list[Task]:
        return [self._task(2 * index + 1) for index in range(count)]

    def _task(self, number: int) -> Task:
        secret = random.Random(f"{self.seed}/{number}").randint(1, self.largest)
        return Task(f"guess-{number}", [{"role": "user", "content": f"From 1 to {self.largest}?"}], answer=str(secret))

    async def play(self, task, policy):
        messages = list(task.messages)
        for _ in range(3):
            turn = await policy.say(messages)
            if turn.text == task.answer:
                return {"found": 1.0}
            messages += [turn.message, {"role": "user", "content": self.hint(task)}]
        return {"found": 0.0}

    def hint(self, task: Task) -> str:
        return "Not that one."


class RaisesOnOddReplies(Guess):
    async def play(self, task, policy):
        return float(int((await policy.say(task.messages)).text) == 1)


class Forgetful(Guess):
    def hint(self, task: Task) -> str:
        return f"Not that one; {random.random()} is a random number."


class Shared(Guess):
    """Keeps what belongs to an attempt in the environment."""

    async def play(self, task, policy):
        self.said = []
        for _ in range(3):
            self.said.append((await policy.say(task.messages)).text)
        return float(len(self.said))


class Board:
    """An object of a task."""

    def __init__(self) -> None:
        self.moves = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Board) and self.moves == other.moves

    __hash__ = None  # type: ignore[assignment]


class WritesIntoTheTask(Guess):
    async def play(self, task, policy):
        messages = task.messages
        messages += [(await policy.say(messages)).message, {"role": "user", "content": "Sure?"}]
        messages[0]["content"] = "Else?"
        await policy.say(task.messages[:1])
        return 1.0


class WritesIntoAnObject(Guess):
    def _task(self, number: int) -> Task:
        return Task(f"guess-{number}", [{"role": "user", "content": "?"}], answer="1", data={"board": Board()})

    async def play(self, task, policy):
        task.data["board"].moves += 1
        first = {"role": "system", "content": f"Move {task.data['board'].moves}."}
        await policy.say([first, *task.messages])
        return 1.0


class Retold(Guess):
    async def play(self, task, policy):
        turn = await policy.say(task.messages)
        await policy.say(
            [*task.messages, {"role": "assistant", "content": f"I said {turn.text}"}, {"role": "user", "content": "Sure?"}]
        )
        return 1.0


class Rewritten(Guess):
    async def play(self, task, policy):
        turn = await policy.say([{"role": "user", "content": "Turn 1 of 2."}, *task.messages])
        more = [turn.message, {"role": "user", "content": "Sure?"}]
        await policy.say([{"role": "user", "content": "Turn 2 of 2."}, *task.messages, *more])
        return 1.0


class NoNumber(Guess):
    async def play(self, task, policy):
        await policy.say(task.messages)
        return "well done"


class RoleWithoutScore(Guess):
    async def play(self, task, policy):
        await policy.say(task.messages, role="white")
        await policy.say(task.messages, role="black")
        return {"white": 1.0}


class OwnHeldOut(Guess):
    def held_out(self, count: int) -> list[Task]:
        return [self.train(index) for index in range(count)]


class ChangingTasks(Guess):
    def _task(self, number: int) -> Task:
        return Task(f"guess-{number}-{random.random()}", [{"role": "user", "content": "?"}], answer="1")


class Numbered(Guess):
    """Sound, of many tasks, with an array in each."""

    def _task(self, number: int) -> Task:
        return Task(
            f"n-{number}", [{"role": "user", "content": f"{number}?"}], answer="1", data={"board": np.arange(3) + number}
        )


class DrawsInTurn(Numbered):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.rng = random.Random(seed)

    def train(self, index: int) -> Task:
        return self._task(2 * self.rng.randint(0, 10**6))


class Hashed(Numbered):
    def train(self, index: int) -> Task:
        return self._task(2 * (hash(f"{self.seed}/{index}") % 10**6))


class HoldsTrainingOut(Numbered):
    def held_out(self, count: int) -> list[Task]:
        return [replace(self.train(index), id=f"held-out-{index}") for index in range(count)]


class HoldsOneOut(Numbered):
    def held_out(self, count: int) -> list[Task]:
        return [replace(self._task(1), id=f"held-out-{index}") for index in range(count)]


class CountsInTheSystemMessage(Guess):
    async def play(self, task, policy):
        said = []
        for turn in range(3):
            reply = await policy.say([{"role": "system", "content": f"Turn {turn}."}, *task.messages, *said])
            said += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "Again."}]
        return 1.0


class AsksAText(Guess):
    async def play(self, task, policy):
        await policy.say("hello")


class AsksAsAWizard(Guess):
    async def play(self, task, policy):
        await policy.say([{"role": "wizard", "content": "hello"}])


class AsksANumber(Guess):
    async def play(self, task, policy):
        await policy.say([{"role": "user", "content": 5}])


class Anew(Guess):
    async def play(self, task, policy):
        for _ in range(2):
            await policy.say(task.messages)
        return 1.0


class Sleeps(Guess):
    async def play(self, task, policy):
        time.sleep(600)


class Holds(Guess):
    async def play(self, task, policy):
        await policy.say(task.messages)
        time.sleep(0.3)
        return 1.0


class Counting:
    """A game: count up to the task's answer."""

    def __init__(self, seed: int) -> None:
        self.count = 0

    def train(self, index: int) -> Task:
        return Task(f"count-{index}", [], answer=str(index + 3))

    def held_out(self, count: int) -> list[Task]:
        return []

    def reset(self, task: Task) -> str:
        self.count, self.goal = 0, int(task.answer)
        return "Count."

    def step(self, reply: str) -> Reaction:
        self.count += 1
        return Reaction(f"{self.count}", reward={"steps": 1.0}, done=self.count >= self.goal)

    def snapshot(self) -> bytes:
        return f"{self.count} {self.goal}".encode()

    def restore(self, state: bytes) -> None:
        self.count, self.goal = map(int, state.split())


class LosesItsCount(Counting):
    def restore(self, state: bytes) -> None:
        super().restore(state)
        self.count = 0


class EmptySnapshot(Counting):
    def snapshot(self) -> bytes:
        return b""


class PartOfSome(Guess):
    async def play(self, task, policy):
        is_right = (await policy.say(task.messages)).text == task.answer
        return {"correct": 1.0, "bonus": 1.0} if is_right else {"correct": 0.0}


def report_of(kind: type, limit_s: float = 300, tasks: int = 2) -> Report:
    return check(Made(f"{HERE}:{kind.__name__}"), Plan(tasks, limit_s), lambda text: None)


@pytest.fixture(autouse=True)
def _this_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


def test_nothing_is_wrong_with_a_sound_environment() -> None:
    report = report_of(Guess)
    assert (report.problems, report.notes, report.exit_code) == ([], [], 0)
    assert len(report.passed) == 6
    assert report.rewards == {"found": {"least": 0.0, "mean": 0.5, "most": 1.0}}
    assert report.counts["turns_most"] == 3
    assert report.counts["turns_that_go_on"] > 0 == report.counts["turns_that_begin_anew"]
    assert set(report.times_s) >= {"make", "task", "to the first question", "between turns"}


def test_a_game_goes_on_from_a_snapshot_as_it_would_have_gone_on() -> None:
    report = report_of(Counting)
    assert report.problems == []
    assert "a game goes on from a snapshot as it would have gone on" in report.passed
    assert report.rewards["steps"]["most"] == 4.0


def test_a_recipe_is_checked_with_its_tasks() -> None:
    made = Made("recipes/smoke.yaml")
    report = check(made, Plan(2, 10), lambda text: None)
    assert report.problems == []
    assert report.counts["turns_most"] == 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (RaisesOnOddReplies, "play raised ValueError: invalid literal for int"),
        (Forgetful, "played again with the same seed and replies, it asks something else in turn 2: 'Not that one; 0."),
        (LosesItsCount, "a game restored after 1 moves answers move 2 with Reaction(observation='1'"),
        (Shared, "played beside other attempts, it scores"),
        (WritesIntoAnObject, "task guess-0: play changed the task's data: an object in them, which all attempts share"),
        (WritesIntoAnObject, "something else in turn 1: 'Move 2.' instead of 'Move 1.' (message 0)"),
        (Retold, "append `turn.message`"),
        (Rewritten, "message 0 is not what it was in the turn before"),
        (NoNumber, "play returned 'well done', a str; it must return a number"),
        (RoleWithoutScore, "play returned no score for black"),
        (OwnHeldOut, "held-out task guess-0 is a training task as well"),
        (ChangingTasks, "train(0) gives another task in an environment that was made with the same seed"),
        (EmptySnapshot, "snapshot() gives no bytes at all"),
        (DrawsInTurn, "train(1) gives another task when it is asked for again, in another order"),
        (HoldsTrainingOut, "8 of 8 held-out tasks ask what one of the first 8 training tasks asks, under other ids"),
        (HoldsOneOut, "all 8 held-out tasks ask the same"),
        (CountsInTheSystemMessage, "message 0 is not what it was in the turn before"),
        (AsksAText, "`policy.say` was given messages = 'hello', a str"),
        (AsksAsAWizard, "one whose role is 'wizard', not one of system"),
        (AsksANumber, "`policy.say` was given messages[0] = {"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(kind: type, words: str) -> None:
    report = report_of(kind)
    assert report.exit_code == 1
    assert any(words in problem for problem in report.problems), report.problems


def test_tasks_may_hold_arrays() -> None:
    assert report_of(Numbered).problems == []


def test_an_environment_that_holds_nothing_out_or_always_begins_anew_is_noted() -> None:
    assert any("it holds no tasks out" in note for note in report_of(Counting, tasks=1).notes)
    report = report_of(Anew, tasks=1)
    assert any("no turn goes on from an earlier one" in note for note in report.notes)
    assert "prompts that go on from what was said" not in report.passed


def test_a_part_of_the_reward_that_some_scores_lack_is_noted() -> None:
    assert any("the reward part bonus is in 4 of 8 scores" in note for note in report_of(PartOfSome).notes)


def test_what_is_printed_holds_no_terminal_codes() -> None:
    report = Report("x", problems=["task \x1b[2Ja"], notes=["\x07"], rewards={"[/b]\x1b": {"least": 0.0}})
    console = Console(file=io.StringIO(), width=100)
    for part in render(report):
        console.print(part)
    printed = console.file.getvalue()
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert "WRONG  task \N{REPLACEMENT CHARACTER}[2Ja" in printed


def test_tasks_of_hashes_are_found_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    report = check(Made(f"{HERE}:Hashed"), Plan(1, 60, other_process=True), lambda text: None)
    assert ["train(0) gives another task in another process" in problem for problem in report.problems] == [True]


def test_an_attempt_may_write_into_its_own_copy_of_the_task() -> None:
    assert report_of(WritesIntoTheTask).problems == []


def test_an_environment_that_never_ends_is_said_to_and_holds_up_nobody() -> None:
    report = report_of(Sleeps, limit_s=1.0)  # which comes, long before they end
    [problem] = report.problems
    assert "play: did not end within 1 s, at test_check.py:" in problem
    assert ", in play: time.sleep(600)" in problem
    assert report.not_checked == [
        "the same attempt under the same seed",
        "the same attempt beside others",
        "a reward of numbers for each role",
    ]
    assert not set(report.not_checked) & set(report.passed)


class AsksForEver(Guess):
    async def play(self, task, policy):
        while True:
            await policy.say(task.messages)


class AsksForEverInAThread(Guess):
    def play(self, task, policy):
        while True:
            policy.say(task.messages)


@pytest.mark.parametrize("kind", [AsksForEver, AsksForEverInAThread])
def test_where_an_attempt_without_end_was_is_said_and_that_it_goes_on(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.environments.driver.STILL_S", 0.2)
    told: list[str] = []
    report = check(Made(f"{HERE}:{kind.__name__}"), Plan(1, 0.7), told.append)
    assert any(", in play: " in problem and "policy.say(task.messages)" in problem for problem in report.problems)
    assert any(re.search(r"has not ended after \d s and [\d,]+ turns; the limit is 0.7 s \(--limit\)", line) for line in told)


def test_an_environment_that_blocks_the_loop_is_noted() -> None:
    report = report_of(Holds, tasks=1)
    assert report.problems == []
    assert any("kept the event loop for up to " in note for note in report.notes)


def redline(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    from support import processes  # other processes import this file and do not know the folder

    return processes.redline(*arguments, cwd=cwd)


def test_the_verb_prints_one_document_and_exits_with_one(tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text(Path(__file__).read_text())
    done = redline("env", "check", "games:NoNumber", "largest=5", "--json", "--tasks", "1", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert "the same tasks in another process" in report["passed"]
    assert "WRONG  play returned 'well done'" in done.stderr


def test_a_name_that_there_is_not_gets_a_hint(tmp_path: Path) -> None:
    done = redline("env", "check", "diplomazy", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'diplomazy': no such environment" in done.stderr
    assert "hint: " in done.stderr


class ScoresAnother(Guess):
    async def play(self, task, policy):
        await policy.say(task.messages, role="white")
        await policy.say(task.messages, role="black")
        return {"white": 1.0, "black": 0.0, "format": 0.5}


class SameForAll(Guess):
    async def play(self, task, policy):
        await policy.say(task.messages, role="white")
        return 1.0


class NoParts(Guess):
    async def play(self, task, policy):
        await policy.say(task.messages)
        return {}


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("ScoresAnother", "play returned a score for format, and no such role spoke in any attempt: it is left out"),
        ("SameForAll", "roles spoke (white), and the score is not by role: all roles get the same score"),
    ],
)
def test_scores_that_are_odd_are_noted(name: str, note: str) -> None:
    assert note in check(Made(f"{HERE}:{name}", {}, 0), Plan(1), lambda text: None).notes


def test_of_an_attempt_without_end_only_so_many_prompts_are_compared() -> None:
    task = Task("t", [])
    exchange = Exchange(Asked([{"role": "user", "content": "more"}]), turn_of(Reply("no")), 0.0, 0.0)
    trial = Trial("random", task, Episode(task, [exchange] * 50_000), Episode(task))
    assert prompts(Trials([trial]))[:2] == (0, MOST_TURNS - 1)


def test_a_reward_without_parts_is_a_problem() -> None:
    problems = check(Made(f"{HERE}:NoParts", {}, 0), Plan(1), lambda text: None).problems
    assert "play returned {}, a reward without parts" in problems


def test_the_exit_code_is_what_was_found_when_nobody_reads_the_whole_output() -> None:
    command = f"{sys.executable} -m redline env check guess_number --tasks 1 2>/dev/null | true; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0
