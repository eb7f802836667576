"""The verb export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a checkpoint of one.")],
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to write. By default exports/step-NNNNNN in the run's.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="The step of the checkpoint. By default the newest.", min=0)] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into its base model. By default it is written as PEFT has it.")
    ] = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, or as a PEFT folder where an adapter was trained."""
    from redline.launch.export import choose
    from redline.launch.export import export as write

    wanted = choose(run.expanduser(), to and to.expanduser(), step, merge=merge)
    try:
        typer.echo(write(wanted, lambda text: typer.echo(text, err=True)))
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was written", err=True)
        raise typer.Exit(130) from None
