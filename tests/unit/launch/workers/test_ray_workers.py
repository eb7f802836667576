"""What the actor of a worker does, without Ray around it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from redline.launch.workers.ray_workers import WorkerActor
from redline.telemetry.machine.hosts import HostSampling

ASK = json.dumps({"do": "load", "path": "json:dumps", "folder": None})


def test_samples_of_its_node_travel_with_the_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    actor = WorkerActor("reward process 1", asdict(HostSampling(0.01, "/runs/demo-001", "far")))
    until = time.monotonic() + 300
    while "samples" not in (found := json.loads(actor.answer(ASK))):
        assert found == {"value": None}
        assert time.monotonic() < until
    assert found["value"] is None
    assert {sample["process"] for _, sample in found["samples"]} == {"reward process 1"}
    actor._sampling.__exit__(None, None, None)


def test_without_samples_an_answer_is_what_it_was() -> None:
    assert json.loads(WorkerActor("environment process 1", None).answer(ASK)) == {"value": None}
