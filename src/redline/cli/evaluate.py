"""The verb eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def eval(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run folder, a checkpoint of one, a Hugging Face folder, a .gguf file, a hub id, or a built-in model.",
        ),
    ],
    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK",
            help="What to ask: a recipe, a run folder, a file of questions, an environment or a reasoning-gym data set. By"
            " default what the run of MODEL held out. KEY=VALUE replaces a value: num_tasks, samples_per_task, temperature, or"
            " SECTION.KEY of the recipe.",
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Ask this model the same, and print the difference.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; tables go to stderr.")] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write the document to DIR/eval.json, and every answer beside it.")
    ] = None,
) -> None:
    """Ask a model held-out questions, as a training run does, and print its scores with intervals."""
    from redline.lab.evaluate.command import evaluate
    from redline.lab.evaluate.command import save as save_in
    from redline.telemetry.console.tables import results_console

    try:
        document = evaluate(model, tasks or [], against, lambda text: typer.echo(text, err=True), save)
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was saved", err=True)
        raise typer.Exit(130) from None
    from redline.lab.evaluate.table import render

    results_console(as_json=as_json).print(render(document))
    if as_json:
        typer.echo(json.dumps(document.as_json()))
    if save:
        typer.echo(save_in(document, save), err=True)
