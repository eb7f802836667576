"""`redline bench rollout environment=NAME`: every arm does the same work, and what is off is off."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from redline.errors import ConfigError, TaskError
from redline.lab.bench.cases import rollout_switches
from redline.lab.bench.cases.rollout_arms import OFF, ON, ArmRun, refuse_failures
from redline.lab.bench.cases.rollout_switches import beside
from redline.lab.bench.settings import make_settings
from redline.lab.material.switched_engine import SwitchedEngine
from redline.types import Delta, GenerateRequest, SamplingParams

COMMON = ["device=cpu", "num_threads=1", "pairs=2", "groups_per_step=2", "group_size=3", "max_new_tokens=6"]
RUN = ArmRun(1.0, 0.8, 10, 100, 500, 200, 4.0, 0.5, 6, 0)


@pytest.mark.slow
@pytest.mark.alone
def test_each_thing_that_is_off_costs_what_it_saves_and_changes_nothing_that_is_sampled() -> None:
    settings = make_settings("rollout", ["environment=single-turn", "model=builtin:tiny", *COMMON])
    said = io.StringIO()
    measured = rollout_switches.measure(settings, Console(file=said, width=300))  # type: ignore[arg-type]
    results = {result.name: result for result in measured.results}
    assert list(results) == [
        "gain of everything",
        "gain of warm adapter",
        "gain of prefix caching",
        "gain of broker",
        "gain of async episodes",
        "tokens, all on",
    ]
    for sample in results["gain of everything"].samples:
        on, off = sample[ON], sample[OFF]
        assert (on["turns"], on["new_tokens"], on["failures"]) == (off["turns"], off["new_tokens"], 0)
        assert off["mean_batch"] == 1.0 < on["mean_batch"]
        assert off["hit_rate"] == 0.0
        assert off["computed_prompt_tokens"] == off["prompt_tokens"] > on["computed_prompt_tokens"]
    assert results["gain of broker"].value > 1
    json.dumps([result.as_json() for result in measured.results])
    assert "medians of a round" in said.getvalue()


@pytest.mark.slow
def test_an_environment_of_several_turns_is_measured() -> None:
    given = ["environment=guess_number", "params={largest: 9, guesses: 2}", "model=builtin:tiny", "without=broker", *COMMON]
    measured = rollout_switches.measure(make_settings("rollout", given), Console(quiet=True))  # type: ignore[arg-type]
    [sample, *_] = measured.results[0].samples
    assert sample[ON]["turns"] == sample[OFF]["turns"] == 12
    assert sample[OFF]["mean_batch"] == 1.0


def test_an_arm_that_did_other_work_is_said_to() -> None:
    same, fewer = replace(RUN, seconds=2.0), replace(RUN, turns=5)
    assert beside("slow", "x", [{ON: RUN, "x": same}]) == "slow: 2.00 s, batch 4.0, 200 prompt tokens computed"
    assert beside("slow", "x", [{ON: RUN, "x": fewer}]).endswith("; other work: -50% turns, +100% tokens per turn")


def test_rounds_of_nothing_but_failures_are_refused() -> None:
    failed = SimpleNamespace(failure=SimpleNamespace(hint="make it shorter", __str__=lambda self: "prompt: too long"))
    with pytest.raises(TaskError, match="every attempt failed"):
        refuse_failures([SimpleNamespace(trajectories=[failed])])  # type: ignore[list-item]


def test_an_environment_and_a_recipe_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="environment says what is attempted"):
        make_settings("rollout", ["environment=guess_number", "recipe=recipes/smoke.yaml"])


class CountingEngine:
    """Ends every request in its first step, and remembers how many were there."""

    def __init__(self) -> None:
        self.requests: dict[int, GenerateRequest] = {}
        self.most = 0
        self.seen: list[tuple[int, tuple[int, ...]]] = []

    def submit(self, request: GenerateRequest, *, streaming: bool = False) -> int:
        number = 100 + len(self.seen)
        self.requests[number] = request
        self.seen.append((request.sampling.seed, tuple(request.sampling.indices)))
        return number

    def step(self) -> list[tuple[int, Delta]]:
        self.most = max(self.most, sum(request.sampling.n for request in self.requests.values()))
        done = [
            (number, Delta(index, np.zeros(0, np.int32), np.zeros(0, np.float32)))
            for number, request in self.requests.items()
            for index in request.sampling.indices
        ]
        self.requests.clear()
        return done

    @property
    def has_work(self) -> bool:
        return bool(self.requests)


def test_without_a_broker_each_completion_is_alone_and_the_same() -> None:
    inner = CountingEngine()
    engine = SwitchedEngine(inner, singly=True)  # type: ignore[arg-type]
    request = GenerateRequest(np.zeros(3, np.int32), SamplingParams(4, n=3, first_index=2, seed=7))
    number = engine.submit(request)
    pieces = []
    while engine.has_work:
        pieces += engine.step()
    assert [(whole, piece.index) for whole, piece in pieces] == [(number, 2), (number, 3), (number, 4)]  # type: ignore[union-attr]
    assert inner.most == 1
    assert inner.seen == [(7, (2,)), (7, (3,)), (7, (4,))]
