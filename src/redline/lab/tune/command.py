"""`redline tune RECIPE`: the folder of a tuning, from the recipe to the tuned one, its log and its proof.

OUT/log.jsonl      what was tried       OUT/recipe.yaml    the tuned recipe
OUT/compare.json   the proof            OUT/recordings/    runs of a few steps that were looked at
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from redline.config import Config, recipe_values
from redline.errors import ConfigError, SideError
from redline.lab.compare.command import Report, Request, report_of, stopping_cleanly
from redline.lab.compare.sides import What
from redline.lab.evidence.experiment import Wish
from redline.lab.tune.bench import ProcessBench
from redline.lab.tune.inputs import inputs_of
from redline.lab.tune.log import TrialLog
from redline.lab.tune.recipe import written
from redline.lab.tune.space import overrides_of
from redline.lab.tune.text import counted, line_of
from redline.lab.tune.tune import Budget, Tuned, Tuning, as_json, explained, tolerances
from redline.launch.preflight import check_inputs
from redline.telemetry import describe_environment
from redline.telemetry.files.durable import replace_file

RECIPE = "recipe.yaml"


@dataclass(slots=True, frozen=True)
class Asked:
    """The command line."""

    recipe: Path
    overrides: Sequence[str]
    out: Path
    budget: Budget
    max_lag: int


@dataclass(slots=True, frozen=True)
class Result:
    """What a tuning leaves."""

    tuned: Tuned
    recipe: Path
    """The tuned recipe."""
    report: Report | None
    """The proof; None where nothing was kept."""
    budget: Budget

    @property
    def exit_code(self) -> int:
        return self.report.verdict.exit_code if self.report else 0

    def as_json(self) -> dict[str, Any]:
        proof = self.report.as_json() if self.report else None
        return {**as_json(self.tuned, self.budget), "recipe": str(self.recipe), "proof": proof}


def tune(asked: Asked, console: Console) -> Result:
    """Tune a recipe, or go on with it; a person follows on `console`. Blocks for minutes to hours."""
    bench = ProcessBench(asked.recipe, asked.overrides, asked.out.resolve() / "recordings", asked.max_lag)
    config = bench.config({})
    _refuse(config)
    tasks = check_inputs(config).tasks
    values = recipe_values(asked.recipe, asked.overrides)
    identity = {"recipe": json.loads(json.dumps(values, default=str)), "machine": _machine(), **inputs_of(config, tasks)}
    bench.identity = json.dumps(identity, sort_keys=True)
    tell = lambda line: console.print(line, style="dim", soft_wrap=True, highlight=False, markup=False)  # noqa: E731
    with stopping_cleanly(), TrialLog.opened(asked.out, identity) as log:
        tell_trial = lambda number, trial: console.print(  # noqa: E731
            line_of(number, trial), soft_wrap=True, highlight=False, markup=False
        )
        _refuse_lower_lag(asked, log.state.kept)
        if log.state.trials:
            tell(f"{asked.out}: goes on after {counted(log.state.trials)}")
        tuning = Tuning(bench, log, asked.budget, tell, tell_trial=tell_trial)
        try:
            tuned = tuning.run()
        except SideError as error:
            raise explained(error) if not log.state.kept else error from None
        return _saved(asked, tuned, values)


def _refuse(config: Config) -> None:
    """Recipes whose processes are elsewhere cannot be run in pairs here."""
    for key, value in {
        "placement.cluster": config.placement.cluster,
        "placement.remote_engines": config.placement.remote_engines,
    }.items():
        if value:
            raise ConfigError(
                f"{key} = {value}: trials run in processes of this machine", f"leave {key} out and tune one machine's part"
            )


def _refuse_lower_lag(asked: Asked, kept: Mapping[str, Any]) -> None:
    """A tuning that has kept a lag already does not go on below it."""
    if (lag := kept.get("buffer.max_lag", 0)) > asked.max_lag:
        raise ConfigError(
            f"--max-lag {asked.max_lag}: the tuning in {asked.out} has kept buffer.max_lag={lag} already",
            f"go on with --max-lag {lag}, or give another --out",
        )


def _saved(asked: Asked, tuned: Tuned, values: dict[str, Any]) -> Result:
    state, path = tuned.state, asked.out / RECIPE
    report = None
    if tuned.experiment is not None:
        what = What(overrides=tuple(asked.overrides), b_overrides=tuple(overrides_of(state.kept)))
        wish = Wish(asked.budget.worth, max_pairs=tuned.experiment.wish.max_pairs)
        request = Request(str(asked.recipe), str(path), what, wish, guards=tolerances(state.kept))
        report = report_of(request, tuned.experiment)
        report.save(asked.out)
    replace_file(path, written(values, state.kept, state.trials, _head(asked, tuned, report)).encode())
    return Result(tuned, path, report, asked.budget)


def _head(asked: Asked, tuned: Tuned, report: Report | None) -> list[str]:
    """The first comments of the tuned recipe."""
    given = " ".join([str(asked.recipe), *asked.overrides])
    trials = f"{counted(tuned.state.trials)}; {tuned.ended}."
    if report is None:
        return [f"{given}, tuned by redline: nothing is changed, since nothing was shown to be faster.", trials]
    said = f"A is the recipe as it was, B this one: {report.verdict.sentence}."
    return [f"{given}, tuned by redline. What is changed has the reason above it.", said, trials]


def _machine() -> dict[str, Any]:
    """What trials of another machine would differ by."""
    facts = describe_environment()
    return {"cpu": facts["cpu"], "gpus": [gpu["name"] for gpu in facts["gpus"]]}
