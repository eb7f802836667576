"""A process that trains plants, and the same without their bottleneck, each when it is told to.

    python -m redline.lab.doctor.planted.process FOLDER
    {"keys": {...}, "delays": {...}, "first_delays": {...}, "with_first": false, "has_neighbours": false, "ranks": 1}
    →  {"findings": [...], "neighbours_s": ..., "step_s": [...], "attempts": ...}

Runs in one process load torch once, and are warm alike; those of several ranks are started by torchrun, each time anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from redline.child import take_stdout
from redline.config import make_config
from redline.lab.doctor.doctor import RULES, examined, facts_of
from redline.lab.doctor.facts import BETWEEN, Facts
from redline.lab.doctor.finding import Finding
from redline.lab.doctor.planted.plants import RECIPE, STEPS
from redline.launch.run import train
from redline.launch.start import new_run
from redline.runs import Run
from redline.telemetry import RunFolder
from redline.telemetry.delays import ask

NEIGHBOUR = "noisy_neighbour"
LIFE_S = 600.0
"""Seconds after which delays end, whatever happens."""


def main() -> None:
    reply, folder = take_stdout(), Path(sys.argv[1])
    for line in sys.stdin:
        reply(planted(folder, json.loads(line)))


def planted(parent: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Train one run in a folder below `parent`, and say what the doctor and the clock say of it."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in wanted["keys"].items()]
    overrides.append(f"run.folder={json.dumps(str(parent))}")
    if wanted["ranks"] > 1:
        facts = facts_of(_trained_by_ranks(parent, overrides, wanted["ranks"]))
        return {**_said(facts, wanted["has_neighbours"]), **_measured(facts, wanted["with_first"])}
    checked = new_run(make_config(RECIPE, overrides))
    folder = RunFolder.create(parent, "planted")
    always, first = wanted["delays"], wanted["first_delays"]
    if always or first:
        ask(folder, os.getpid(), [{**always, **first}, *([always] * STEPS)], LIFE_S)
    train(checked, folder, began_ns=time.perf_counter_ns())
    facts = facts_of(Run.open(folder.path), with_delays=True)
    return {**_said(facts, wanted["has_neighbours"]), **_measured(facts, wanted["with_first"])}


def _trained_by_ranks(parent: Path, overrides: Sequence[str], ranks: int) -> Run:
    """Train a run by several processes. Blocks until they have ended; raises CalledProcessError where they fail."""
    recipe = parent / "planted.yaml"
    recipe.write_text(json.dumps(RECIPE))  # YAML that needs no library
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    before = set(parent.iterdir())
    subprocess.run([*launcher, "-m", "redline", "train", str(recipe), *overrides], check=True, stdout=subprocess.DEVNULL)
    [made] = set(parent.iterdir()) - before
    return Run.open(made)


def _said(facts: Facts, has_neighbours: bool) -> dict[str, Any]:
    """The doctor's findings. Neighbours that nobody planted are looked for apart: they are there, and somebody else's."""
    rules = {cause: rule for cause, rule in RULES.items() if has_neighbours or cause != NEIGHBOUR}
    findings, _ = examined(facts, rules)
    keys = ("cause", "title", "gain", "change")
    others = RULES[NEIGHBOUR](facts)
    return {
        "findings": [{key: value for key, value in asdict(finding).items() if key in keys} for finding in findings],
        "neighbours_s": others.gain.likely_s if isinstance(others, Finding) else 0.0,
    }


def _measured(facts: Facts, with_first: bool) -> dict[str, Any]:
    """Seconds of each step, what lies before it included, and attempts of all of them that did not fail."""
    columns = [facts.first, facts.steps] if with_first else [facts.steps]
    step_s = np.concatenate([part["run/step_s"] + np.nan_to_num(part[BETWEEN]) for part in columns])
    attempts = sum(float(np.nansum(part["rollouts/attempts"] - part["rollouts/failures"])) for part in columns)
    return {"step_s": step_s.tolist(), "attempts": attempts}


if __name__ == "__main__":
    main()
