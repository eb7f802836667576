"""Puts a program to its tests and says how it did: parts of a reward, and words for another try."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from redline.environments.code.checks import Assert, Call, Example, Test, same_output, same_value
from redline.environments.code.sandbox import Program, Ran, Sandbox
from redline.errors import TaskError

SHOWN = 600
"""Characters of an error or an output that the policy is shown, and of an input."""
_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


@dataclass(slots=True, frozen=True)
class Outcome:
    """How one test went."""

    passed: bool
    what: str = ""
    """The input or the call, where it failed. What was expected is never said: a next try could just print it."""
    problem: str = ""
    """An error, or that a limit was met; empty where the program only gave something else."""
    got: str = ""


@dataclass(slots=True, frozen=True)
class Report:
    """How a program did in all its tests."""

    outcomes: Sequence[Outcome]

    @property
    def is_correct(self) -> bool:
        return all(outcome.passed for outcome in self.outcomes)

    def parts(self) -> dict[str, float]:
        """`passed`: the share of the tests. `correct`: 1 where all passed. `runs`: 1 where none had an error or met a limit."""
        passed = sum(outcome.passed for outcome in self.outcomes)
        runs = not any(outcome.problem for outcome in self.outcomes)
        return {"passed": passed / len(self.outcomes), "correct": float(self.is_correct), "runs": float(runs)}

    def feedback(self) -> str:
        """The first failure in words for the policy, of bounded length."""
        failed = next(outcome for outcome in self.outcomes if not outcome.passed)
        passed = sum(outcome.passed for outcome in self.outcomes)
        lines = [f"{passed} of {len(self.outcomes)} tests passed. The first that failed:"]
        if failed.what:
            lines.append(shortened(failed.what))
        lines.append(shortened(failed.problem) if failed.problem else f"Wrong result:\n{shortened(failed.got)}")
        return "\n".join([*lines, "Send the whole corrected program in one code block."])


def program_of(reply: str) -> str:
    """The last fenced block of a reply, or all of it."""
    blocks = _FENCE.findall(reply)
    return str(blocks[-1] if blocks else reply)


def examine(sandbox: Sandbox, program: Program, tests: Sequence[Test]) -> Report:
    """Run a program against its tests. Blocks for as long as its limits allow."""
    if not program.text.strip():
        return Report([Outcome(False, problem="there is no program in the reply")] * len(tests))
    if "\0" in program.text:
        return Report([Outcome(False, problem="a program has no null bytes")] * len(tests))
    examples = [test for test in tests if isinstance(test, Example)]
    if examples:
        return Report(_examples(sandbox, program, examples))
    if program.command:
        raise TaskError(
            "calls and asserts are for Python programs, and a command runs these", "write tests with stdin and stdout"
        )
    return Report(_calls(sandbox, program.text, tests))


def shortened(text: str) -> str:
    """The beginning and the end of a text: an error's last line says the most."""
    if len(text) <= SHOWN:
        return text
    return f"{text[: SHOWN // 3]}\n…\n{text[-2 * SHOWN // 3 :]}"


def _examples(sandbox: Sandbox, program: Program, examples: Sequence[Example]) -> list[Outcome]:
    runs: list[Ran | None] = [*sandbox.run(program, [example.stdin for example in examples])]
    missing = len(examples) - len(runs)
    return [_example(example, ran) for example, ran in zip(examples, [*runs, *[None] * missing], strict=True)]


def _example(example: Example, ran: Ran | None) -> Outcome:
    what = f"input:\n{example.stdin}"
    if ran is None:
        return Outcome(False, what, "not run: the run before it met a limit")
    if problem := _problem(ran):
        return Outcome(False, what, problem)
    passed = same_output(ran.stdout, example.stdout)
    return Outcome(True) if passed else Outcome(False, what, got=ran.stdout or "(nothing was printed)")


def _calls(sandbox: Sandbox, text: str, tests: Sequence[Test]) -> list[Outcome]:
    """Calls in one process, asserts in another; in the order of the tests."""
    calls = [test for test in tests if isinstance(test, Call)]
    asserts = [test for test in tests if isinstance(test, Assert)]
    found: dict[int, Outcome] = {}
    if calls:
        called, ran = sandbox.call(text, [test.call for test in calls])
        for test, one in zip(calls, called, strict=True):
            problem = f"{one.problem}\n{ran.stderr if ran else ''}".strip() if one.problem else ""
            passed = not problem and same_value(one.value, test.returns)
            found[id(test)] = Outcome(True) if passed else Outcome(False, test.call, problem, f"{one.value!r}")
    if asserts:
        for judged, verdict in zip(asserts, sandbox.judge(text, [test.text for test in asserts]), strict=True):
            is_error = bool(verdict) and not verdict.startswith("AssertionError")
            found[id(judged)] = Outcome(not verdict, problem=verdict if is_error else "", got="an assertion failed")
    return [found[id(test)] for test in tests]


def _problem(ran: Ran) -> str:
    if ran.limit:
        return {"time": "it took too long", "output": "it printed too much", "files": "it wrote too much"}[ran.limit]
    if ran.status == 0:
        return ""
    if ran.status < 0:
        return f"ended by {_signal(-ran.status)}\n{ran.stderr}".strip()
    return ran.stderr.strip() or f"ended with status {ran.status}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
