"""The verbs that explain and improve: keys, doctor, simulate and tune."""

from __future__ import annotations

import difflib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redline.errors import ConfigError

if TYPE_CHECKING:
    from redline.config.reference import Key
    from redline.lab.cost.cost import Asked
    from redline.lab.doctor.doctor import Diagnosis
    from redline.runs import Run

Price = Annotated[float | None, typer.Option(help="What an hour of one device costs: says what idle time and a target cost.")]
Devices = Annotated[int | None, typer.Option(help="How many devices are paid for, where the run does not say.")]
Target = Annotated[
    float | None, typer.Option(help="A mean reward: when it is reached. By default rollouts.evaluation.stop_at.")
]
WIDTH = 80
"""Columns of a pipe, and the most that text needs where a terminal has more."""


@dataclass(slots=True, frozen=True)
class Group:
    """Keys that are written in the same place."""

    name: str
    """What `redline keys NAME` calls the whole group."""
    title: str
    keys: tuple[Key, ...]


def keys(
    prefix: Annotated[
        str | None,
        typer.Argument(
            metavar="PREFIX", help="Only these: trainer, trainer.lora, serve, bench, bench.generate, or a part of a name."
        ),
    ] = None,
    as_page: Annotated[bool, typer.Option("--markdown", help="The recipe's keys as docs/recipe.md has them.")] = False,
) -> None:
    """Print every key of a recipe, of `redline serve` and of `redline bench`, with what it means."""
    if as_page:
        typer.echo(recipe_page(), nl=False)
        return
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: the shell closed it, `>&-`
    width = min(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH) if is_terminal else WIDTH
    typer.echo(text_of(chosen(prefix), width), nl=False)


def doctor(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run folder; a log of TRL, verl or prime-rl; or a trace, or a folder of them."),
    ],
    traces: Annotated[list[Path] | None, typer.Argument(metavar="TRACE", help="More traces: other ranks.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Traces: write the timeline of each cause as an HTML page."),
    ] = None,
    probes: Annotated[
        bool, typer.Option("--probe", help="Delay parts of a run that goes on, for some dozen steps, and see what bounds it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    price: Price = None,
    devices: Devices = None,
    target: Target = None,
) -> None:
    """Say what bounds a run, and what to change: each cause with its evidence, its gain and how to prove it.

    For traces of torch.profiler and nsys, say when devices waited for the CPU, and for which call of which process.
    """
    from redline.lab.traces.read import is_trace
    from redline.runs.others import is_log, open_run

    if traces or (is_trace(run) and not is_log(run)):
        if probes:
            raise ConfigError("--probe delays a run that goes on; a trace is over", "leave it out")
        if not (price is devices is target is None):
            raise ConfigError("--price, --devices and --target are for runs", "leave them out")
        _doctor_of_traces([run, *(traces or [])], output, as_json=as_json)
        return
    if output is not None:
        raise ConfigError("--output is for traces", "`redline report RUN` writes the page of a run")
    from redline.lab.cost.cost import Asked, cost_of
    from redline.lab.doctor.text import lines_of
    from redline.runs import Run

    asked = Asked(price, devices, target)
    if probes:
        from redline.lab.doctor.probe import probe

        recorded = Run.open(run)
        proof = probe(recorded, lambda line: typer.echo(line, err=True))
        document, said = proof.as_json(), [*lines_of(proof.diagnosis), "", *proof.lines()]
    else:
        recorded = open_run(run)
        diagnosis = diagnosed(recorded)
        document, said = diagnosis.as_json(), list(lines_of(diagnosis))
    if not asked.is_nothing:
        cost = cost_of(recorded, asked)
        document, said = document | {"cost": cost.as_json()}, [*said, "", *cost.sentences]
    typer.echo(json.dumps(document) if as_json else "\n".join(said))


def diagnosed(run: Run) -> Diagnosis:
    """What the doctor says of a run of ours, or of another framework."""
    from redline.lab.doctor.doctor import diagnose
    from redline.lab.others.diagnose import diagnose as diagnose_other
    from redline.runs.others import OtherRun

    return diagnose_other(run) if isinstance(run, OtherRun) else diagnose(run)


def explained(run: Run, asked: Asked | None = None) -> dict[str, Any]:
    """What the page of a run says beside its figures: the doctor's findings, and what it costs where somebody asks."""
    from redline.lab.cost.cost import cost_of

    cost = {} if asked is None or asked.is_nothing else {"cost": cost_of(run, asked).as_json()}
    return diagnosed(run).as_json() | cost


def _doctor_of_traces(traces: list[Path], output: Path | None, *, as_json: bool) -> None:
    from redline.lab.traces.diagnosis import diagnose
    from redline.lab.traces.evidence import document_of
    from redline.lab.traces.text import lines_of
    from redline.web.traces import write_trace_page

    diagnosis = diagnose(traces)
    if output is not None:
        write_trace_page(document_of(diagnosis), output)
    if as_json:
        typer.echo(json.dumps(diagnosis.as_json()))
        return
    typer.echo("\n".join(lines_of(diagnosis)))
    if output is not None:
        typer.echo(f"\nthe timeline of each cause: {output}")


def simulate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="What to change, such as buffer.max_lag=1, placement.engines=4 or lengths=2."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say how long a step would take with other settings, from what a run recorded."""
    from redline.lab.simulate.recorded import Recording
    from redline.lab.simulate.text import lines_of
    from redline.lab.simulate.whatif import simulate as answered
    from redline.runs import Run

    answer = answered(Recording.of(Run.open(run)), overrides or [])
    typer.echo(json.dumps(answer.as_json()) if as_json else "\n".join(lines_of(answer)))


def tune(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML recipe.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Replace a value of the recipe before it is tuned."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where log, proof and tuned recipe go; by default tuned/NAME of the recipe."),
    ] = None,
    trials: Annotated[int, typer.Option(help="Changes to try at most, those of earlier calls included.", min=0)] = 30,
    minutes: Annotated[float, typer.Option(help="Minutes that this call may take, the proof included.", min=0)] = 60,
    max_lag: Annotated[
        int, typer.Option(help="The largest buffer.max_lag to try. A lag trains on older samples; 0 leaves it alone.", min=0)
    ] = 1,
    effect: Annotated[float, typer.Option(help="The smallest gain worth a trial: 0.03 is 3%.", min=0.001, max=1)] = 0.03,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Make a recipe faster: try settings in pairs of short runs, keep what pays, prove the result.

    What is learned stays: no setting of the algorithm is touched. The same command goes on after a stop. Exit code 0: the tuned
    recipe is not slower. 1: it is, or a guard is broken. 2: no verdict, or an error.
    """
    from redline.lab.tune.command import Asked
    from redline.lab.tune.command import tune as run_tune
    from redline.lab.tune.text import lines_of
    from redline.lab.tune.tune import Budget
    from redline.telemetry.console.tables import log_console

    asked = Asked(recipe, overrides or (), out or Path("tuned") / recipe.stem, Budget(trials, 60 * minutes, effect), max_lag)
    try:
        result = run_tune(asked, log_console())
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on where it was", err=True)
        raise typer.Exit(130) from None
    for line in lines_of(result.tuned, result.report.verdict.sentence if result.report else ""):
        typer.echo(line, err=as_json)
    typer.echo(json.dumps(result.as_json()) if as_json else result.recipe)
    raise typer.Exit(result.exit_code)


def groups() -> tuple[Group, ...]:
    """Everything that has keys: recipes, `redline serve`, and each case of `redline bench`."""
    from redline.config.reference import keys_of
    from redline.config.schema import Config
    from redline.config.sections.engine import RunEngineConfig, ServedEngineConfig
    from redline.lab.bench.settings import SETTINGS
    from redline.serve.requests.limits import ServeLimits

    shared = {f"engine.{name}" for name in RunEngineConfig.model_fields}
    served = [key for key in keys_of(ServedEngineConfig, "engine.") if key.name not in shared]
    return (
        Group("recipe", "A recipe, and redline train RECIPE KEY=VALUE", tuple(keys_of(Config))),
        Group("serve", "redline serve MODEL KEY=VALUE, besides run.* and engine.*", (*served, *keys_of(ServeLimits, "serve."))),
        *(
            Group(
                "bench",
                f"redline bench {case} KEY=VALUE, without bench.{case}.",
                tuple(keys_of(settings, f"bench.{case}.", whole=("engine", "trainer"))),
            )
            for case, settings in SETTINGS.items()
        ),
    )


def chosen(prefix: str | None) -> list[Group]:
    """The groups with the keys that `prefix` asks for. Raises `ConfigError` where it asks for none."""
    from redline.config.reference import beginning_with, containing

    every = groups()
    if prefix is None or any(group.name == prefix for group in every):
        return [group for group in every if prefix in (None, group.name)]
    for choose in (beginning_with, containing):
        found = [replace(group, keys=tuple(filter(None, (choose(key, prefix) for key in group.keys)))) for group in every]
        if any(group.keys for group in found):
            return [group for group in found if group.keys]
    raise ConfigError(f"no key has {prefix!r} in its name", _suggestion(prefix, every))


def _suggestion(prefix: str, every: tuple[Group, ...]) -> str:
    from redline.config.elsewhere import ELSEWHERE

    last = prefix.rpartition(".")[2]
    if last in ELSEWHERE:
        return f"did you mean {ELSEWHERE[last]}?"
    names = [key.name for group in every for key in group.keys]
    whole = {part: name for name in reversed(names) for part in (name, name.rpartition(".")[2])}
    near = difflib.get_close_matches(prefix, whole, n=1)
    return f"did you mean {whole[near[0]]}?" if near else "`redline keys` prints all of them"


def text_of(found: list[Group], width: int) -> str:
    """The groups as text, each under its title."""
    from redline.config.reference import as_text

    return "\n\n".join(f"{group.title}\n\n{as_text(group.keys, width)}" for group in found) + "\n"


# ── docs/recipe.md ─────────────────────────────────────────────────────────────────────────────────────────────────────

PAGE_HEAD = """\
# Recipe reference

Every key of a recipe: what `redline train RECIPE` reads, and what `section.key=value` behind it replaces.
`redline keys [PREFIX]` prints the same, and the settings of `redline bench`. The algorithms, which fill several keys at once,
are in [algorithms.md](algorithms.md).

A key that holds a mapping has its entries below it: `trainer.schedule: {kind: cosine, warmup_steps: 10}` in a recipe,
`trainer.schedule.warmup_steps=10` on the command line. An unknown key, a value out of bounds and a key that would have no
effect are refused with the fix, before anything is loaded; `redline train RECIPE --dry-run` says what a recipe comes to.

A value on the command line is YAML, except where the key wants text: that is taken as it stands, so that
`'rollouts.prompt_suffix= Think first.'` keeps its space. With quotes of its own it is YAML again:
`'rollouts.prompt_suffix="\\nAnswer:"'` begins with a line break.

<!-- written by `redline keys --markdown`; a test compares -->
"""


def recipe_page() -> str:
    """The page docs/recipe.md: a table for each section of a recipe, others for the kinds of one, and one for `redline
    serve`."""
    return PAGE_HEAD + "".join(_page_sections())


def _page_sections() -> Iterator[str]:
    from redline.config.reference import as_table
    from redline.config.schema import Config

    recipe, serve, *_ = groups()
    for section, field in Config.model_fields.items():
        own = [key for key in recipe.keys if key.name.startswith(f"{section}.")]
        yield f"\n## {section}\n\n{field.description}\n\n{as_table(key for key in own if not key.kind)}"
        for kind in dict.fromkeys(key.kind for key in own if key.kind):
            of_kind = [key.in_its_kind for key in own if key.kind == kind]
            yield f"\n### {of_kind[0].name.rpartition('.')[0]} with `kind: {kind}`\n\n{as_table(of_kind)}"
    yield f"\n## redline serve\n\n`{serve.title}`.\n\n{as_table(serve.keys)}"
