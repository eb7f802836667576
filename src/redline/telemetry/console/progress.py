"""What a person sees while a run goes on: one live line on a terminal, one plain line per step in a log file."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from redline.telemetry.summary.failed_attempts import WORTH_SAYING
from redline.telemetry.summary.timeline import bottleneck, in_words

_SPARKS = "▁▂▃▄▅▆▇█"
_RECENT_STEPS = 20
_ALL_FACTS = ("speed", "step", "mostly")
_FEWER_FACTS = (_ALL_FACTS, ("speed", "mostly"), ("speed",))
"""Facts of the live line beside reward and time to go, as many as it has room for."""


@dataclass(slots=True, frozen=True)
class SampleAnswer:
    """An answer to show to a person."""

    prompt: str
    answer: str
    reward: float


class Progress:
    """The state of a run, on stderr."""

    def __init__(self, total_steps: int, *, first_step: int = 0, console: Console | None = None) -> None:
        """`first_step` is the number of steps a resumed run has behind it."""
        self.console = console or Console(stderr=True, highlight=False)
        self._line = _StatusLine(total_steps, first_step)
        self._first_evaluation: tuple[float, float | None] | None = None
        # Twice a second is enough for the countdown to move, and too little to slow the run (a redraw takes about 1 ms).
        # Data may be piped from stdout while the line is live, so stdout stays untouched.
        self._live = (
            Live(self._line, console=self.console, refresh_per_second=2, redirect_stdout=False)
            if self.console.is_terminal and not self.console.is_dumb_terminal
            else None
        )

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def step(
        self,
        step: int,
        reward: float,
        tokens_per_s: float,
        step_s: float,
        phases: Mapping[str, float] | None = None,
        failed: float = 0.0,
        reused: int = 0,
    ) -> None:
        """Report that `step` steps are done; the other values are the last step's: `phases` its seconds as the timeline has
        them, `failed` the share of its attempts that have no reward, `reused` its groups that an earlier process sampled, which
        are shown in place of a speed that they took no part in."""
        self._line.update(step, reward, tokens_per_s, step_s, phases or {}, failed, reused)
        if self._live:
            self._live.refresh()
        else:
            self._print(Text(self._line.plain()))

    def first_evaluation(self, reward: float, accuracy: float | None) -> None:
        """What an earlier process found in the run's first evaluation: later ones say how far they are from it."""
        self._first_evaluation = reward, accuracy

    def continue_from(self, step: int) -> None:
        """A resumed run has `step` steps behind it; they took no time of this process."""
        self._line.steps_done = step

    def note(self, text: str) -> None:
        """A line that stays, above the live one."""
        self._print(Text(text, style="dim"))

    def evaluation(self, title: str, reward: float, num_answers: int, seconds: float, accuracy: float | None = None) -> None:
        """A line with an evaluation's outcome, and the change since the first one. `accuracy` is the share of right answers,
        where the task says which are right."""
        if self._first_evaluation is None:
            self._first_evaluation = reward, accuracy
            first_reward, first_accuracy = None, None
        else:
            first_reward, first_accuracy = self._first_evaluation
        line = Text.assemble(f"{title:<18} ", ("reward ", "dim"), (f"{reward:6.3f}", "bold"))
        if accuracy is None:
            line.append_text(_change(reward, first_reward, "{:+.3f}"))
        else:
            line.append("  accuracy ", style="dim").append(f"{accuracy:6.1%}", style="bold")
            points = None if first_accuracy is None else 100 * first_accuracy
            line.append_text(_change(100 * accuracy, points, "{:+.1f} points"))
        line.append(f"  {num_answers} answers in {seconds:.1f} s", style="dim")
        self._print(line)

    def _print(self, text: Text) -> None:
        # Without a terminal there is no width to wrap to: a log line stays one line.
        self.console.print(text, soft_wrap=self._live is None)


def _change(value: float, before: float | None, how: str) -> Text:
    if before is None:
        return Text()
    style = "bold green" if value > before else "bold red" if value < before else ""
    return Text(f"  {how.format(value - before)}", style=style)


class _StatusLine:
    """step 12/100 ━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌  reward 0.412 ▂▃▅▆▇█  1,234 tok/s  2.3 s/step  generation 61%  eta 3:22"""

    def __init__(self, total_steps: int, first_step: int) -> None:
        self.total_steps = total_steps
        self.steps_done = first_step
        self._rewards: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._pace: deque[float] = deque(maxlen=_RECENT_STEPS)
        """Seconds from the end of one step to the end of the next: evaluations and checkpoints lie between."""
        self._phases: deque[Mapping[str, float]] = deque(maxlen=_RECENT_STEPS)
        self._tokens_per_s = 0.0
        self._reused = 0
        self._failed = ""
        """How many attempts of the last step did, if they are worth a word."""
        self._started = self._updated = time.monotonic()

    def update(
        self,
        step: int,
        reward: float,
        tokens_per_s: float,
        step_s: float,
        phases: Mapping[str, float] | None = None,
        failed: float = 0.0,
        reused: int = 0,
    ) -> None:
        self._reused = reused
        self._failed = f"{failed:.0%} failed" if failed > WORTH_SAYING else ""
        self.steps_done = step
        self._rewards.append(reward)
        self._step_seconds.append(step_s)
        self._phases.append(phases or {})
        self._tokens_per_s = tokens_per_s
        now = time.monotonic()
        # Before the first step lies the start of the process, which no other step has.
        self._pace.append(max(step_s, now - self._updated) if self._pace else step_s)
        self._updated = now

    @property
    def remaining_s(self) -> float:
        """Steps to go times the mean seconds from one recent step to the next, less what has passed since the last."""
        mean = sum(self._pace) / len(self._pace)
        return max(0.0, (self.total_steps - self.steps_done) * mean - (time.monotonic() - self._updated))

    def _bottleneck(self) -> tuple[str, float] | None:
        """The phase that the recent steps spent most of their time in, and its share."""
        return bottleneck(sum(map(Counter, self._phases), Counter[str]()))

    def _when(self) -> str:
        if self.steps_done == self.total_steps:
            return f"took {_clock(self._updated - self._started)}"
        return f"eta {_clock(self.remaining_s)}"

    def _speed(self) -> tuple[str, str]:
        """A number and what it counts: tokens a second, or the groups of an earlier process that a resumed run used again."""
        if self._reused:
            return f"{self._reused:,}", "group reused" if self._reused == 1 else "groups reused"
        return f"{self._tokens_per_s:,.0f}", "tok/s"

    def plain(self) -> str:
        step = f"step {self.steps_done:>{len(str(self.total_steps))}}/{self.total_steps}"
        number, unit = self._speed()
        speed = f"{number:>7} {unit}  {self._step_seconds[-1]:6.2f} s/step"
        found = self._bottleneck()
        mostly = f"  mostly {in_words(found[0])} {found[1]:.0%}" if found else ""
        failed = f"  {self._failed}" if self._failed else ""
        return f"{step}  reward {self._rewards[-1]:6.3f}{failed}  {speed}  {self._when()}{mostly}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = f"step {self.steps_done:>{len(str(self.total_steps))}}/{self.total_steps} "
        facts = self._facts(options.max_width - len(head))
        room = options.max_width - len(head) - len(facts)
        yield Text.assemble((head, "bold"), _bar(self.steps_done / self.total_steps, min(room, 40)), facts, no_wrap=True)

    def _facts(self, room: int) -> Text:
        """Return as many facts as there is room for. In a narrow terminal the sparks go first, then the seconds of a step, what
        it mostly did, and the speed; no number is cut off."""
        if not self._rewards:
            return Text(f"  first step running, {_clock(time.monotonic() - self._updated)}", style="dim")
        for num_sparks, wanted in ((_RECENT_STEPS, _ALL_FACTS), (6, _ALL_FACTS), *((0, wanted) for wanted in _FEWER_FACTS)):
            facts = self._assemble(num_sparks, wanted)
            if len(facts) <= room - (8 if num_sparks else 0):  # what is left is the bar's
                return facts
        return self._assemble(0, ())

    def _assemble(self, num_sparks: int, wanted: tuple[str, ...]) -> Text:
        sparks = f" {sparkline(list(self._rewards)[-num_sparks:]):<{num_sparks}}" if num_sparks else ""
        facts = Text.assemble(
            ("  reward ", "dim"),
            (f"{self._rewards[-1]:.3f}", "bold"),
            (sparks, "green"),
            (f"  {self._failed}" if self._failed else "", "red"),
        )
        if "speed" in wanted:
            number, unit = self._speed()
            facts.append(f"  {number}").append(f" {unit}", style="dim")
        if "step" in wanted:
            facts.append(f"  {self._step_seconds[-1]:.1f}").append(" s/step", style="dim")
        if "mostly" in wanted and (found := self._bottleneck()):
            phase, share = found
            facts.append("  ").append(f"{in_words(phase)} {share:.0%}", style="red" if phase.startswith("wait") else "")
        return facts.append(f"  {self._when()}", style="dim")


def sparkline(values: Sequence[float]) -> str:
    """One block per value, from the lowest of them to the highest; a gap for one that is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)


def sample_table(before: Sequence[SampleAnswer], after: Sequence[SampleAnswer] = ()) -> Table:
    """Answers to the same prompts, before and after training, side by side."""
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, expand=False)
    table.add_column("prompt", ratio=2, style="dim", overflow="fold")
    table.add_column("before" if after else "answer", ratio=3, overflow="fold")
    if after:
        table.add_column("after", ratio=3, overflow="fold")
    for row in zip(before, after, strict=True) if after else ((sample,) for sample in before):
        table.add_row(_excerpt(row[0].prompt, 160), *(_scored(sample) for sample in row))
    return table


def _scored(sample: SampleAnswer) -> Text:
    style = "green" if sample.reward > 0 else "red"
    return Text.assemble(_excerpt(sample.answer, 240), "\n", (f"reward {sample.reward:.2f}", style))


def _excerpt(text: str, limit: int) -> Text:
    """One paragraph of what a model wrote, as plain characters: it may hold markup or terminal codes."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return Text(line if len(line) <= limit else line[: limit - 1] + "…")


def _bar(fraction: float, width: int) -> Text:
    if width < 4:
        return Text("")
    done = round(fraction * width)
    return Text.assemble(("━" * done, "cyan"), ("╌" * (width - done), "dim"))


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
