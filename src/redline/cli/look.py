"""The verbs that look at recorded runs: show, report, dash and repair."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from redline.cli.explain import Devices, Price, Target, explained
from redline.errors import ConfigError, RunFolderError

if TYPE_CHECKING:
    from redline.runs import Run


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    step: Annotated[int | None, typer.Option(help="Only the groups of this step, counted from 1.", min=1)] = None,
    group: Annotated[int | None, typer.Option(help="Only this group, with the text of its attempts.", min=0)] = None,
    attempt: Annotated[int | None, typer.Option(help="With --group: this attempt, turn by turn.", min=0)] = None,
    failures: Annotated[bool, typer.Option("--failures", help="Only attempts that failed, with the reason.")] = False,
    limit: Annotated[int, typer.Option(help="Show this many groups, the newest; 0 shows all.", min=0)] = 20,
    ledger: Annotated[bool, typer.Option("--ledger", help="Print where the time went instead, lane by lane.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, with all tokens.")] = False,
) -> None:
    """Print what a run sampled, or where its time went."""
    from redline.runs import Run
    from redline.runs.show import Wanted, document
    from redline.runs.show import show as show_trajectories
    from redline.telemetry.console.tables import results_console

    if step is not None and group is not None:
        raise ConfigError("--step and --group exclude each other", "give one of them")
    if attempt is not None and (group is None or failures):
        raise ConfigError("--attempt needs --group, and goes without --failures", "such as: --group 3 --attempt 0")
    if ledger and (failures or not (step is group is attempt is None)):
        raise ConfigError(
            "--ledger is of the whole run; --step, --group, --attempt and --failures choose attempts", "leave them out"
        )
    recorded = Run.open(run)
    if ledger:
        _show_ledger(recorded, as_json=as_json)
        return
    if failure := recorded.failure:
        typer.echo(f"{recorded.name} {failure.line}", err=True)
    wanted = Wanted(step, group, failures, attempt, limit)
    if as_json:
        typer.echo(json.dumps(document(recorded.folder.shown, wanted)))
    else:
        show_trajectories(recorded.folder.shown, wanted, results_console())


def _show_ledger(run: Run, *, as_json: bool) -> None:
    from redline.telemetry.console.tables import Fitted, results_console

    found = run.ledger
    if found is None:
        raise RunFolderError(f"{run.folder.shown}: no ledger to show", "it is written when a run ends")
    if sentence := run.ledger_is_of:
        typer.echo(sentence, err=True)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        results_console().print(Fitted(found.render()))


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a log of TRL, verl or prime-rl.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The file to write. By default report.html beside it.")
    ] = None,
    price: Price = None,
    devices: Devices = None,
    target: Target = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the page says as one JSON document instead.")] = False,
) -> None:
    """Write everything about a run into one HTML file."""
    from redline.lab.cost.cost import Asked
    from redline.runs.others import open_run
    from redline.runs.reader import RunReader
    from redline.web.report import write_report

    if as_json and output is not None:
        raise ConfigError("--json prints a document, and --output names a page", "give one of them")
    explain = partial(explained, asked=Asked(price, devices, target))
    recorded = open_run(run)
    if as_json:
        typer.echo(json.dumps({"run": str(run), **RunReader(recorded, explain).document()["head"]}, allow_nan=False))
        return
    page = output or (run if run.is_dir() else run.parent) / "report.html"
    write_report(recorded, page, explain)
    typer.echo(page)


def dash(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="Run folders, or folders of them. By default runs/.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on. One that other machines can reach gets a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.", min=0, max=65535)] = 0,
) -> None:
    """Watch runs in a browser while they go on."""
    from redline.serve.listener import bind
    from redline.web.packages import refuse_missing_packages

    refuse_missing_packages()
    from redline.web.dash import serve as serve_pages

    try:
        with bind(host, port) as listener:
            serve_pages(runs or [Path("runs")], host, listener, explained)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def repair(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Rescue the intact groups of a run whose trajectories are damaged."""
    from redline.buffer.store.repair import repair as repair_trajectories
    from redline.telemetry import RunFolder

    folder = RunFolder.open(run)
    with folder.locked():
        report = repair_trajectories(folder.trajectories)
    typer.echo("\n".join(report.lines), err=True)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
