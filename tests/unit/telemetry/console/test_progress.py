from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from redline.telemetry import Progress
from redline.telemetry.console.progress import SampleAnswer, sample_table, sparkline


def console(*, terminal: bool, width: int = 80) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, highlight=False, no_color=True, legacy_windows=False
    )


def output(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    screen = console(terminal=False, width=20)
    with Progress(12, console=screen) as progress:
        progress.note("a note that is longer than the log is wide")
        progress.step(1, reward=0.25, tokens_per_s=12345.6, step_s=10.0)
        progress.step(12, reward=0.5, tokens_per_s=12345.6, step_s=10.0)
    note, first, last = output(screen).splitlines()
    assert note == "a note that is longer than the log is wide"
    assert first.startswith("step  1/12  reward  0.250   12,346 tok/s   10.00 s/step  eta 1:4")
    assert last.startswith("step 12/12  reward  0.500   12,346 tok/s   10.00 s/step  took 0:0")


def test_a_step_that_used_stored_groups_again_says_how_many_in_place_of_a_speed() -> None:
    screen = console(terminal=False)
    with Progress(9, console=screen) as progress:
        progress.step(4, reward=0.5, tokens_per_s=math.nan, step_s=0.1, reused=8)
        progress.step(5, reward=0.5, tokens_per_s=2000.0, step_s=0.3)
    first, second = output(screen).splitlines()
    assert first.startswith("step 4/9  reward  0.500        8 groups reused    0.10 s/step")
    assert "tok/s" not in first
    assert "2,000 tok/s" in second


def test_a_step_says_what_the_last_ones_spent_most_of_their_time_on() -> None:
    screen = console(terminal=False)
    with Progress(3, console=screen) as progress:
        progress.step(1, reward=0.0, tokens_per_s=1.0, step_s=10.0, phases={"generation": 6.0, "training": 4.0})
        progress.step(2, reward=0.0, tokens_per_s=1.0, step_s=30.0, phases={"wait_for_rollouts": 26.0, "training": 4.0})
    first, second = output(screen).splitlines()
    assert first.endswith("mostly generation 60%")
    assert second.endswith("mostly waiting for rollouts 65%")


def test_in_a_narrow_terminal_the_bottleneck_and_the_time_to_go_stay() -> None:
    screen = console(terminal=True, width=80)
    progress = Progress(400, console=screen)
    for step in range(30):
        progress._line.update(step + 1, reward=0.5, tokens_per_s=12345.0, step_s=2.0, phases={"wait_for_rollouts": 2.0})
    [line] = screen.render_lines(progress._line, pad=False)
    text = "".join(segment.text for segment in line)
    assert "waiting for rollouts 100%  eta " in text
    assert "12,345 tok/s" in text


@pytest.mark.parametrize("width", [40, 50, 60, 70])
def test_in_a_very_narrow_terminal_no_number_is_cut_off(width: int) -> None:
    screen = console(terminal=True, width=width)
    progress = Progress(400, console=screen)
    for step in range(3):
        progress._line.update(step + 1, reward=0.5, tokens_per_s=12345.0, step_s=2.0, phases={"wait_for_rollouts": 2.0})
    [line] = screen.render_lines(progress._line, pad=False)
    text = "".join(segment.text for segment in line)
    assert "step   3/400" in text
    assert "reward 0.500" in text
    assert text.endswith(("eta 13:13", "eta 13:14"))
    assert ("12,345 tok/s" in text) == ("12,3" in text)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("total", [5, 100_000])
def test_the_live_line_is_one_line_at_any_width(width: int, total: int) -> None:
    screen = console(terminal=True, width=width)
    progress = Progress(total, console=screen)
    for step in range(4):
        lines = screen.render_lines(progress._line, pad=False)
        assert len(lines) == 1
        assert sum(segment.cell_length for segment in lines[0]) <= width
        progress._line.update(step + 1, reward=-0.123, tokens_per_s=1_234_567, step_s=123.4)


def test_the_time_to_go_counts_what_lies_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of 8 s after every step of 2 s."""
    now = 1000.0
    monkeypatch.setattr("redline.telemetry.console.progress.time.monotonic", lambda: now)
    line = Progress(100, console=console(terminal=False))._line
    now += 60  # the model is loaded
    for step in range(1, 51):
        now += 2
        line.update(step, reward=0.0, tokens_per_s=1.0, step_s=2.0)
        if step == 1:
            assert line.remaining_s == 99 * 2, "how long the start took says nothing of the steps"
        now += 8
    assert line.remaining_s == 50 * 10 - 8


def test_after_a_resume_an_evaluation_says_how_far_it_is_from_the_first_of_the_run() -> None:
    screen = console(terminal=False)
    with Progress(1, console=screen) as progress:
        progress.first_evaluation(0.25, None)
        progress.evaluation("held-out, step 30", 0.75, 64, 3.0)
    assert "reward  0.750  +0.500  64 answers" in output(screen)


def test_a_second_evaluation_says_how_far_it_is_from_the_first() -> None:
    screen = console(terminal=False)
    with Progress(1, console=screen) as progress:
        progress.evaluation("before training", 0.25, 64, 3.0, accuracy=0.125)
        progress.evaluation("after training", 1.5, 64, 3.0, accuracy=0.75)
    before, after = output(screen).splitlines()
    assert before.endswith("reward  0.250  accuracy  12.5%  64 answers in 3.0 s")
    assert after.endswith("reward  1.500  accuracy  75.0%  +62.5 points  64 answers in 3.0 s")


def test_a_mean_reward_is_called_reward_and_is_no_percentage() -> None:
    screen = console(terminal=False)
    with Progress(1, console=screen) as progress:
        progress.evaluation("before training", 0.0, 64, 3.0)
        progress.evaluation("after training", 7.5, 64, 3.0)
    before, after = output(screen).splitlines()
    assert before.endswith("reward  0.000  64 answers in 3.0 s")
    assert after.endswith("reward  7.500  +7.500  64 answers in 3.0 s")


def test_a_sparkline_spans_its_own_range_and_leaves_gaps() -> None:
    assert sparkline([0, 1, math.nan, 2, 7]) == "▁▂ ▃█"
    assert sparkline([3, 3]) == "▁▁"
    assert sparkline([]) == ""


def test_sample_answers_are_shown_as_written_without_terminal_codes() -> None:
    screen = console(terminal=False, width=100)
    before = [SampleAnswer("1 + 1?", "[bold]three\x1b[31m\n", 0.0)]
    screen.print(sample_table(before, [SampleAnswer("1 + 1?", "2", 1.0)]))
    screen.print(sample_table(before))
    assert "[bold]three" in output(screen)
    assert "\x1b" not in output(screen)
    assert "reward 1.00" in output(screen)


def test_a_long_answer_is_cut() -> None:
    screen = console(terminal=False, width=1000)
    screen.print(sample_table([SampleAnswer("prompt", "x" * 500, 0.0)]))
    assert "x" * 239 + "…" in output(screen)
