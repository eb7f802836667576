"""A real browser, and what a person would see in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"

COLOURED = """(figure) => {
  const canvas = figure.querySelector("canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let i = 0; i < data.length; i += 4) {
    const most = Math.max(data[i], data[i + 1], data[i + 2]), least = Math.min(data[i], data[i + 1], data[i + 2]);
    if (data[i + 3] > 40 && most - least > 25) found += 1;
  }
  return found;
}"""
"""Pixels of a chart that have a colour: text, rules and paper have none."""


@contextmanager
def chromium() -> Iterator:
    """The system's, driven by Playwright; whoever asks for it is skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium, or name one in CHROMIUM")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


SERVER_ENDED = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE", "ERR_INCOMPLETE_CHUNKED_ENCODING")


class Watched:
    """A page with everything that must not happen on it."""

    def __init__(self, browser, **options) -> None:
        self.context = browser.new_context(viewport={"width": 1400, "height": 1000}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", self._dialog)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._console)

    def _console(self, message) -> None:
        """A dashboard that has ended does not answer, or breaks off; that is no error of the page."""
        if message.type == "error" and not any(reason in message.text for reason in SERVER_ENDED):
            self.errors.append(message.text)

    def _dialog(self, dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def open(self, url: str) -> None:
        self.page.goto(url)
        self.page.wait_for_selector("h1")

    def charts(self) -> dict[str, int]:
        """Title → coloured pixels, each brought into view first, since charts are drawn when they are near."""
        found = {}
        for figure in self.page.query_selector_all("figure.chart"):
            figure.scroll_into_view_if_needed()
            self.page.evaluate(FRAMES)
            found[figure.query_selector("h3").inner_text()] = figure.evaluate(COLOURED)
        return found

    def picture(self, path: Path, *, top: str | None = None, height: int = 900) -> None:
        """What is visible below the element `top`, in as many colours as it takes."""
        from PIL import Image

        self.page.set_viewport_size({"width": 1280, "height": height})
        if top:
            self.page.eval_on_selector(
                top, "(element) => window.scrollTo(0, element.getBoundingClientRect().top + window.scrollY - 24)"
            )
        self.page.wait_for_timeout(400)
        self.page.screenshot(path=path)
        with Image.open(path) as image:
            image.convert("RGB").quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)
