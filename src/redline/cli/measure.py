"""The verbs that measure or predict: bench, compare, plan, perf and profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from redline.lab.bench.every import AllDocument
    from redline.lab.evidence.document import Document


def bench(
    case: Annotated[
        str,
        typer.Argument(
            metavar="CASE",
            help="What to measure: generate, n-sampling, rollout, trainer, e2e, weight-sync, memory, transfer, serialize,"
            " telemetry, or all; doctor runs planted bottlenecks.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="A setting of the case, such as workload=W1; `redline keys bench` lists them. For doctor: names of plants.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Take small sizes: a few seconds for each case.")] = False,
    against: Annotated[str | None, typer.Option(help="For e2e: also run this framework, interleaved (trl).")] = None,
    trl_python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The python of an environment in which trl is installed.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Run once more for a profile, which is written next to the saved result.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; tables go to stderr.")] = False,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write the document to DIR/CASE.json.")] = None,
) -> None:
    """Measure one part of redline, beside the limit of the hardware and beside other libraries.

    Exit code 1: with `all`, a case failed; with `doctor`, too many causes were not found.
    """
    if case == "doctor":
        _bench_doctor(overrides or [], quick, [against, trl_python, profile or None], as_json, save)
        return
    from redline.lab.bench.every import ALL, bench_all
    from redline.lab.bench.settings import make_settings, quick_overrides
    from redline.lab.bench.table import render
    from redline.telemetry.console.tables import log_console, results_console

    document: Document | AllDocument
    asked = {"against": against, "trl_python": trl_python}
    given = [*(overrides or []), *(f"{key}={value}" for key, value in asked.items() if value is not None)]
    try:
        if case == ALL:
            document = bench_all(given, quick=quick, profile=save or Path() if profile else None)
        else:
            settings = make_settings(case, [*(quick_overrides(case) if quick else ()), *given])
            from redline.lab.bench.run import bench as run_bench

            document = run_bench(case, settings, log_console(), profile=save or Path() if profile else None)
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was saved", err=True)
        raise typer.Exit(130) from None
    path = document.save(save) if save else None
    results_console(as_json=as_json).print(render(document))
    if as_json:
        typer.echo(json.dumps(document.as_json()))
    elif path:
        typer.echo(path)
    raise typer.Exit(document.exit_code)


def _bench_doctor(names: list[str], quick: bool, others: list[object], as_json: bool, save: Path | None) -> None:
    """Run the library of planted bottlenecks; `quick` leaves out the runs without them."""
    from redline.errors import ConfigError
    from redline.lab.doctor.planted.library import render, run_library
    from redline.telemetry.console.tables import log_console, results_console

    if any(option is not None for option in others):
        raise ConfigError("--against, --trl-python and --profile are not for bench doctor", "leave them out")
    log = log_console()
    try:
        library = run_library(
            names, lambda line: log.print(line, soft_wrap=True, highlight=False), with_fixes=not quick, save=save
        )
    except KeyboardInterrupt:
        typer.echo("stopped; what was run so far is saved" if save else "stopped; nothing was saved", err=True)
        raise typer.Exit(130) from None
    results_console(as_json=as_json).print(render(library))
    if as_json:
        typer.echo(json.dumps(library.as_json()))
    elif save:
        typer.echo(save / "doctor.json")
    raise typer.Exit(library.exit_code)


def compare(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="A recipe, git:REV, a source tree, or a saved result (FILE.json, FILE.json#SIDE)."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare with A: one of the same.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Replace a value of the recipe or the case on both sides.")
    ] = None,
    a_overrides: Annotated[
        list[str] | None, typer.Option("--a", metavar="KEY=VALUE", help="Replace a value on side A alone.")
    ] = None,
    b_overrides: Annotated[
        list[str] | None, typer.Option("--b", metavar="KEY=VALUE", help="Replace a value on side B alone.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="The recipe whose steps are timed, where A and B are revisions or source trees.")
    ] = None,
    case: Annotated[
        str | None, typer.Option(help="The case of redline bench to run instead of a recipe, such as trainer.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="The figure to compare. By default the time of a step.")] = None,
    effect: Annotated[float, typer.Option(help="The smallest difference to find: 0.03 is 3%.", min=0.001, max=1)] = 0.03,
    tolerance: Annotated[float, typer.Option(help="How much slower B may be and still pass: 0.02 is 2%.", min=0, max=1)] = 0.0,
    guard: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TOLERANCE", help="How much worse memory, reward or KL may get. May be given several times."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="How often the two processes of a pair take turns; an even number.", min=2)
    ] = None,
    max_pairs: Annotated[int, typer.Option(help="Stop after this many pairs. Fewer than 8 give no verdict.", min=1)] = 60,
    max_minutes: Annotated[float, typer.Option(help="Stop after this many minutes.", min=0)] = 30,
    seed: Annotated[int, typer.Option(help="The seed that decides which side goes first.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; tables go to stderr.")] = False,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write the document to DIR/compare.json.")] = None,
) -> None:
    """Find out whether B is faster than A, from interleaved pairs.

    Exit code 0: B is not slower. 1: B is slower than the tolerance allows, or a guard is broken. 2: no verdict, or an error.
    """
    from redline.lab.compare.command import Request
    from redline.lab.compare.command import compare as run_compare
    from redline.lab.compare.sides import What
    from redline.lab.evidence.experiment import Wish
    from redline.lab.evidence.guards import read_tolerances
    from redline.telemetry.console.tables import log_console

    what = What(recipe, case, overrides or (), a_overrides or (), b_overrides or ())
    wish = Wish(effect, tolerance, max_pairs, 60 * max_minutes)
    request = Request(a, b, what, wish, metric, rounds, read_tolerances(guard or []), seed)
    try:
        report = run_compare(request, log_console())
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was saved", err=True)
        raise typer.Exit(130) from None
    path = report.save(save) if save else None
    typer.echo(report.verdict.sentence, err=as_json)
    if path:
        typer.echo(path, err=True)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    raise typer.Exit(report.verdict.exit_code)


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML recipe.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Replace a value of the recipe; `redline keys` lists all keys."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="The device to plan for: h200, h100, a100, l40s, …, cpu. By default the one here.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="How many of these devices one machine has.", min=1)] = 1,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE=DOLLARS", help="What an hour of a device costs. May be given several times."),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(help="How many tokens a prompt has; tasks are not loaded to count them.", min=1)
    ] = 128,
    new_tokens: Annotated[
        float | None, typer.Option(help="How many tokens an attempt has on average. By default as many as it may have.")
    ] = None,
    sharding: Annotated[
        Literal["none", "grad_op", "full"] | None,
        typer.Option(help="What trainers on several devices divide; by default the least that fits."),
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Devices that divide one engine; by default what samples fastest.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; tables go to stderr.")] = False,
) -> None:
    """Predict the memory, time and price of a recipe, without loading anything.

    Exit code 0: it fits. 1: it does not.
    """
    from redline.config import load_recipe, refuse_without_effect
    from redline.config.algorithms import fill_algorithm

    config = load_recipe(recipe, overrides or [])
    refuse_without_effect(fill_algorithm(config)[0])
    from redline.lab.plan.plan import Hardware, make_plan
    from redline.lab.plan.table import render
    from redline.telemetry.console.tables import results_console

    hardware = Hardware(gpu, gpus, price or [], sharding, tensor_parallel)
    made = make_plan(config, hardware, prompt_tokens=prompt_tokens, mean_new_tokens=new_tokens)
    results_console(as_json=as_json).print(render(made))
    if as_json:
        typer.echo(json.dumps(made.as_json()))
    if not made.fits:
        raise typer.Exit(1)


def perf(
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="The device to measure; each has a baseline of its own.")
    ] = "auto",
    baselines: Annotated[Path, typer.Option(metavar="DIR", help="The folder of the baselines.")] = Path("benchmarks/baselines"),
    update: Annotated[bool, typer.Option("--update", help="Make what is measured the new baseline; needs --reason.")] = False,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Why the baseline changes; it is kept in the file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; tables go to stderr.")] = False,
) -> None:
    """Check that nothing got slower: counts and ratios of small workloads beside a stored baseline.

    Exit code 0: nothing is worse. 1: something is. 2: there is no baseline, or an error.
    """
    from redline.lab.gate.perf import perf as run_perf
    from redline.lab.gate.perf import render, require_reason
    from redline.telemetry.console.tables import log_console, results_console

    outcome = run_perf(device, baselines, require_reason(update, reason), log_console())
    results_console(as_json=as_json).print(render(outcome))
    if as_json:
        typer.echo(json.dumps(outcome.as_json()))
    raise typer.Exit(outcome.exit_code)


def profile(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that is going on.")],
    what: Annotated[
        Literal["rollout", "trainer", "e2e"], typer.Option(help="What to profile: the rollouts, the trainer's step, or both.")
    ] = "e2e",
    steps: Annotated[int, typer.Option(help="How many steps to profile, from the next one on.", min=1)] = 1,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the profiles are written and print their folders.")
    ] = True,
) -> None:
    """Profile the next steps of a run that is going on."""
    from redline.telemetry import RunFolder
    from redline.telemetry.profiling.request import ask, wait_for_summaries

    folder = RunFolder.open(run)
    request = ask(folder, what, steps)
    typer.echo(f"asked; the next step will be profiled into {folder.profiles}", err=True)
    if wait:
        for path in wait_for_summaries(folder, request):
            typer.echo(path)
