"""The `redline` command. Importing this file loads no torch: what is wrong with a command line is said at once."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from redline import __version__
from redline.errors import ConfigError, RedlineError

if TYPE_CHECKING:
    from redline.config import Config, Resolved
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the resolved run, load nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run folder from its last checkpoint.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON document on stdout.")] = False,
) -> None:
    """Train a model as a recipe says."""
    from redline.config import load_recipe, resolve
    from redline.telemetry import RunFolder

    if resume:
        folder, config = _run_to_continue(recipe, overrides or [])
    else:
        folder, config = None, load_recipe(recipe, overrides or [])
    resolved = resolve(config)
    if dry_run:
        _print_resolved(resolved)
        return
    if folder is None:
        folder = RunFolder.create(config.run.folder, config.run.name)
    from redline.launch import train as launch_train

    summary = launch_train(resolved, folder, resume=resume)
    typer.echo(json.dumps(summary) if as_json else summary["run"])
    if not summary["finished"]:
        raise typer.Exit(130)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file, a hub id, or a built-in model.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Set keys of a recipe's engine section, or run.KEY.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; one that others can reach needs an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.")] = "auto",
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Compute dtype.")] = "auto",
    api_key_env: Annotated[str, typer.Option(help="The environment variable that holds the API key.")] = "REDLINE_API_KEY",
    served_model_name: Annotated[str | None, typer.Option(help="The model's name to clients; by default MODEL.")] = None,
    lora: Annotated[list[str] | None, typer.Option(metavar="NAME=PATH", help="A LoRA adapter to serve as NAME.")] = None,
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
    )
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

    from redline.buffer.show import show as show_trajectories
    from redline.telemetry import RunFolder

    if step is not None and group is not None:
        raise ConfigError("--step and --group exclude each other", "give one of them")
    path, console = RunFolder.open(run).path, Console(highlight=False)
    document = show_trajectories(
        path, step=step, number=group, failures=failures, limit=limit, as_json=as_json, console=console
    )
    if document is not None:
        typer.echo(json.dumps(document))


@app.command()
def repair(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON document on stdout.")] = False,
) -> None:
    """Save what is intact in damaged trajectories."""
    from redline.buffer.repair import repair as repair_trajectories
    from redline.telemetry import RunFolder

    folder = RunFolder.open(run)
    with folder.locked():
        report = repair_trajectories(folder.trajectories)
    typer.echo("\n".join(report.lines), err=True)
    if as_json:
        typer.echo(json.dumps(report.as_json()))


@app.command()
def bench(
    case: Annotated[str, typer.Argument(help="What to measure: generate, n-sampling, trainer, memory, serialize.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the case, such as workload=W1.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON document on stdout.")] = False,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write the document to DIR/CASE.json.")] = None,
) -> None:
    """Measure a part of redline beside its physical bound and its peers."""
    from redline.lab.settings import make_settings

    settings = make_settings(case, overrides or [])
    from redline.lab.bench import bench as run_bench

    try:
        document = run_bench(case, settings)
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was saved", err=True)
        raise typer.Exit(130) from None
    path = document.save(save) if save else None
    if as_json:
        typer.echo(json.dumps(document.as_json()))
    elif path:
        typer.echo(path)


def _run_to_continue(path: Path, overrides: list[str]) -> tuple[RunFolder, Config]:
    """The run folder that `path` is, or the newest one made from the recipe that it is, with its own config."""
    from redline.config import load_recipe
    from redline.telemetry import RunFolder

    if path.is_file():
        config = load_recipe(path, overrides)
        folder = RunFolder.newest(config.run.folder, config.run.name)
    else:
        folder = RunFolder.open(path)
    allowed = ("run.steps=", "run.name=", "run.folder=") if path.is_file() else ("run.steps=",)
    foreign = [override for override in overrides if not override.startswith(allowed)]
    if foreign:
        raise ConfigError(
            f"--resume continues a run as it was configured; it cannot take {', '.join(foreign)}",
            "leave the override out (run.steps=N may be given, to train longer), or start a new run",
        )
    return folder, load_recipe(folder.config, overrides)  # JSON is YAML


def _print_resolved(resolved: Resolved) -> None:
    """Data to stdout, reasons to stderr."""
    for key, reason in resolved.reasons.items():
        section, name = key.split(".")
        typer.echo(f"{key} = {getattr(getattr(resolved.config, section), name)}  ({reason})", err=True)
    typer.echo(json.dumps(resolved.config.model_dump(mode="json"), indent=2))


def main() -> None:
    """Run, and turn what we understand into a message, a hint and an exit code."""
    try:
        app()
    except RedlineError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        typer.echo(f"error: the disk is full: {error}\n\nhint: free some space and continue with --resume", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("stopped; what was checkpointed is kept, continue with --resume", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
