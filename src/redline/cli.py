"""The `redline` command. Importing this file loads no torch: what is wrong with a command line is said at once."""

from __future__ import annotations

import contextlib
import errno
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from redline import __version__
from redline.errors import ConfigError, RedlineError

if TYPE_CHECKING:
    from redline.config import Config, Resolved
    from redline.lab.bench.every import AllDocument
    from redline.lab.evidence.document import Document
    from redline.telemetry import RunFolder

app = typer.Typer(
    help="Reinforcement-learning post-training for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe; with --resume, a run folder or the recipe it came from.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Replace values of the recipe.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything but the weights, print the resolved run, leave nothing.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run folder from its last checkpoint.")] = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="With --resume: begin again at step 0; what is there moves to set-aside-NNN.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON document on stdout.")] = False,
) -> None:
    """Train a model as a recipe says."""
    from redline.telemetry.console.unread_output import dropping_unread_output

    if from_scratch and not resume:
        raise ConfigError("--from-scratch begins an existing run again", "add --resume, or leave it out for a new run")
    with dropping_unread_output():
        try:
            summary = _train(recipe, overrides or [], dry_run=dry_run, resume=resume, from_scratch=from_scratch)
        except KeyboardInterrupt:  # where there is something to continue, the launcher has said how
            raise typer.Exit(130) from None
        if summary is not None:
            typer.echo(json.dumps(summary) if as_json else summary["run"])
    if summary is not None and not summary["finished"]:
        raise typer.Exit(130)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file, a hub id, or a built-in model.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Set keys of a recipe's engine section, run.KEY or serve.KEY."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; one that others can reach needs an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.")] = "auto",
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Compute dtype.")] = "auto",
    api_key_env: Annotated[str, typer.Option(help="The environment variable that holds the API key.")] = "REDLINE_API_KEY",
    served_model_name: Annotated[str | None, typer.Option(help="The model's name to clients; by default MODEL.")] = None,
    lora: Annotated[list[str] | None, typer.Option(metavar="NAME=PATH", help="A LoRA adapter to serve as NAME.")] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another name that clients reach this server by.")
    ] = None,
) -> None:
    """Serve a model over an OpenAI-compatible API."""
    from redline.serve.listener import bind
    from redline.serve.settings import make_settings

    settings = make_settings(
        model,
        overrides or [],
        host=host,
        port=port,
        device=device,
        dtype=dtype,
        api_key_env=api_key_env,
        served_model_name=served_model_name,
        adapters=lora or [],
        allowed_hosts=allowed_host or [],
    )
    for warning in settings.warnings:
        typer.echo(warning, err=True)
    try:
        with bind(settings.host, settings.port) as listener:
            from redline.serve.server import serve as serve_forever

            serve_forever(settings, listener)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    step: Annotated[int | None, typer.Option(help="Only the groups that this step was trained on.", min=0)] = None,
    group: Annotated[int | None, typer.Option(help="Only this group, with its attempts.", min=0)] = None,
    failures: Annotated[bool, typer.Option("--failures", help="Only attempts that failed.")] = False,
    limit: Annotated[int, typer.Option(help="At most this many groups, the last ones; 0 shows all.", min=0)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, with all tokens.")] = False,
) -> None:
    """List what a run sampled, and print attempts."""
    from rich.console import Console

    from redline.buffer.store.show import show as show_trajectories
    from redline.telemetry import RunFolder
    from redline.telemetry.files.failure import read_failure

    if step is not None and group is not None:
        raise ConfigError("--step and --group exclude each other", "give one of them")
    folder, console = RunFolder.open(run), Console(highlight=False)
    if failure := read_failure(folder):
        typer.echo(f"{folder.path.name} {failure.line}", err=True)
    document = show_trajectories(
        folder.shown, step=step, number=group, failures=failures, limit=limit, as_json=as_json, console=console
    )
    if document is not None:
        typer.echo(json.dumps(document))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="By default RUN/report.html.")] = None,
) -> None:
    """Write a run as one HTML file."""
    from redline.web.report import write_report

    target = output or run / "report.html"
    write_report(run, target)
    typer.echo(target)


@app.command()
def dash(
    runs: Annotated[list[Path] | None, typer.Argument(metavar="[RUN]...", help="Run folders, or folders of them.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; one that others can reach gets a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 0,
) -> None:
    """Show runs in a browser, live."""
    from redline.serve.listener import bind
    from redline.web.packages import refuse_missing_packages

    refuse_missing_packages()
    from redline.web.dash import serve as serve_pages

    try:
        with bind(host, port) as listener:
            serve_pages(runs or [Path("runs")], host, listener)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def repair(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON document on stdout.")] = False,
) -> None:
    """Save what is intact in damaged trajectories."""
    from redline.buffer.store.repair import repair as repair_trajectories
    from redline.telemetry import RunFolder

    folder = RunFolder.open(run)
    with folder.locked():
        report = repair_trajectories(folder.trajectories)
    typer.echo("\n".join(report.lines), err=True)
    if as_json:
        typer.echo(json.dumps(report.as_json()))


@app.command()
def bench(
    case: Annotated[
        str,
        typer.Argument(
            help="What to measure: generate, n-sampling, rollout, trainer, e2e, weight-sync, memory, transfer, serialize,"
            " telemetry, or all."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the case, such as workload=W1.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: a few seconds a case.")] = False,
    against: Annotated[str | None, typer.Option(help="Of e2e: who takes the same steps in turn, trl.")] = None,
    trl_python: Annotated[Path | None, typer.Option(metavar="PATH", help="The python of an environment with trl.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also write a profile, next to the saved result.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON document on stdout.")] = False,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write the document to DIR/CASE.json.")] = None,
) -> None:
    """Measure a part of redline beside its physical bound and its peers.

    Exit code 1: of `all`, a case failed.
    """
    from redline.lab.bench.every import ALL, bench_all
    from redline.lab.bench.settings import make_settings, quick_overrides

    document: Document | AllDocument
    asked = {"against": against, "trl_python": trl_python}
    given = [*(overrides or []), *(f"{key}={value}" for key, value in asked.items() if value is not None)]
    try:
        if case == ALL:
            document = bench_all(given, quick=quick, profile=save or Path() if profile else None)
        else:
            settings = make_settings(case, [*(quick_overrides(case) if quick else ()), *given])
            from redline.lab.bench.run import bench as run_bench

            document = run_bench(case, settings, profile=save or Path() if profile else None)
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was saved", err=True)
        raise typer.Exit(130) from None
    path = document.save(save) if save else None
    if as_json:
        typer.echo(json.dumps(document.as_json()))
    elif path:
        typer.echo(path)
    raise typer.Exit(document.exit_code)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="A recipe, git:REV, a source tree, or a saved result (FILE.json, FILE.json#SIDE).")],
    b: Annotated[str, typer.Argument(help="The same for B.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Of the recipe or the case, on both sides.")
    ] = None,
    a_overrides: Annotated[list[str] | None, typer.Option("--a", metavar="KEY=VALUE", help="On A alone.")] = None,
    b_overrides: Annotated[list[str] | None, typer.Option("--b", metavar="KEY=VALUE", help="On B alone.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="What revisions and source trees run: steps of this recipe.")] = None,
    case: Annotated[str | None, typer.Option(help="Or a case of redline bench, such as trainer.")] = None,
    metric: Annotated[str | None, typer.Option(help="What is compared; by default the time of a step.")] = None,
    effect: Annotated[float, typer.Option(help="The smallest difference to find: 0.03 is 3%.", min=0.001, max=1)] = 0.03,
    tolerance: Annotated[float, typer.Option(help="How much worse B may be before it counts.", min=0, max=1)] = 0.0,
    guard: Annotated[
        list[str] | None, typer.Option(metavar="NAME=TOLERANCE", help="memory, reward or KL; how much worse it may get.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Turns that each process of a pair takes; an even number.", min=2)] = None,
    max_pairs: Annotated[int, typer.Option(help="Most pairs of A and B; fewer than 8 give no verdict.", min=1)] = 60,
    max_minutes: Annotated[float, typer.Option(help="Most minutes, whatever was found by then.", min=0)] = 30,
    seed: Annotated[int, typer.Option(help="Decides the order in each pair.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON document on stdout.")] = False,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write the document to DIR/compare.json.")] = None,
) -> None:
    """Find out whether B is better than A, by interleaved pairs.

    Exit code 0: B is not worse. 1: B is worse beyond the tolerance, or a guard is broken. 2: no verdict, or an error.
    """
    from redline.lab.compare.command import Request, text_console
    from redline.lab.compare.command import compare as run_compare
    from redline.lab.compare.sides import What
    from redline.lab.evidence.experiment import Wish
    from redline.lab.evidence.guards import read_tolerances

    what = What(recipe, case, overrides or (), a_overrides or (), b_overrides or ())
    wish = Wish(effect, tolerance, max_pairs, 60 * max_minutes)
    request = Request(a, b, what, wish, metric, rounds, read_tolerances(guard or []), seed)
    try:
        report = run_compare(request, text_console())
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


@app.command()
def plan(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Replace values of the recipe.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Plan for this device: h200, h100, a100, l40s, …, cpu; by default for what is here.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="How many of them, in one machine.", min=1)] = 1,
    price: Annotated[list[str] | None, typer.Option(metavar="DEVICE=DOLLARS", help="What an hour of a device costs.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt; tasks are not loaded to count them.", min=1)] = 128,
    new_tokens: Annotated[
        float | None, typer.Option(help="Tokens of an attempt, on average; by default as many as it may have.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON document on stdout.")] = False,
) -> None:
    """Say what a recipe will take, in memory, time and money, before anything is loaded.

    Exit code 0: it fits. 1: it does not.
    """
    from redline.config import load_recipe, refuse_without_effect
    from redline.config.algorithms import fill_algorithm

    config = load_recipe(recipe, overrides or [])
    refuse_without_effect(fill_algorithm(config)[0])
    from redline.lab.plan.plan import make_plan
    from redline.lab.plan.table import show_plan

    made = make_plan(config, gpu, gpus, prices=price or [], prompt_tokens=prompt_tokens, mean_new_tokens=new_tokens)
    show_plan(made)
    if as_json:
        typer.echo(json.dumps(made.as_json()))
    if not made.fits:
        raise typer.Exit(1)


@app.command()
def perf(
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="What is measured; each has a baseline.")] = "auto",
    baselines: Annotated[Path, typer.Option(metavar="DIR", help="Where they are.")] = Path("benchmarks/baselines"),
    update: Annotated[bool, typer.Option("--update", help="Make what is found the baseline.")] = False,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Why; it is kept in the file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON document on stdout.")] = False,
) -> None:
    """Hold counts and ratios of small workloads against the committed baseline.

    Exit code 0: nothing is worse. 1: something is. 2: there is no baseline, or an error.
    """
    from redline.lab.compare.command import text_console
    from redline.lab.gate.perf import perf as run_perf
    from redline.lab.gate.perf import require_reason

    outcome = run_perf(device, baselines, require_reason(update, reason), text_console())
    if as_json:
        typer.echo(json.dumps(outcome.as_json()))
    raise typer.Exit(outcome.exit_code)


@app.command()
def profile(
    run: Annotated[Path, typer.Argument(help="The folder of a run that goes on.")],
    what: Annotated[
        Literal["rollout", "trainer", "e2e"], typer.Option(help="While groups are made, the trainer's step, or all of it.")
    ] = "e2e",
    steps: Annotated[int, typer.Option(help="How many steps, from the next one on.", min=1)] = 1,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the profiles and print their folders.")] = True,
) -> None:
    """Profile the next steps of a running job, without a restart."""
    from redline.telemetry import RunFolder
    from redline.telemetry.profiling.request import ask, wait_for_summaries

    folder = RunFolder.open(run)
    request = ask(folder, what, steps)
    typer.echo(f"asked; the next step will be profiled into {folder.profiles}", err=True)
    if wait:
        for path in wait_for_summaries(folder, request):
            typer.echo(path)


def _train(path: Path, overrides: list[str], *, dry_run: bool, resume: bool, from_scratch: bool) -> dict[str, Any] | None:
    """What the run came to; None of a dry run. Refuses what it can before there is a run folder."""
    from redline.config import load_recipe, refuse_without_effect, resolve
    from redline.telemetry import RunFolder

    if resume:
        folder, config = _run_to_continue(path, overrides)
    else:
        folder, config = None, load_recipe(path, overrides)
    resolved = resolve(config)
    if not resume:  # a run goes on as it began
        refuse_without_effect(resolved.config)
    from redline.preflight import check

    checked = check(resolved.config, folder.path if folder else None)
    resolved = replace(resolved, warnings=(*resolved.warnings, *checked.notes))
    if dry_run:
        _print_resolved(resolved)
        return None
    from redline.launch import train as launch_train

    folder = folder or RunFolder.create(resolved.config.run.folder, config.run.name, given=config.run.folder)
    return launch_train(resolved, folder, resume=resume, from_scratch=from_scratch, tasks=checked.tasks)


def _run_to_continue(path: Path, overrides: list[str]) -> tuple[RunFolder, Config]:
    """The run folder that `path` is, or the newest one made from the recipe that it is, with its own config."""
    from redline.config import load_recipe, validate
    from redline.config.changes import changes
    from redline.telemetry import RunFolder

    if path.name == "config.json":  # of a run: as a recipe it would stand for the newest run of that name
        path = path.parent
    recipe = load_recipe(path, overrides) if path.is_file() else None
    if recipe:
        folder = RunFolder.newest(recipe.run.folder, recipe.run.name, tell=lambda text: typer.echo(text, err=True))
    else:
        folder = RunFolder.open(path)
    allowed = ("run.steps=", "run.name=", "run.folder=") if recipe else ("run.steps=",)
    foreign = [override for override in overrides if not override.startswith(allowed)]
    if foreign:
        raise ConfigError(
            f"--resume continues a run as it was configured; it cannot take {', '.join(foreign)}",
            "leave the override out (run.steps=N may be given, to train longer), or start a new run",
        )
    config = load_recipe(folder.config, overrides)  # JSON is YAML
    # A key that a config.json of an earlier version lacks stays at its default: no algorithm fills it in half-way.
    config = validate(config.model_dump(mode="json"), str(folder.config))
    if recipe and (changed := changes(recipe, config)):
        typer.echo(f"{folder.path.name} goes on as it began; {path} says otherwise: {'; '.join(changed)}", err=True)
    return folder, config


def _print_resolved(resolved: Resolved) -> None:
    """Data to stdout, reasons to stderr."""
    for key, reason in resolved.reasons.items():
        section, name = key.split(".")
        typer.echo(f"{key} = {getattr(getattr(resolved.config, section), name)}  ({reason})", err=True)
    for warning in resolved.warnings:
        typer.echo(warning, err=True)
    typer.echo(json.dumps(resolved.config.model_dump(mode="json"), indent=2))


_DISK_ERRORS = {
    errno.ENOSPC: ("the disk is full", "free some space and continue with --resume"),
    errno.EDQUOT: ("your share of the disk is used up", "free some space and continue with --resume"),
    errno.EFBIG: ("a file may not become that large here", "raise the limit (ulimit -f) and continue with --resume"),
    errno.EIO: ("the disk does not read or write", "look at the disk, then continue with --resume"),
    errno.EROFS: ("the disk is read-only", "give a folder on another disk"),
    errno.EACCES: ("no permission", "give a folder that you may write to, or change its permissions"),
}


def main() -> None:
    """Run, and turn what we understand into a message, a hint and an exit code."""
    try:
        app()
    except RedlineError as error:
        _fail(f"error: {error}")
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        what, hint = _DISK_ERRORS[error.errno]
        _fail(f"error: {what}: {error}\n\nhint: {hint}")


def _fail(message: str) -> NoReturn:
    with contextlib.suppress(OSError):  # nobody may be reading
        typer.echo(message, err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
