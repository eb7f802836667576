"""The `redline` command. Importing it loads no torch, so that a wrong command line is refused at once."""

from __future__ import annotations

import contextlib
import errno
import sys
from typing import Annotated, NoReturn

import typer

from redline import __version__
from redline.cli import env
from redline.cli.evaluate import eval
from redline.cli.explain import doctor, keys, simulate, tune
from redline.cli.export import export
from redline.cli.keys_as_options import command_class
from redline.cli.look import dash, repair, report, show
from redline.cli.measure import bench, compare, perf, plan, profile
from redline.cli.run import join, serve, train
from redline.errors import RedlineError

app = typer.Typer(
    help="Reinforcement-learning post-training for language models.",
    epilog="Begin with: redline train recipes/demo.yaml",
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


VERBS = {
    "Train and look": (train, eval, show, report, dash, serve, export, join),
    "Write a recipe": (keys, plan),
    "Look deeper, mend": (doctor, simulate, tune, profile, repair),
    "Measure": (bench, compare, perf),
}
"""The verbs by what they are for, in the order in which `redline --help` lists them: what people do first comes first."""

for purpose, verbs in VERBS.items():
    for verb in verbs:
        app.command(rich_help_panel=purpose, cls=command_class(verb))(verb)
app.add_typer(env.app, name="env", rich_help_panel="Environments")

_GO_ON = "then go on: redline train RUN --resume, or the same redline tune again"
"""Where no run says which it is, as `saying_how_to_continue` has it do."""
_DISK_ERRORS = {
    errno.ENOSPC: ("the disk is full", "free some space, {go_on}"),
    errno.EDQUOT: ("your share of the disk is used up", "free some space, {go_on}"),
    errno.EFBIG: ("a file may not become that large here", "raise the limit (ulimit -f), {go_on}"),
    errno.EIO: ("the disk does not read or write", "look at the disk, {go_on}"),
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
        go_on = next(iter(getattr(error, "__notes__", ())), _GO_ON)
        _fail(f"error: {what}: {error}\n\nhint: {hint.format(go_on=go_on)}")


def _fail(message: str) -> NoReturn:
    with contextlib.suppress(OSError):  # nobody may be reading
        typer.echo(message, err=True)
    sys.exit(2)
