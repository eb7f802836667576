"""The verbs that run a model: train and serve."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from redline.errors import ConfigError

if TYPE_CHECKING:
    from redline.config import Resolved


def train(
    recipe: Annotated[
        Path,
        typer.Argument(metavar="RECIPE", help="A YAML recipe. With --resume: a run folder, or the recipe of its newest run."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Replace a value of the recipe; `redline keys` lists all keys."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe, print it with every value filled in, and write nothing.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run from its newest checkpoint.")] = False,
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch", help="With --resume: begin again at step 0. What the folder holds moves to set-aside-NNN."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one JSON document on stdout instead of the run folder.")
    ] = False,
) -> None:
    """Train a model with a recipe, or continue a run."""
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


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A run folder, a Hugging Face folder, a .gguf file, a hub id, or a built-in model."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="A key of the recipe's engine section, or run.KEY, or serve.KEY (limits of requests)."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on. One that other machines can reach needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="What the model computes in; auto takes bfloat16 where the device has it."),
    ] = "auto",
    api_key_env: Annotated[str, typer.Option(help="The environment variable that holds the API key.")] = "REDLINE_API_KEY",
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model. By default MODEL.")] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="Also serve a LoRA adapter, as NAME. May be given several times."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A name that clients may reach this server by, beside --host. May be given several times."
        ),
    ] = None,
    weights_token_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Take new weights from clients that know the token in this environment variable. By default no client may.",
        ),
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
        weights_token_env=weights_token_env,
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


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the run listens: its placement.listen.")],
    model: Annotated[str | None, typer.Option(help="The model on this machine. By default the recipe's own path.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Where the engine runs: cpu, cuda or cuda:1. By default as in the recipe.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the engine. By default all cores.", min=1)] = None,
    port: Annotated[int, typer.Option(help="The port that the engine listens on; 0 takes a free one.", min=0, max=65535)] = 0,
    wait: Annotated[
        float, typer.Option(help="Seconds to try while the run cannot be reached, at first and after a loss.", min=0)
    ] = 600.0,
) -> None:
    """Sample on this machine for a run elsewhere that has placement.remote_engines."""
    from redline.launch.joining import take_token
    from redline.launch.workers.join import Hold, check_device
    from redline.launch.workers.join import join as join_run

    if device is not None:
        check_device(device)
    try:
        join_run(address, take_token(), Hold(model, device, threads, port), wait, lambda text: typer.echo(text, err=True))
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None


def _train(path: Path, overrides: list[str], *, dry_run: bool, resume: bool, from_scratch: bool) -> dict[str, Any] | None:
    """Return what the run came to; None after a dry run, and in a process that follows rank 0. Refuses what it can before there
    is a run folder."""
    from redline.config import load_recipe
    from redline.launch import start
    from redline.launch.ranks import is_follower

    if is_follower():
        if not dry_run:
            from redline.launch.follow import follow

            follow()
        return None
    if resume:
        checked = start.continued_run(path, overrides, lambda text: typer.echo(text, err=True))
    else:
        checked = start.new_run(load_recipe(path, overrides))
    if dry_run:
        _print_resolved(checked.resolved)
        typer.echo(f"placement: {checked.placement}", err=True)
        return None
    return start.train(checked, from_scratch=from_scratch)


def _print_resolved(resolved: Resolved) -> None:
    """Data to stdout, reasons to stderr."""
    for key, reason in resolved.reasons.items():
        typer.echo(f"{key} = {attrgetter(key)(resolved.config)}  ({reason})", err=True)
    for warning in resolved.warnings:
        typer.echo(warning, err=True)
    typer.echo(json.dumps(resolved.config.model_dump(mode="json"), indent=2))
