"""Reports and the dashboard in a real browser, over folders that runs have left or are writing."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.browser import COLOURED, Watched, chromium
from support.conversations import EVIL as GAME_EVIL
from support.conversations import write_games
from support.processes import only_run, started, succeed, wait_until, write_letters
from support.run_folders import append, step_row, write_run, write_trajectories

from redline.errors import TaskError
from redline.telemetry import RunFolder
from redline.telemetry.files.failure import recording_failure

EVIL = [
    "<script>window.pwned = 1; alert(1)</script>",
    "<img src=x onerror='window.pwned = 1; alert(2)'>",
    "</script></pre><svg onload=alert(3)> javascript:alert(4) \u202e \x1b[31m",
]
PICTURES = os.environ.get("REDLINE_PICTURES")
"""A folder for the pictures of the documentation; without it no test writes outside its own."""


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium() as found:
        yield found


@pytest.fixture
def watched(browser) -> Iterator[Watched]:
    """Whatever a test does, the page raises no error and opens no dialog."""
    page = Watched(browser)
    yield page
    page.context.close()
    assert page.errors == []
    assert page.dialogs == []


@contextmanager
def dashboard(cwd: Path, *runs: Path) -> Iterator[str]:
    """Its address, which is that of the run where there is one."""
    with started("dash", *runs, cwd=cwd) as process:
        yield address(cwd, process)


def address(cwd: Path, process: subprocess.Popen[str]) -> str:
    said = cwd / "stderr.txt"
    assert wait_until(lambda: "dashboard at " in said.read_text(), process), said.read_text()
    return re.findall(r"dashboard at (http://\S+)", said.read_text())[-1]


def report(folder: RunFolder, target: Path) -> str:
    succeed("report", folder.path, "-o", target, cwd=target.parent)
    return target.as_uri()


def evil_run(path: Path) -> RunFolder:
    folder = write_run(path / "<img src=x onerror=alert(5)>", 20)
    write_trajectories(folder, EVIL, step=20)
    append(
        folder.path / "alerts.jsonl", [{"step": 9, "kind": text, "seen": text, "since": text, "look_at": text} for text in EVIL]
    )
    return folder


# ── reports ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_report_is_one_file_that_asks_for_nothing(watched: Watched, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 200)
    write_trajectories(folder, ["the answer is 4"], step=200)
    watched.open(report(folder, tmp_path / "report.html"))
    assert [url for url in watched.requests if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in watched.requests if url.startswith("file:")]) == 1
    text = watched.page.inner_text("main")
    for expected in (
        "run-001",
        "finished, step 200 of 200",
        "bounds this run",
        "unaccounted 1.1%",
        "Key metrics",
        "Percentiles",
    ):
        assert expected in text
    charts = watched.charts()
    assert charts.keys() >= {
        "Reward",
        "Loss",
        "KL",
        "Entropy",
        "Lag",
        "Generation",
        "Training",
        "Seconds per step",
        "Memory by kind",
    }
    assert {title: pixels for title, pixels in charts.items() if pixels < 100} == {}
    watched.page.click("details.group >> nth=0")
    assert "the answer is 4" in watched.page.inner_text("details.group >> nth=0")


def test_a_report_opens_with_alerts_and_with_whether_the_run_learned(watched: Watched, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 40)
    alerts = [{"step": step, "kind": "throughput_drop", "seen": f"slow at {step}"} for step in range(1, 6)]
    append(folder.path / "alerts.jsonl", alerts)
    watched.open(report(folder, tmp_path / "report.html"))
    titles = [title.inner_text() for title in watched.page.query_selector_all("section h2")]
    assert titles[:3] == ["Alerts", "Did it learn?", "What took the time?"]
    first_screen = watched.page.viewport_size["height"]
    for seen in ("slow at 5", "It learned: held-out reward rose from 0.0", "held-out reward, after"):
        assert watched.page.get_by_text(seen).first.bounding_box()["y"] < first_screen
    assert watched.page.locator("section[aria-label='Did it learn?'] figure.chart").bounding_box()["y"] < first_screen
    assert not watched.page.get_by_text("slow at 1").is_visible()
    watched.page.get_by_text("2 earlier alerts").click()
    assert watched.page.get_by_text("slow at 1").is_visible()


def test_a_game_is_read_turn_by_turn_and_what_was_said_in_it_is_harmless(watched: Watched, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 3)
    write_games(folder.path)
    watched.open(report(folder, tmp_path / "report.html"))
    watched.page.click("details.group >> nth=0")
    watched.page.click("details.game >> nth=0")
    game = watched.page.locator("details.game >> nth=0")
    for expected in ("white", "won 1", "advantage 0.500", "3 turns", "Your move?", "move(to='e4')", "decode 400 ms"):
        assert expected in game.inner_text()
    told = game.locator(".said.told").last.text_content() or ""
    assert game.locator(".turn.trained .said.policy").count() == 3
    assert "And you?" in told
    assert any(GAME_EVIL in text for text in game.locator(".said.told pre").all_text_contents())
    failed = watched.page.locator("details.game >> nth=1")
    assert "failed" in failed.inner_text()
    watched.page.click("details.game >> nth=1")
    assert "not trained on: the attempt failed" in failed.inner_text()
    assert failed.locator(".turn.trained").count() == 0
    assert (watched.dialogs, watched.errors) == ([], [])
    assert watched.page.locator("main img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_is_printed_with_every_chart_and_on_white(browser, tmp_path: Path, scheme: str) -> None:
    folder = write_run(tmp_path / "run-001", 60)
    page = Watched(browser, color_scheme=scheme)
    page.open(report(folder, tmp_path / "report.html"))
    with_charts = page.page.pdf()
    page.page.evaluate("for (const canvas of document.querySelectorAll('.plot canvas')) canvas.remove()")
    assert len(with_charts) > len(page.page.pdf()) + 10_000
    page.open((tmp_path / "report.html").as_uri())
    page.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    figures = page.page.query_selector_all("figure.chart")
    assert len(figures) > 10
    assert [figure.query_selector("h3").inner_text() for figure in figures if figure.evaluate(COLOURED) < 100] == []
    assert page.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert {canvas.is_visible() for canvas in page.page.query_selector_all("canvas.over")} == {False}  # it would hide the chart
    page.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert all(pixels > 100 for pixels in page.charts().values())
    page.context.close()


def test_the_numbers_under_the_pointer_are_those_of_the_step(watched: Watched, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 100)
    watched.open(report(folder, tmp_path / "report.html"))
    plot = watched.page.query_selector("figure.chart:has(h3:text-is('Generation')) .plot")
    plot.focus()
    for _ in range(8):
        watched.page.keyboard.press("PageUp")
    watched.page.wait_for_timeout(200)
    reading = watched.page.inner_text("figure.chart:has(h3:text-is('Generation')) .readings")
    assert reading == f"{step_row(20, 100)['engine/tokens_per_s']:,.0f}"


def test_a_range_that_is_dragged_over_is_shown_in_every_chart(watched: Watched, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 100)
    watched.open(report(folder, tmp_path / "report.html"))
    box = watched.page.query_selector("figure.chart .plot").bounding_box()
    middle = box["y"] + box["height"] / 2
    watched.page.mouse.move(box["x"] + box["width"] * 0.5, middle)
    watched.page.mouse.down()
    watched.page.mouse.move(box["x"] + box["width"] * 0.8, middle, steps=4)
    watched.page.mouse.up()
    watched.page.wait_for_selector(".zoom button")
    median = "section[aria-label=Percentiles] tr:has(td:text-is('step')) td >> nth=2"
    zoomed = watched.page.inner_text(median)
    watched.page.click(".zoom button")
    watched.page.wait_for_selector(".zoom button", state="hidden")
    assert watched.page.inner_text(median) != zoomed


def test_other_machines_of_a_run_have_a_line_each_and_a_run_of_one_has_no_such_table(watched: Watched, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 10)
    watched.open(report(folder, tmp_path / "report.html"))
    assert watched.page.get_by_role("region", name="Other machines").is_hidden()
    folder.samples_elsewhere.mkdir()
    sample = {"time": 1.0, "host": "node-<b>7", "process": "engine 2", "host/machine_cpu_percent": 40.0, "host/cores": 8}
    append(folder.samples_elsewhere / "node-7.jsonl", [sample] * 3)
    watched.open(report(folder, tmp_path / "report.html"))
    row = watched.page.get_by_role("region", name="Other machines").get_by_role("row").nth(1)
    assert row.get_by_role("cell").all_inner_texts()[:4] == ["node-<b>7", "engine 2", "8", "40"]


def test_what_a_model_wrote_is_text_in_a_report(watched: Watched, tmp_path: Path) -> None:
    watched.open(report(evil_run(tmp_path), tmp_path / "report.html"))
    assert_harmless(watched)


@pytest.mark.parametrize("cut", [1, 40])
def test_a_killed_run_is_shown_as_far_as_it_came(watched: Watched, tmp_path: Path, cut: int) -> None:
    folder = write_run(tmp_path / "run-001", 30, total=100, closed=False)
    folder.metrics.write_bytes(folder.metrics.read_bytes()[:-cut])
    watched.open(report(folder, tmp_path / "report.html"))
    assert "ended without closing its files, step 29 of 100" in watched.page.inner_text("main")


def test_a_failed_run_says_why_in_its_report_and_in_the_list(watched: Watched, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "run-001", 30, total=100)
    with pytest.raises(TaskError), recording_failure(folder):
        raise TaskError("the judge is <b>away</b>", "wait for it")
    watched.open(report(folder, tmp_path / "report.html"))
    page = watched.page.inner_text("main")
    assert "failed, step 30 of 100" in page
    assert "failed after step 30: the judge is <b>away</b>" in page
    assert "hint: wait for it" in page
    watched.page.click(".failed summary")
    assert "Traceback" in watched.page.inner_text(".failed pre")
    write_run(tmp_path / "runs" / "run-002", 3)
    with dashboard(tmp_path, tmp_path / "runs") as url:
        watched.open(url)
        watched.page.wait_for_selector(".status.failed")
        assert "failed after step 30: the judge is <b>away</b>" in watched.page.inner_text("main")


# ── the dashboard ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_that_are_appended_arrive_and_nothing_is_sent_twice(watched: Watched, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "run-001", 20, total=40, closed=False)
    answers: list[dict] = []

    def note(response) -> None:
        if "/data/run/" in response.url and "trajectories" not in response.url:
            answers.append(response.json())

    with dashboard(tmp_path, tmp_path / "runs") as url, folder.locked():
        watched.open(url)
        watched.page.on("response", note)
        assert "running, step 20 of 40" in watched.page.inner_text("main")
        line = json.dumps(step_row(21, 40)) + "\n"
        with folder.metrics.open("a") as file:
            file.write(line[:99])
            file.flush()
            watched.page.wait_for_timeout(2000)
            assert "step 20 of 40" in watched.page.inner_text("main")
            file.write(line[99:])
        watched.page.wait_for_selector("text=running, step 21 of 40")
        append(folder.path / "alerts.jsonl", [{"step": 21, "kind": "throughput_drop", "seen": "half as many tokens"}])
        watched.page.wait_for_selector("text=half as many tokens")
    sent = [step for answer in answers for step in answer.get("steps", {}).get("step", [])]
    assert sent == [21]
    assert not any(answer["whole"] for answer in answers)


def test_the_list_shows_runs_as_they_come_and_leads_to_them(watched: Watched, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "first-001", 20, max_lag=0)
    with dashboard(tmp_path, tmp_path / "runs") as url:
        watched.open(url.partition("run/")[0])
        watched.page.wait_for_selector("text=first-001")
        write_run(tmp_path / "runs" / "second-001", 5, total=10, closed=False)
        watched.page.wait_for_selector("text=second-001")
        row = watched.page.inner_text("tr[data-run=second-001]")
        assert "5 / 10" in row
        assert "killed" in row
        watched.page.click("text=first-001")
        watched.page.wait_for_selector("text=finished, step 20 of 20")
        assert watched.charts()["Reward"] > 100


def test_what_a_model_wrote_is_text_in_the_dashboard(watched: Watched, tmp_path: Path) -> None:
    evil_run(tmp_path / "runs")
    with dashboard(tmp_path, tmp_path / "runs") as url:
        watched.open(url)
        watched.page.wait_for_selector("details.group")
        assert_harmless(watched)
        watched.page.goto(url.partition("run/")[0])
        watched.page.wait_for_selector("tr[data-run]")
        assert watched.page.evaluate("window.pwned") is None


def test_what_slipped_into_the_page_could_still_not_run(browser, tmp_path: Path) -> None:
    """The second wall: markup that somehow became part of the page meets the policy."""
    folder = write_run(tmp_path / "runs" / "run-001", 5)
    with dashboard(tmp_path, tmp_path / "runs") as url:
        for place in (url, report(folder, tmp_path / "report.html")):
            page = Watched(browser)
            page.open(place)
            page.page.evaluate("""() => {
              const markup = "<img src=x onerror='window.pwned = 1'><b onclick='window.pwned = 1'>b</b>";
              document.body.insertAdjacentHTML("beforeend", markup);
              const script = document.createElement("script");
              script.textContent = "window.pwned = 1";
              document.body.append(script);
              document.querySelector("b:last-of-type").click();
            }""")
            page.page.wait_for_timeout(200)
            assert page.page.evaluate("window.pwned") is None
            assert any("Content Security Policy" in error for error in page.errors)
            page.context.close()


def assert_harmless(watched: Watched) -> None:
    page = watched.page
    for group in page.query_selector_all("details.group"):
        group.evaluate("(element) => { element.open = true; }")
    page.wait_for_timeout(300)
    said = page.eval_on_selector_all("pre.said.policy", "(found) => found.map((element) => element.textContent)")
    assert set(EVIL) <= set(said)
    assert page.evaluate("window.pwned") is None
    assert (
        page.eval_on_selector_all("main script, main img, main svg, main [onerror], main [onload]", "(found) => found.length")
        == 0
    )
    assert [url for url in watched.requests if "/x" in url] == []


# ── long runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

LATENCY = """async () => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const plot = document.querySelector("figure.chart .plot"), box = plot.getBoundingClientRect();
  const taken = { point: [], zoom: [] };
  const send = (kind, share) => {
    const clientX = box.left + 60 + share * (box.width - 70);
    plot.dispatchEvent(new PointerEvent(kind, { clientX, clientY: box.top + 50, pointerId: 1, button: 0, bubbles: true }));
  };
  plot.setPointerCapture = () => {};
  for (let k = 0; k < 30; k++) {
    const began = performance.now();
    send("pointermove", k / 30);
    await frame();
    taken.point.push(performance.now() - began);
  }
  for (let k = 0; k < 10; k++) {
    const began = performance.now();
    send("pointerdown", 0.02 + k / 100);
    send("pointermove", 0.9);
    send("pointerup", 0.9);
    await frame();
    taken.zoom.push(performance.now() - began);
    plot.dispatchEvent(new MouseEvent("dblclick"));
    await frame();
  }
  return taken;
}"""


def test_a_long_run_says_what_a_point_stands_for_and_keeps_its_extremes(watched: Watched, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 6000)
    lines = folder.metrics.read_text().splitlines()
    lines[1233] = json.dumps(json.loads(lines[1233]) | {"trainer/loss": 5.0})
    folder.metrics.write_text("\n".join(lines) + "\n")
    folder.ledger.touch()
    watched.open(report(folder, tmp_path / "report.html"))
    assert "Of the first 6,000 steps, a point of a chart stands for 10" in watched.page.inner_text("p.notice")
    assert all(pixels > 100 for pixels in watched.charts().values())
    watched.page.click("details.metrics summary")
    row = watched.page.inner_text("details.metrics tr:has-text('trainer/loss')").split()
    assert row[3] == "5"
    assert "of the first 6,000 steps" in watched.page.inner_text("table:has-text('waiting for rollouts') th")
    assert watched.errors == []


@pytest.mark.slow
def test_a_run_of_ten_thousand_steps_answers_as_one_of_a_hundred(browser, tmp_path: Path) -> None:
    """Both wait for the next frame, in the same browser; more steps may cost a part of a frame, not many."""
    taken = {}
    for steps in (100, 10_000):
        folder = write_run(tmp_path / f"run-{steps}", steps)
        page = Watched(browser)
        page.open(report(folder, tmp_path / f"{steps}.html"))
        assert all(pixels > 100 for pixels in page.charts().values())
        page.page.evaluate("window.scrollTo(0, document.querySelector('figure.chart').offsetTop - 50)")
        page.page.wait_for_timeout(300)
        taken[steps] = {name: statistics.median(found) for name, found in page.page.evaluate(LATENCY).items()}
        assert page.errors == []
        page.context.close()
    print(json.dumps(taken))
    assert taken[10_000]["point"] < 3 * taken[100]["point"]
    assert taken[10_000]["zoom"] < 6 * taken[100]["zoom"]


# ── a run as it is made ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_run_is_watched_from_its_first_step_to_its_last(watched: Watched, browser, tmp_path: Path) -> None:
    evaluation = {"num_tasks": 8, "every": 30}
    recipe = write_letters(tmp_path, run={"steps": 150}, buffer={"max_lag": 2}, rollouts={"evaluation": evaluation})
    (tmp_path / "runs").mkdir()
    (tmp_path / "dash").mkdir()
    with dashboard(tmp_path / "dash", tmp_path / "runs") as url:
        with started("train", recipe, cwd=tmp_path) as process:
            assert wait_until(lambda: any((tmp_path / "runs").glob("*/metrics.jsonl")), process)
            watched.open(f"{url}run/letters-001")
            watched.page.wait_for_selector("text=/running, step [1-9]/")
            if PICTURES:
                watched.page.wait_for_selector(r"text=/running, step ([5-9]\d|\d{3})/")
                watched.picture(Path(PICTURES) / "dash.png", top="section[aria-label=Learning]", height=620)
            assert process.wait() == 0
        watched.page.wait_for_selector("text=finished, step 150 of 150")
        watched.page.wait_for_selector("section[aria-label=Ledger] details.lane")
        watched.page.wait_for_selector("details.group:has-text('step 150')")
        charts = watched.charts()
        assert {title: pixels for title, pixels in charts.items() if pixels < 30} == {}
    written = report(only_run(tmp_path), tmp_path / "report.html")
    watched.open(written)
    assert watched.charts().keys() == charts.keys()
    if PICTURES:
        take_pictures(browser, written, Path(PICTURES))


def take_pictures(browser, url: str, folder: Path) -> None:
    """For the documentation."""
    for scheme, name, top in (
        ("light", "report.png", None),
        ("dark", "report-steps.png", "section[aria-label=Steps]"),
    ):
        page = Watched(browser, color_scheme=scheme)
        page.open(url)
        page.picture(folder / name, top=top)
        page.context.close()
    assert sum(path.stat().st_size for path in folder.glob("*.png")) < 300_000
