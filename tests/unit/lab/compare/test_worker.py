"""The processes of a pair, as the one that asks them sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from redline.lab.compare import worker
from redline.lab.compare.worker import Job, Turns, Worker, measure_pair
from redline.lab.evidence.experiment import Metric
from redline.lab.tune.trials import Gain

STEP = Metric("run/step_s")


@dataclass
class Side:
    """A `Child` whose steps take these seconds, again and again."""

    seconds: tuple[float, ...]
    asked: list[str] = field(default_factory=list)

    def read(self, limit_s: float | None) -> dict[str, Any]:
        return {"device": "cpu", "identity": {}}

    def ask(self, what: str, limit_s: float | None) -> dict[str, Any]:
        if what == "end":
            return {"peak_bytes": 1}
        self.asked.append(what)
        step_s = self.seconds[len(self.asked) % len(self.seconds)]
        return {"metrics": {"run/step_s": step_s, "wall_s": step_s, "run/samples_per_s": 64 / step_s}, "larger_is_better": []}


def test_a_round_of_several_steps_is_their_mean(tmp_path: Any) -> None:
    side = Side((0.1, 0.3))
    one, two = (Worker(Job(tmp_path, {}, "a"), side, steps=steps) for steps in (1, 2))  # type: ignore[arg-type]
    assert one.round()["run/step_s"] == 0.3
    found = two.round()
    assert found["run/step_s"] == pytest.approx(0.2)
    assert found["run/samples_per_s"] * found["run/step_s"] == pytest.approx(64), "as many samples a step as each had"
    assert len(side.asked) == 3


@pytest.mark.parametrize("alternate", [True, False])
def test_steps_that_find_samples_and_steps_that_wait_for_them_are_no_gain(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, alternate: bool
) -> None:
    """With a lag of 1 the samples of two steps come together: 0.06 and 0.30 s are as fast as 0.18 and 0.18, where the mean of
    their logs says 1.34 times as fast."""
    sides = {"A": Side((0.18,)), "B": Side((0.06, 0.30))}
    monkeypatch.setattr(worker, "_program", lambda source: source)
    monkeypatch.setattr(worker, "Child", lambda command, *_: _Held(sides[command[2].removeprefix(str(tmp_path) + "/")]))
    a, b = Job(tmp_path / "A", {}, "a"), Job(tmp_path / "B", {}, "b", lag=1)
    pair, told = measure_pair(a, b, Turns(8, alternate), 0, 0)
    assert Gain.of([pair], 0.0).ratio == pytest.approx(1)
    assert pair.log_ratio(STEP) == pytest.approx(0)
    assert len(sides["A"].asked) == len(sides["B"].asked), "they stay at the same step of the same run"
    assert told.round_s == pytest.approx(2 * (0.18 + 0.18))


@dataclass
class _Held:
    side: Side

    def __enter__(self) -> Side:
        return self.side

    def __exit__(self, *_: object) -> None: ...
