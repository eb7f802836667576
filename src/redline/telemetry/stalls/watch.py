"""When nothing moves: one file that says who waits for whom, with the stacks of every thread and process.

    stalls/stall-001.txt    for a person      stalls/stall-001.json    the same as data
    stalls/frozen.txt       every stack, written by faulthandler, where one thread kept all others from running

A run is stalled when no lane has opened or closed a span of work for too long. Waiting is no work, so a lane that wakes up
only to wait again moves nothing. A call of the user's code is told of earlier, whatever else moves: those before it say how
long it may last (`slow_calls.py`).
"""

from __future__ import annotations

import faulthandler
import re
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from redline.telemetry.alerts.detector import Finding
from redline.telemetry.files.durable import replace_file, write_json
from redline.telemetry.spans import LaneState
from redline.telemetry.stalls.activity import GROUP_SECTIONS, Activity
from redline.telemetry.stalls.calls import Call
from redline.telemetry.stalls.slow_calls import TIMES_LONGEST, SlowCalls
from redline.telemetry.stalls.stacks import ChildStack, ThreadStack, child_stacks, own_stacks

FLOOR_S = 25.0
"""The shortest pause that counts within a step, where the run's own pauses decide."""
BETWEEN_STEPS_S = 60.0
"""The same while the main lane evaluates, checkpoints or loads: the first time has nothing to compare it with."""
FIRST_S = 600.0
"""The same before `MIN_STEPS` steps: models load, kernels compile."""
MIN_STEPS = 3
FROZEN_TIMES = 1.5
"""Patience of the fallback in units of ours: it speaks up only where we cannot."""
FROZEN_FLOOR_S = 30.0
"""And never before: on a busy machine our thread may be late by seconds."""
FIRST_KEPT, LAST_KEPT = 10, 90
"""Stalls whose files stay: those that came first, and the newest."""
_NUMBER = re.compile(r"stall-(\d+)\.txt")
_UPDATE = {"trainer", "weight_sync", "buffer"}
MOVERS: Mapping[str, tuple[str, AbstractSet[str]]] = {
    "rollouts": ("rollouts", GROUP_SECTIONS),
    "late_groups": ("rollouts", GROUP_SECTIONS),
    "engine": ("rollouts", GROUP_SECTIONS),
    "environments": ("environments", GROUP_SECTIONS),
    "replies": ("rollouts", GROUP_SECTIONS),
    "rewards": ("rewards", GROUP_SECTIONS),
    "reward_model": ("rewards", GROUP_SECTIONS),
    "weights": ("main", _UPDATE),
    "budget": ("main", _UPDATE),
    "evaluation": ("main", GROUP_SECTIONS),
    "requests": ("rewards", GROUP_SECTIONS),
}
"""`wait.for_X` → the lane it is for, where no other lane is in one of these sections."""
ELSEWHERE = {"engines"}
"""What `wait.for_X` waits for in processes that have no lanes here."""


@dataclass(slots=True, frozen=True)
class Stall:
    """A stall that was written down."""

    path: Path
    finding: Finding
    in_rollouts: bool
    """What hangs is on the way to a group."""


class StallWatch:
    """Decides that a run is stalled, and writes the file: one for each time."""

    def __init__(self, folder: Path, after_s: float | None, *, frozen_floor_s: float = FROZEN_FLOOR_S) -> None:
        """`after_s` None leaves it to the pauses that the run makes by itself."""
        self._folder = folder
        self._after_s = after_s
        self._queues: Callable[[], Mapping[str, float]] = dict
        self._elsewhere: Callable[[], Mapping[str, Sequence[str]]] = dict
        self._is_setup = True
        self._steps = 0
        self._longest_s = 0.0
        self._quiet_s = 0.0
        self._floor_s = FLOOR_S
        self._current: Path | None = None
        self._slow_calls = SlowCalls(after_s)
        self._calls: dict[Call, Path] = {}
        """Those that last too long, and the files that say so."""
        self._frozen_floor_s = frozen_floor_s
        self._frozen = _FrozenWatch(folder / "frozen.txt")

    @property
    def after_s(self) -> float:
        """How long nothing may move."""
        if self._is_setup:
            return max(FIRST_S, self._after_s or 0.0)
        if self._after_s is not None:
            return self._after_s
        return max(self._floor_s if self._steps >= MIN_STEPS else FIRST_S, TIMES_LONGEST * self._longest_s)

    @property
    def _frozen_after_s(self) -> float:
        return max(self._frozen_floor_s, FROZEN_TIMES * self.after_s)

    def begin(
        self, queues: Callable[[], Mapping[str, float]], elsewhere: Callable[[], Mapping[str, Sequence[str]]] = dict
    ) -> None:
        """Note that the stages are there. `queues` gives the depth of every queue, by its name, and `elsewhere` the stacks of
        processes that are not among our descendants; neither may wait for anything."""
        self._queues, self._elsewhere, self._is_setup = queues, elsewhere, False

    def step(self) -> None:
        self._steps += 1

    def tick(self, now: Activity, step: int) -> Stall | None:
        stacks = self._frozen.take()
        self._frozen.rearm(self._frozen_after_s)
        if stacks is not None and self._current is None:
            return self._write_frozen(stacks, step)
        self._floor_s = BETWEEN_STEPS_S if now.is_between_steps else FLOOR_S
        if now.quiet_s < self._quiet_s:
            self._moves_again()
        self._quiet_s = now.quiet_s
        slow = self._slow_calls.look(now.calls)
        self._note_ended_calls(now)
        if slow is not None:
            return self._write_call(now, step, slow)
        if now.quiet_s < self.after_s or self._current is not None or self._slow_calls.is_one_told:
            return None
        return self._write(now, step)

    def close(self) -> None:
        self._frozen.close()

    def _moves_again(self) -> None:
        self._longest_s = max(self._longest_s, self._quiet_s)
        if self._current is not None:
            _add_line(self._current, f"It moved again after {self._quiet_s:.0f} s.")
            self._current = None

    def _note_ended_calls(self, now: Activity) -> None:
        for call in self._calls.keys() - set(now.calls):
            how = "was given up" if call.is_given_up else "returned"
            _add_line(self._calls.pop(call), f"It moved again after {call.age_s():.0f} s: `{call.what}` {how}.")

    def _other_stacks(self) -> list[ChildStack]:
        """The stacks of our descendants, and those that processes elsewhere have sent."""
        sent = [ChildStack(0, name, "as it last said", list(lines)) for name, lines in self._elsewhere().items()]
        return [*child_stacks(), *sent]

    def _write_call(self, now: Activity, step: int, call: Call) -> Stall:
        document = describe(now, self._queues(), own_stacks(), self._other_stacks(), step)
        seen = f"`{call.what}` has not returned for {call.age_s():.0f} s, at {call.place()}"
        lanes = [lane.name for lane in now.lanes if lane.thread_id == call.thread_id]
        document["summary"] = f"{seen}; {document['summary']}"
        self._calls[call], place = self._keep(document, f"After step {step}: {document['summary']}\n{render(document)}")
        finding = Finding(
            seen=seen + "".join(f", in lane {name}" for name in lanes),
            since=_moment(time.time() - call.age_s()),
            look_at=f"{place}: the stacks of every thread and process",
        )
        return Stall(self._calls[call], finding, in_rollouts=True)

    def _write(self, now: Activity, step: int) -> Stall:
        document = describe(now, self._queues(), own_stacks(), self._other_stacks(), step)
        self._current, place = self._keep(document, render(document))
        finding = Finding(
            seen=f"nothing has moved for {now.quiet_s:.0f} s: {document['summary']}",
            since=document["since"],
            look_at=f"{place}: the stacks of every thread and process",
        )
        return Stall(self._current, finding, document["in_rollouts"])

    def _write_frozen(self, stacks: str, step: int) -> Stall:
        since = _moment(time.time() - self._frozen_after_s)
        summary = (
            f"no thread could run for {self._frozen_after_s:.0f} s: one was in C code that keeps the interpreter to itself, or"
            " the machine gave the process no time"
        )
        document = {"time": time.time(), "step": step, "since": since, "summary": summary, "frozen": stacks}
        path, place = self._keep(document, f"After step {step}, {summary}; since {since}.\n\n{stacks}")
        return Stall(path, Finding(summary, since, f"{place}: the stacks of every thread"), in_rollouts=False)

    def _keep(self, document: Mapping[str, Any], text: str) -> tuple[Path, str]:
        """Write both files. Returns the one for a person, and where to look, in words: a disk that takes no more is said there,
        and the stall is told all the same."""
        numbers = [int(found[1]) for path in self._folder.glob("stall-*.txt") if (found := _NUMBER.search(path.name))]
        number = max(numbers, default=0) + 1
        path = self._folder / f"stall-{number:03d}.txt"
        try:
            self._folder.mkdir(exist_ok=True)
            write_json(path.with_suffix(".json"), document)
            replace_file(path, text.encode())
            if number - LAST_KEPT > FIRST_KEPT:
                for suffix in (".txt", ".json"):
                    (self._folder / f"stall-{number - LAST_KEPT:03d}{suffix}").unlink(missing_ok=True)
        except OSError as error:
            return path, f"{path.name} could not be written ({error.strerror or error}), it would have had"
        return path, f"{path.parent.name}/{path.name} in the run folder"


def _add_line(path: Path, line: str) -> None:
    with suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")


class _FrozenWatch:
    """faulthandler's own thread needs no interpreter: it writes every stack where ours, which re-arms it, cannot run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("w+")
        self._rearm_at = 0.0

    def rearm(self, seconds: float) -> None:
        if time.monotonic() >= self._rearm_at:
            self._rearm_at = time.monotonic() + seconds / 10
            faulthandler.dump_traceback_later(seconds, file=self._file)

    def take(self) -> str | None:
        """What was written since the last call."""
        if not self._path.exists() or not self._path.stat().st_size:
            return None
        stacks = self._path.read_text()
        self._file.seek(0)
        self._file.truncate()
        return stacks

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if self._path.exists() and not self._path.stat().st_size:
            self._path.unlink()
            if not any(self._path.parent.iterdir()):
                self._path.parent.rmdir()


# ── what is in the file ────────────────────────────────────────────────────────────────────────────────────────────────


def describe(
    now: Activity, queues: Mapping[str, float], threads: list[ThreadStack], children: list[ChildStack], step: int
) -> dict[str, Any]:
    """A JSON document."""
    by_id: dict[int | None, ThreadStack] = {thread.thread_id: thread for thread in threads}
    lane_of = {lane.thread_id: lane.name for lane in now.lanes}
    made_for = {call.thread_id: call.for_thread for call in now.calls if call.thread_id != call.for_thread}
    by_id |= {lane: by_id[thread] for thread, lane in made_for.items() if thread in by_id}  # who waits for a call is in it
    culprits = [lane for lane in now.lanes if _works(lane) and lane.thread_id not in made_for]
    return {
        "time": time.time(),
        "step": step,
        "quiet_s": now.quiet_s,
        "since": _moment(time.time() - now.quiet_s),
        "summary": "; ".join(_at(lane, by_id) for lane in culprits) or f"every lane waits, {_all_wait(now)}",
        "in_rollouts": any(lane.innermost.partition(".")[0] in GROUP_SECTIONS for lane in culprits),
        "who_waits_for_whom": [_sentence(lane, now, by_id) for lane in now.lanes if lane.open],
        "queues": dict(queues),
        "lanes": [_lane_document(lane) for lane in now.lanes],
        "workers": [{"name": worker.name, "is_alive": worker.is_alive, "end": worker.end} for worker in now.workers],
        "threads": [{"name": thread.name, "lane": lane_of.get(thread.thread_id), "stack": thread.lines} for thread in threads],
        "processes": [
            {"pid": child.pid, "command": child.command, "state": child.state, "stack": child.lines} for child in children
        ],
    }


def render(document: Mapping[str, Any]) -> str:
    """The document for a person, the conclusion first."""
    parts = [
        f"Stalled after step {document['step']}: nothing has moved for {document['quiet_s']:.0f} s, since {document['since']}.",
        _section("Who waits for whom", document["who_waits_for_whom"]),
        _section("Queues", [f"{name}: {depth:g}" for name, depth in document["queues"].items()]),
        _section("Open spans, outermost first", [_lane_line(lane) for lane in document["lanes"]]),
        _section("Workers", [f"{w['name']}: {'alive' if w['is_alive'] else w['end']}" for w in document["workers"]]),
    ]
    for thread in document["threads"]:
        lane = f", lane {thread['lane']}" if thread["lane"] else ""
        parts.append(_section(f"Thread {thread['name']}{lane}", thread["stack"]))
    for child in document["processes"]:
        title = f"Process {child['pid'] or 'elsewhere'}, {child['state']}: {child['command']}"
        parts.append(_section(title, child["stack"]))
    return "\n".join(parts) + "\n"


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([f"\n{title}", *(f"  {line}" for line in lines or ["none"])])


def _lane_document(lane: LaneState) -> dict[str, Any]:
    now_ns = time.perf_counter_ns()
    spans = [
        {"name": span.name, "age_s": (now_ns - span.start_ns) / 1e9, "args": {k: str(v) for k, v in span.args.items()}}
        for span in lane.open
    ]
    return {"name": lane.name, "idle": lane.idle, "open": spans}


def _lane_line(lane: Mapping[str, Any]) -> str:
    chain = " > ".join(f"{span['name']} ({span['age_s']:.1f} s)" for span in lane["open"])
    return f"{lane['name']}: {chain or 'no span, ' + lane['idle']}"


def _works(lane: LaneState) -> bool:
    return bool(lane.open) and not lane.innermost.startswith(("wait.", "telemetry."))


def _at(lane: LaneState, threads: Mapping[int | None, ThreadStack]) -> str:
    """`rollouts is in rollouts.reward for 61 s, at letters.py:17, in score: time.sleep(1)`."""
    seconds = (time.perf_counter_ns() - lane.open[-1].start_ns) / 1e9
    where = threads[lane.thread_id].place if lane.thread_id in threads else ""
    return f"{lane.name} has been in {lane.innermost} for {seconds:.0f} s" + (f", at {where}" if where else "")


def _sentence(lane: LaneState, now: Activity, threads: Mapping[int | None, ThreadStack]) -> str:
    if not lane.innermost.startswith("wait.for_"):
        return _at(lane, threads) + ("" if _works(lane) else ", which keeps no other lane waiting")
    whom = lane.innermost.removeprefix("wait.for_")
    if whom in ELSEWHERE:
        return f"{lane.name} waits for {whom}, which are processes of their own and have done nothing for {now.quiet_s:.0f} s"
    name, sections = MOVERS.get(whom, (whom, {whom}))
    others = [other for other in now.lanes if other.name != lane.name]
    movers = [other for other in others if _works(other) and other.innermost.partition(".")[0] in sections]
    movers = movers or [other for other in others if other.name == name]
    seconds = (time.perf_counter_ns() - lane.open[-1].start_ns) / 1e9
    waits = f"{lane.name} has waited for {whom.replace('_', ' ')} for {seconds:.0f} s"
    if not movers:
        return f"{waits}, and no lane is at it: the one that should be has ended, or never began"
    return f"{waits}, that is for lane {' or '.join(other.name for other in movers)}"


def _all_wait(now: Activity) -> str:
    waits = [f"{lane.name} for {lane.innermost.removeprefix('wait.for_').replace('_', ' ')}" for lane in now.lanes if lane.open]
    return ", ".join(waits) or "and no span is open"


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
