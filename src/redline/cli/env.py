"""The verbs about environments: env list, env check, env play and env warm."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from redline.errors import ConfigError

if TYPE_CHECKING:
    from redline.config import Config
    from redline.lab.environments.players import Player

app = typer.Typer(
    help="List, check and play environments.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="An environment of `redline env list`, module:Class, or a recipe.")]
Params = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="A parameter of the environment, as in its `params`.")
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="A parameter of the environment, as in its `params`; behind a recipe also SECTION.KEY=VALUE, which replaces a"
        " value of it.",
    ),
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
    params: Words = None,
    tasks: Annotated[int, typer.Option(help="How many training tasks to play.", min=1)] = 3,
    say: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="What the scripted policy says; given several times, in turn. By default the answer."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The seed of the environment and of the random policy, else the recipe's or 0.", min=0)
    ] = None,
    limit: Annotated[float, typer.Option(help="Seconds that any one call may take.", min=0.1)] = 30,
    as_json: AsJson = False,
) -> None:
    """Play a few attempts without a model, and say what a run would stumble over.

    Exit code 0: nothing is wrong. 1: something is, a sentence each. 2: it cannot be made at all.
    """
    from rich.text import Text

    from redline.lab.environments.check import check as look_at
    from redline.lab.environments.check_table import render
    from redline.lab.environments.made import named
    from redline.lab.environments.trials import Plan
    from redline.runs.told import printable
    from redline.telemetry.console.tables import log_console, results_console
    from redline.telemetry.console.unread_output import dropping_unread_output

    log = log_console()
    made = named(name, params or [], seed)
    try:
        report = look_at(
            made,
            Plan(tasks, limit, made.seed, tuple(say or ()), other_process=":" in name),
            lambda text: log.print(Text(printable(text), "dim")),
        )
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    with dropping_unread_output():  # the exit code says what was found, whether or not anybody reads on
        for part in render(report):
            results_console(as_json=as_json).print(part, soft_wrap=True)
        if as_json:
            typer.echo(json.dumps(report.as_json()))
    raise typer.Exit(report.exit_code)


@app.command()
def play(
    name: Name,
    params: Words = None,
    task: Annotated[int, typer.Option(help="Which training task to play, counted from 0.", min=0)] = 0,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A model plays: a run folder, a Hugging Face folder, a built-in, ….")
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A served model plays: the address of an OpenAI-compatible API, …/v1.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What the server calls the model; else its first.")] = None,
    api_key_env: Annotated[str, typer.Option(help="The environment variable that holds the API key.")] = "REDLINE_API_KEY",
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of a model, else the recipe's or 1; 0 takes the likeliest tokens.", min=0)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of a model's reply, else the recipe's or 256.", min=1)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The seed of the environment and of the model, else the recipe's or 0.", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Play one attempt in the terminal yourself, or watch a model play it.

    A line that you type is a reply; lines of a pipe are replies in turn. Exit code 1: the attempt ended without a reward.
    """
    from redline.lab.environments.made import named
    from redline.lab.environments.play import play as play_one
    from redline.runs.told import printable

    made = named(name, params or [], seed)
    player = _player(PlayerChoice(model, url, served_model_name, api_key_env), temperature, max_tokens, made.seed, made.recipe)
    try:
        played = play_one(made, task, player, lambda text: typer.echo(printable(text), err=as_json), None)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    finally:
        player.close()
    if played.problem:
        typer.echo(printable(f"no reward: {played.problem}"), err=True)
    if as_json:
        typer.echo(json.dumps(played.as_json()))
    raise typer.Exit(played.exit_code)


@dataclass(slots=True, frozen=True)
class PlayerChoice:
    """Who plays, as the command line names it; a person where it names neither a model nor a server."""

    model: str | None
    url: str | None
    served_model_name: str | None
    api_key_env: str


def _player(who: PlayerChoice, temperature: float | None, max_tokens: int | None, seed: int, recipe: Config | None) -> Player:
    from redline.engine.adapters.json_client import JsonClient
    from redline.lab.environments.players import RETRIES, Person, Served

    if who.model is not None and who.url is not None:
        raise ConfigError("--model and --url exclude each other", "give one of them")
    if who.served_model_name is not None and who.url is None:
        raise ConfigError("--served-model-name is what a server calls its model", "give the server with --url, or leave it out")
    if who.model is None and who.url is None and not (temperature is max_tokens is None):
        raise ConfigError(
            "--temperature and --max-tokens are a model's, and you play", "leave them out, or add --model or --url"
        )
    if who.model is not None:
        from redline.lab.environments.model_player import Manner, ModelPlayer

        return ModelPlayer(who.model, Manner(temperature, max_tokens, seed), recipe)
    if who.url is not None:
        client = JsonClient(who.url, os.environ.get(who.api_key_env), 600.0, RETRIES)
        own = (recipe.rollouts.temperature, recipe.rollouts.max_new_tokens) if recipe else (1.0, None)
        return Served(client, who.served_model_name, own[0] if temperature is None else temperature, max_tokens or own[1])
    return Person(_read_line, lambda text: typer.echo(text, err=True))


def _read_line(prompt: str) -> str | None:
    """A line of the input, or None at its end. The prompt stands on stderr, and only where somebody types."""
    if sys.stdin is None:
        return None
    if sys.stdin.isatty():
        typer.echo(prompt, nl=False, err=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


@app.command()
def warm(
    name: Name,
    params: Params = None,
    states: Annotated[int, typer.Option(help="How many states to make; a tenth of them is held out.", min=2)] = 1000,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write. A call that was stopped goes on.")] = Path(
        "states.bin"
    ),
    seed: Annotated[int, typer.Option(help="The seed of the environment, and the first seed of a state.", min=0)] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes that make states; by default one per core.", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Make a file of states that attempts begin from, so that none has to play its way there."""
    from redline.lab.environments.made import Made, read_params
    from redline.lab.environments.warm import CHUNK, Wish
    from redline.lab.environments.warm import warm as make_file
    from redline.telemetry.console.tables import log_console

    log = log_console()
    pays = max(1, states // CHUNK)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wish = Wish(states, out, seed, min(workers or cores, pays))

    def tell(count: int) -> None:
        if count % 100 == 0 or count == states:
            log.print(f"{count} of {states} states", style="dim")

    try:
        header = make_file(Made(name, read_params(params or []), seed), wish, tell, log.print)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on", err=True)
        raise typer.Exit(130) from None
    typer.echo(json.dumps({"path": str(out)} | asdict(header)) if as_json else out)
