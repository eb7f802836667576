"""The process of an answer, from the inside: an answer that is run, one whose functions are called, and a judge of asserts.

An answer shares its process with the code here, and may do with it as it likes. That gains it nothing: it is asked for outputs
and values, never for a verdict.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import itertools
import json
import linecache
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from redline.environments.code.inside.values import LONGEST, NotPlainError, pack, unpack

CHANNEL = 3
"""The file descriptor over which functions are called."""
FILE = "answer.py"
MOST_WORDS = 600
"""Characters of a verdict: the verdicts of many asserts have to fit into the judge's output."""


def run(source: str) -> int:
    """Run a program as `__main__`. Returns its exit status."""
    return _status_of(lambda: _execute(source, "__main__"))


def serve(source: str) -> int:
    """Run a program's definitions, then evaluate what comes over the channel until it ends."""
    lines = Lines(CHANNEL)
    names: dict[str, Any] = {}
    failure = _status_of(lambda: names.update(_execute(source, "answer")), leave=False)
    lines.send(pack({"loaded": not failure}))
    iterators: list[Iterator[Any]] = []
    while not failure and (line := lines.receive()):
        lines.send(_reply(unpack(line), names, iterators))
    return failure


def judge(tests: list[str]) -> int:
    """Run asserts whose unknown names are functions of the answer, in another process. Prints a list: None for each that held,
    or what went wrong."""
    verdicts_to = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    lines = Lines(CHANNEL)
    loaded = lines.receive()
    verdicts = [_verdict(test, lines) if loaded and unpack(loaded)["loaded"] else "the program did not load" for test in tests]
    os.write(verdicts_to, json.dumps(verdicts).encode())
    return 0


class AnswerError(Exception):
    """What the answer raised, in words."""


class Lines:
    """Lines over a socket, each shorter than `LONGEST`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest = descriptor, b""
        self._read, self._write = os.read, os.write

    def receive(self) -> bytes:
        """The next line; nothing where there is none any more. Blocks."""
        while b"\n" not in self._rest and len(self._rest) < LONGEST:
            piece = self._read(self._descriptor, 65536)
            if not piece:
                return b""
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def send(self, line: bytes) -> None:
        while line:
            line = line[self._write(self._descriptor, line) :]


def _execute(source: str, name: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    module.__file__ = FILE
    sys.modules[name] = module
    sys.argv[:] = sys.orig_argv[:] = [FILE]
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    exec(compile(source, FILE, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _status_of(work: Callable[[], Any], *, leave: bool = True) -> int:
    """What a process that did this work would exit with; its error is printed as Python does, without our own lines. With
    `leave`, threads are waited for and `atexit` is done as well."""
    status = 0
    try:
        try:
            work()
        finally:
            if leave:
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        if not leave:
            print("SystemExit: the program ended itself", file=sys.stderr)
            status = status or 1
    except BaseException as error:
        _print_error(error)
        status = 1
    return status


def _print_error(error: BaseException) -> None:
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    ours = f'File "{__file__}"'
    print("".join(line for line in lines if ours not in line), file=sys.stderr, end="")


def _reply(request: dict[str, Any], names: dict[str, Any], iterators: list[Iterator[Any]]) -> bytes:
    """The value of a call or an expression, the place of an iterator among `iterators`, or the error with the names of its
    classes."""
    try:
        if "next" in request:
            return pack({"values": list(itertools.islice(iterators[request["next"]], 1))})
        if "call" in request:
            value = names[request["call"]](*request["args"], **request["named"])
            if not isinstance(value, Iterator | KeysView | ValuesView | ItemsView | range):
                return pack({"value": value})
            iterators.append(iter(value))
            return pack({"iterator": len(iterators) - 1})
        return pack({"value": eval(compile(request["eval"], "<test>", "eval"), names)})
    except NotPlainError as error:
        return pack({"error": f"{error}"})
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return pack({"error": f"{type(error).__name__}: {error}"[:2000], "kinds": kinds, "words": f"{error}"[:2000]})


def _verdict(test: str, lines: Lines) -> str | None:
    try:
        tree = ast.parse(test)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names: dict[str, Any] = {name: _remote(name, lines) for name in used if not hasattr(builtins, name)}
        exec(compile(tree, "<test>", "exec", dont_inherit=True), names)
    except BaseException as error:
        if isinstance(error.__cause__, AnswerError):
            return f"the program raised {error.__cause__}"[:MOST_WORDS]
        if not isinstance(error, AssertionError):
            return f"{type(error).__name__}: {error}"[:MOST_WORDS]
        return f"AssertionError: {error}"[:MOST_WORDS] if str(error) else "AssertionError"
    return None


def _remote(name: str, lines: Lines) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        reply = _ask({"call": name, "args": arguments, "named": named}, lines)
        return _values(reply["iterator"], lines) if "iterator" in reply else reply["value"]

    return call


def _values(iterator: int, lines: Lines) -> Iterator[Any]:
    while values := _ask({"next": iterator}, lines)["values"]:
        yield values[0]


def _ask(request: dict[str, Any], lines: Lines) -> dict[str, Any]:
    lines.send(pack(request))
    line = lines.receive()
    if not line:
        raise EOFError("the program ended")
    reply: dict[str, Any] = unpack(line)
    if "error" in reply:
        raise _error(reply) from AnswerError(reply["error"])
    return reply


def _error(reply: dict[str, Any]) -> Exception:
    """An error of the built-in class nearest to that of the answer's error. An end of iteration is none: `all(map(f, inputs))`
    would take it for the end of the inputs."""
    for name in reply.get("kinds", []):
        kind = getattr(builtins, name, None)
        if (
            isinstance(kind, type)
            and issubclass(kind, Exception)
            and kind not in (StopIteration, StopAsyncIteration, Exception)
        ):
            try:
                return kind(reply["words"])
            except TypeError:
                continue  # it is made from more than words; its base is not
    return RuntimeError(reply["error"])
