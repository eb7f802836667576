"""The page of a log of another framework, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.browser import Watched, chromium
from support.other_logs import RECORDED
from typer.testing import CliRunner

from redline.cli import app

pytestmark = pytest.mark.slow


def test_a_log_of_TRL_is_a_page_with_its_curve_its_phases_and_its_cost(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    arguments = ["report", str(RECORDED / "run-tiny.wandb"), "-o", str(page), "--price", "2.5", "--target", "0.6"]
    assert CliRunner().invoke(app, arguments).exception is None
    with chromium() as browser:
        watched = Watched(browser)
        watched.open(page.as_uri())
        headings = watched.page.locator("section:visible h2").all_inner_texts()
        cost = watched.page.locator('section[aria-label="What does it cost?"]').inner_text()
        charts = watched.charts()
        assert watched.page.locator(".status").inner_text() == "a log of TRL (W&B: run-tiny.wandb), 16 steps"
    assert {"Did it learn?", "What took the time?", "What to change", "What does it cost?", "Steps"} <= set(headings)
    assert "per device-hour" in cost
    assert "A mean reward of 0.6 (sampled attempts) was reached after" in cost
    assert charts["Reward"] > 100
    assert charts["Seconds per step"] > 100
    assert (watched.errors, watched.dialogs) == ([], [])


def test_without_a_price_there_is_no_section_of_costs(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert CliRunner().invoke(app, ["report", str(RECORDED / "trainer_state.json"), "-o", str(page)]).exception is None
    with chromium() as browser:
        watched = Watched(browser)
        watched.open(page.as_uri())
        headings = watched.page.locator("section:visible h2").all_inner_texts()
        notice = watched.page.locator(".notice").inner_text()
    assert "What does it cost?" not in headings
    assert "does not say what the time of a step went to" in notice
    assert watched.errors == []
