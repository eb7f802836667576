"""The verbs that look at recorded runs: show, report, dash and repair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from redline.errors import ConfigError, RunFolderError

if TYPE_CHECKING:
    from redline.telemetry import RunFolder


def show(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    step: Annotated[int | None, typer.Option(help="Only the groups that this step was trained on.", min=1)] = None,
    group: Annotated[int | None, typer.Option(help="Only this group, with its attempts.", min=0)] = None,
    failures: Annotated[bool, typer.Option("--failures", help="Only attempts that failed.")] = False,
    limit: Annotated[int, typer.Option(help="At most this many groups, the last ones; 0 shows all.", min=0)] = 20,
    ledger: Annotated[bool, typer.Option("--ledger", help="Instead, where the time went, lane by lane.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, with all tokens.")] = False,
) -> None:
    """List what a run sampled, print attempts, or say where the time went."""
    from redline.runs.show import show as show_trajectories
    from redline.telemetry import RunFolder
    from redline.telemetry.console.tables import results_console
    from redline.telemetry.files.failure import read_failure

    if step is not None and group is not None:
        raise ConfigError("--step and --group exclude each other", "give one of them")
    folder, console = RunFolder.open(run), results_console()
    if ledger:
        _show_ledger(folder, as_json=as_json)
        return
    if failure := read_failure(folder):
        typer.echo(f"{folder.path.name} {failure.line}", err=True)
    document = show_trajectories(
        folder.shown, step=step, number=group, failures=failures, limit=limit, as_json=as_json, console=console
    )
    if document is not None:
        typer.echo(json.dumps(document))


def _show_ledger(folder: RunFolder, *, as_json: bool) -> None:
    from redline.telemetry import Ledger
    from redline.telemetry.console.tables import Fitted, results_console

    try:
        document = json.loads(folder.ledger.read_text())
        found = Ledger.from_json(document)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise RunFolderError(f"{folder.shown}: no ledger to show", "it is written when a run ends") from error
    if as_json:
        typer.echo(json.dumps(document))
    else:
        results_console().print(Fitted(found.render()))


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="By default RUN/report.html.")] = None,
) -> None:
    """Write a run as one HTML file."""
    from redline.web.report import write_report

    target = output or run / "report.html"
    write_report(run, target)
    typer.echo(target)


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
