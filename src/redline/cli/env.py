"""The verbs about environments: env list, env check, env play and env warm."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(
    help="List, check and play environments.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="An environment of `redline env list`, or module:Class of your own.")]
Params = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="A parameter of the environment, as in its `params`.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; everything else goes to stderr.")]


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the environments that ship and the kinds of tasks, and what each needs."""
    from redline.lab.environments.listing import listing
    from redline.telemetry.console.tables import results_console

    found = listing()
    if as_json:
        typer.echo(json.dumps(found.as_json()))
        return
    for table in found.tables():
        results_console().print(table)


@app.command()
def check(
    name: Name,
    params: Params = None,
    tasks: Annotated[int, typer.Option(help="How many training tasks to play.", min=1)] = 3,
    say: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="What the scripted policy says; given several times, in turn. By default the answer."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the environment and of the random policy.", min=0)] = 0,
    limit: Annotated[float, typer.Option(help="Seconds that any one call may take.", min=0.1)] = 30,
    as_json: AsJson = False,
) -> None:
    """Play a few attempts without a model, and say what a run would stumble over.

    Exit code 0: nothing is wrong. 1: something is, a sentence each. 2: it cannot be made at all.
    """
    from redline.lab.environments.check import check as look_at
    from redline.lab.environments.check_table import render
    from redline.lab.environments.made import Made, read_params
    from redline.lab.environments.trials import Plan
    from redline.telemetry.console.tables import log_console, results_console

    log = log_console()
    made = Made(name, read_params(params or []), seed)
    report = look_at(made, Plan(tasks, limit, seed, tuple(say or ())), lambda text: log.print(text, style="dim"))
    for part in render(report):
        results_console(as_json=as_json).print(part, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    raise typer.Exit(report.exit_code)
