"""The environment `code`: the policy answers with a program, which is run against the task's tests. See docs/code.md."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from redline.environments.code.checks import read_tests
from redline.environments.code.examine import Report, examine, program_of
from redline.environments.code.inside.cell import Limits
from redline.environments.code.problems.draw import BuiltInProblems
from redline.environments.code.protections import check_required, in_words
from redline.environments.code.sandbox import Program, Sandbox
from redline.errors import BudgetError, ConfigError
from redline.ports import Policy, Score
from redline.types import Message, Task

_LOG = logging.getLogger(__name__)


class CodeRows:
    """Runs the policy's programs against the tests that stand in a task's data. Implements `ports.Environment`."""

    def __init__(
        self,
        *,
        seed: int = 0,
        max_turns: int = 1,
        time_s: float = 5.0,
        memory_mb: int = 512,
        files_mb: int = 16,
        output_kb: int = 64,
        processes: int = 16,
        runs_at_once: int | None = None,
        command: Sequence[str] = (),
        file: str = "answer.py",
        packages: Sequence[str] = (),
        tests_field: str = "tests",
        protection: Literal["auto", "full"] = "auto",
    ) -> None:
        """`max_turns` tries at a program, each after the first with the error of the one before. The limits are per run of a
        program: seconds, memory of each process, files, output, processes and threads. `runs_at_once` programs are under way
        together; as many as there are cores, where nothing is said. `command` runs programs of another language from the file
        `file`. `packages` are folders from which programs may import. With `protection` full, a machine that cannot give every
        protection is refused."""
        given = {"max_turns": max_turns, "time_s": time_s, "memory_mb": memory_mb, "files_mb": files_mb, "output_kb": output_kb}
        _check_positive({**given, "processes": processes, "runs_at_once": runs_at_once or 1})
        _check_lists({"command": command, "packages": packages})
        for path in packages:
            if not os.path.isdir(path):
                raise ConfigError(f"rollouts.environment.params.packages: no folder {path}", "name folders that hold packages")
        self._seed = seed
        self._max_turns, self._tests_field, self._protection = max_turns, tests_field, protection
        self._command, self._file = tuple(command), file
        self._sandbox = Sandbox(Limits(time_s, memory_mb, files_mb, output_kb, processes), packages=packages)
        self._pool = ThreadPoolExecutor(runs_at_once or os.cpu_count() or 1, thread_name_prefix="code")
        self._is_checked = False

    async def play(self, task: Task, policy: Policy) -> Score:
        """Up to `max_turns` programs, as many as the attempt's budget allows; the reward is that of the last."""
        tests = read_tests(task.data.get(self._tests_field), f"task {task.id}: {self._tests_field}")
        messages: list[Message] = [*task.messages]
        report: Report | None = None
        for _ in range(self._max_turns):
            try:
                turn = await policy.say(messages)
            except BudgetError:
                if report is None:
                    raise
                break
            program = Program(program_of(turn.text), self._command, self._file)
            report = await asyncio.get_running_loop().run_in_executor(self._pool, self._examine, program, tests)
            if report.is_correct:
                break
            messages += [turn.message, {"role": "user", "content": report.feedback()}]
        assert report is not None, "max_turns is at least 1"
        return report.parts()

    def notes(self) -> list[str]:
        """Lines for `redline env check`: each protection, and whether it is on. Starts the sandbox."""
        return in_words(self._sandbox.protections)

    def close(self) -> None:
        """End the sandbox and what runs in it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._sandbox.close()

    def _examine(self, program: Program, tests: Any) -> Report:
        if not self._is_checked:
            self._is_checked = True
            check_required(self._sandbox.protections, self._protection)
            _LOG.info("programs are run with: %s", "; ".join(self.notes()))
        return examine(self._sandbox, program, tests)


class Code(CodeRows):
    """The same with problems of its own."""

    def train(self, index: int) -> Task:
        """Built-in problem number `index`; the same index always gives the same problem."""
        return BuiltInProblems(self._seed).train(index)

    def held_out(self, count: int) -> Sequence[Task]:
        """Built-in problems that `train` never returns; the same whatever the seed."""
        return BuiltInProblems(self._seed).held_out(count)


def _check_lists(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, str) or not all(isinstance(one, str) for one in value):
            raise ConfigError(
                f"rollouts.environment.params.{name} = {value!r}: not a list of texts", 'write ["sh", "answer.sh"]'
            )


def _check_positive(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"rollouts.environment.params.{name} = {value!r}: not a positive number", "give a number above 0")
