"""Whether an environment's tasks are what a run relies on: the same in any order and any process, with others held out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from redline.errors import boundary
from redline.lab.environments.made import Made
from redline.lab.environments.trials import Plan, limited, said
from redline.ports import TaskSource
from redline.rollouts.tasks.alike import alike, digest, question
from redline.rollouts.tasks.checks import check_task
from redline.types import Task

HELD_OUT = 8
"""Held-out tasks that are asked for; as many training tasks are compared with them."""


@dataclass(slots=True)
class Looked:
    """What was found about the tasks."""

    tasks: list[Task] = field(default_factory=list)
    """Training tasks, as far as they can be used."""
    seconds: list[float] = field(default_factory=list)
    """How long each took."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def look_at_tasks(made: Made, objects: tuple[Any, Any], plan: Plan) -> Looked:
    """Ask two environments that were made alike for tasks. Blocks for `plan.limit_s` per call at most."""
    first, second = (made.tasks(one) for one in objects)
    found = Looked()
    for index in range(plan.tasks):
        with boundary() as caught:
            task, took_s = _asked(first, index, plan)
            found.tasks.append(check_task(task, f"train({index})", bare=True))
            found.seconds.append(took_s)
            if not alike(_asked(second, index, plan)[0], task):
                found.problems.append(f"train({index}) gives another task in an environment that was made with the same seed")
        if caught.error is not None:
            found.problems.append(said(f"train({index})", caught.error))
            break
    if found.tasks and not found.problems:
        found.problems += _asked_again((first, second), found.tasks, plan)
    with boundary() as caught:
        _look_at_held_out(first, found, plan)
    if caught.error is not None:
        found.problems.append(said(f"held_out({HELD_OUT})", caught.error))
    return found


def _asked(source: TaskSource, index: int, plan: Plan) -> tuple[Task, float]:
    return limited(f"train({index})", partial(source.train, index), plan.limit_s)


def _asked_again(sources: Sequence[TaskSource], tasks: Sequence[Task], plan: Plan) -> list[str]:
    """What differs when the same tasks are asked for in the other order: a run that is resumed asks so."""
    for index, task in reversed(list(enumerate(tasks))):
        for source in sources:
            with boundary() as caught:
                if not alike(_asked(source, index, plan)[0], task):
                    return [
                        f"train({index}) gives another task when it is asked for again, in another order: make it of the seed"
                        ' and the index alone, as with `Random(f"{seed}/{index}")`'
                    ]
            if caught.error is not None:
                return [said(f"train({index}), asked for again,", caught.error)]
    return []


# ── held-out tasks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _look_at_held_out(source: TaskSource, found: Looked, plan: Plan) -> None:
    held_out, _ = limited(f"held_out({HELD_OUT})", lambda: list(source.held_out(HELD_OUT)), plan.limit_s)
    for index, task in enumerate(held_out):
        check_task(task, f"held_out({HELD_OUT})[{index}]", bare=True)
    if not held_out:
        found.notes.append("it holds no tasks out: a run cannot be evaluated on tasks that it was not trained on")
        return
    known = {(task.id, question(task)) for task in found.tasks}
    same = [task.id for task in held_out if (task.id, question(task)) in known]
    found.problems += [
        f"held-out task {name} is a training task as well: an evaluation would ask what training has shown" for name in same
    ]
    asked = [question(task) for task in held_out]
    if len(asked) > 1 and len(set(asked)) == 1:
        found.problems.append(f"all {len(asked)} held-out tasks ask the same: an evaluation would measure one question")
    if not same:
        _look_for_questions(asked, _training_questions(source, found.tasks, plan), found)


def _training_questions(source: TaskSource, tasks: Sequence[Task], plan: Plan) -> list[str]:
    """What the first training tasks ask, as many as are held out."""
    asked = [question(task) for task in tasks]
    with boundary():  # a source may have fewer
        asked += [question(_asked(source, index, plan)[0]) for index in range(len(asked), HELD_OUT)]
    return asked


def _look_for_questions(held_out: Sequence[str], trained: Sequence[str], found: Looked) -> None:
    """Training tasks that come twice themselves are drawn of few: there a question that is held out as well is chance."""
    both = [one for one in held_out if one in trained]
    if not both or len(set(trained)) < len(trained):
        return
    text = f"{len(both)} of {len(held_out)} held-out tasks ask what one of the first {len(trained)} training tasks asks"
    if 2 * len(both) >= len(held_out):
        found.problems.append(f"{text}, under other ids: an evaluation would ask what training has shown")
    else:
        found.notes.append(text)


# ── another process ────────────────────────────────────────────────────────────────────────────────────────────────────


class OtherProcess:
    """Asks for the same tasks in a process of its own, in which texts have other hashes, while attempts are played here."""

    def __init__(self, made: Made, count: int) -> None:
        """Start it. Does not block."""
        wanted = json.dumps([made.name, dict(made.params), made.seed, list(made.overrides), count], default=str)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "redline.lab.environments.tasks", wanted],
            env=os.environ | {"PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def problems(self, tasks: Sequence[Task], limit_s: float) -> list[str] | None:
        """What differs there, in sentences; None where it could not be found out. Blocks for `limit_s` at most."""
        try:
            text, _ = self._process.communicate(timeout=limit_s)
            there = json.loads(text.splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError):
            return None
        finally:
            self._process.kill()
        return list(_other_tasks(tasks, there))


def _other_tasks(tasks: Sequence[Task], there: Sequence[str]) -> Iterator[str]:
    for index, (task, other) in enumerate(zip(tasks, there, strict=False)):
        if digest(task) != other:
            yield (
                f"train({index}) gives another task in another process: `hash` of a text, and the order of a set, differ from"
                " process to process; use `Random(text)` or `hashlib`, and sort"
            )
            return


def main(wanted: str) -> None:
    """What the other process does: print a digest of each task."""
    *of_what, count = json.loads(wanted)
    made = Made(*of_what)
    source = made.tasks(made.make())
    print(json.dumps([digest(source.train(index)) for index in range(count)]), flush=True)
    os._exit(0)  # whatever threads and processes the environment has


if __name__ == "__main__":
    main(sys.argv[1])
