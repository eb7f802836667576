"""How far an evaluation is, said while it goes on."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from redline.lab.evaluate import answers
from redline.lab.evaluate.answers import _telling


@pytest.mark.parametrize(("left", "how_far"), [(3, "7 of 10 questions answered"), (None, "10 questions under way")])
def test_now_and_then_it_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, left: int | None, how_far: str) -> None:
    monkeypatch.setattr(answers, "SAYS_EVERY_S", 0.01)
    said: list[str] = []
    rollouts: Any = SimpleNamespace(num_sampling_here=left)
    with _telling("sums", 10, rollouts, said.append):
        end = time.monotonic() + 10
        while len(said) < 2 and time.monotonic() < end:
            time.sleep(0.005)
    assert said[0].startswith(f"sums: {how_far} after 0 s")
    before = len(said)
    time.sleep(0.05)
    assert len(said) == before, "it goes on when nothing is asked any more"
