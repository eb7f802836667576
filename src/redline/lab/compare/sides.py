"""A and B of `redline compare` as they are written → what each side runs, or reads. Loads no torch.

recipes/demo.yaml                       a recipe, run by this source
runs/demo-001                           the recipe of a recorded run, run by this source
git:REV                                 a revision of the repository in the current folder, in a worktree while it is needed
PATH                                    a source tree: the folder that holds src/redline
results.json, results.json#transformers a saved result, and a side of it
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redline
from redline.config import load_recipe, refuse_without_effect, resolve
from redline.errors import CompareError, ConfigError
from redline.lab.bench.settings import make_settings
from redline.lab.compare.left_out import between_steps
from redline.lab.compare.worker import Job
from redline.launch.preflight import check_inputs

GIT = "git:"
OWN_SOURCE = Path(redline.__file__).parents[1]
RECORDED = "config.json"
"""The recipe in a run folder."""


@dataclass(slots=True, frozen=True)
class What:
    """What is run on either side, besides what the sides themselves say."""

    recipe: Path | None = None
    case: str | None = None
    overrides: Sequence[str] = ()
    """For both."""
    a_overrides: Sequence[str] = ()
    b_overrides: Sequence[str] = ()


def is_saved(side: str) -> bool:
    return side.partition("#")[0].endswith(".json") and not _is_recipe(side)


@contextlib.contextmanager
def jobs(a: str, b: str, what: What) -> Iterator[tuple[Job, Job]]:
    """Everything that can be checked without running it is. Worktrees are removed when the block ends."""
    if is_saved(a) or is_saved(b):
        raise ConfigError(f"{a} and {b}: a saved result can only be compared with another one", "give two of them")
    if in_vain := between_steps([*what.a_overrides, *what.b_overrides]):
        raise ConfigError(
            f"{in_vain[0]}: without effect here: steps are compared, and neither side evaluates or writes checkpoints",
            "leave it out; what they take is in `redline show RUN --ledger`: run.evaluate, run.checkpoint",
        )
    if _is_recipe(a) != _is_recipe(b):
        raise ConfigError(f"{a} and {b} are not of one kind", "two recipes, or two of git:REV and source trees with --recipe")
    with contextlib.ExitStack() as stack:
        first = _job(a, what, what.a_overrides, stack)
        second = first if (a, what.a_overrides) == (b, what.b_overrides) else _job(b, what, what.b_overrides, stack)
        yield first, second


def _job(side: str, what: What, own: Sequence[str], stack: contextlib.ExitStack) -> Job:
    overrides = [*what.overrides, *own]
    name = " ".join([side, *own])
    if _is_recipe(side):
        if what.recipe is not None or what.case is not None:
            raise ConfigError(f"{side} is a recipe, and --recipe or --case says to run something else", "leave the option out")
        path = _recipe_path(side)
        return Job(OWN_SOURCE, _recipe_task(path, overrides), name, _lag(path, overrides))
    if (what.recipe is None) == (what.case is None):
        raise ConfigError(
            f"{side} is a source to run something with", "say what: --recipe recipes/smoke.yaml, or --case trainer"
        )
    source = stack.enter_context(worktree(side.removeprefix(GIT))) if side.startswith(GIT) else _tree(side)
    is_own = source == OWN_SOURCE
    if what.recipe is not None:
        return Job(source, _recipe_task(what.recipe, overrides, is_own), name, _lag(what.recipe, overrides))
    assert what.case is not None
    if is_own:
        make_settings(what.case, overrides)
    return Job(source, {"case": what.case, "overrides": overrides}, name)


def _recipe_task(recipe: Path, overrides: Sequence[str], is_own: bool = True) -> dict[str, Any]:
    """Another revision may know other keys, and is the one to say so."""
    if is_own:
        config = resolve(load_recipe(recipe, overrides)).config
        refuse_without_effect(config)
        check_inputs(config)
    elif not recipe.is_file():
        raise ConfigError(f"{recipe}: no such recipe", "give the path of a YAML recipe, such as recipes/demo.yaml")
    return {"recipe": str(recipe.resolve()), "overrides": list(overrides)}


def _lag(recipe: Path, overrides: Sequence[str]) -> int:
    """The lag of a recipe; 0 where only another revision can read it."""
    try:
        return load_recipe(recipe, overrides).buffer.max_lag
    except ConfigError:
        return 0


def _is_recipe(side: str) -> bool:
    return _recipe_path(side).suffix in (".yaml", ".yml") or _recipe_path(side).name == RECORDED


def _recipe_path(side: str) -> Path:
    """The file of a recipe; that of a run folder is what the run recorded."""
    return Path(side) / RECORDED if (Path(side) / RECORDED).is_file() else Path(side)


def _tree(side: str) -> Path:
    source = Path(side).resolve() / "src"
    if not (source / "redline" / "__init__.py").is_file():
        raise ConfigError(
            f"{side}: no recipe (.yaml), run folder, saved result (.json), revision (git:REV) or folder with src/redline",
            "for example: redline compare git:HEAD~1 . --case trainer",
        )
    return source


# ── revisions ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """The source of a revision, checked out beside the working tree and gone when the block ends."""
    root = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel", hint="run this in a clone of the repository"))
    commit = _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", hint=f"git:{revision}: no such revision")
    with tempfile.TemporaryDirectory(prefix="redline-compare-") as scratch:
        tree = Path(scratch) / commit[:12]
        try:
            _git(root, "worktree", "add", "--quiet", "--detach", str(tree), commit, hint="see what git says")
            source = tree / "src"
            if not (source / "redline").is_dir():
                raise ConfigError(f"git:{revision} has no src/redline", "name a revision of redline")
            yield source
        finally:
            _remove(root, tree)


def _remove(root: Path, tree: Path) -> None:
    """Remove a worktree, if git has it."""
    if tree.parent.name in _git(root, "worktree", "list", hint="see what git says"):
        _git(root, "worktree", "remove", "--force", str(tree), hint=f"remove it by hand: git worktree remove --force {tree}")


def _git(root: Path, *arguments: str, hint: str) -> str:
    """Returns what git prints. Blocks until it has ended, also when interrupted: half a worktree could not be removed."""
    process = subprocess.Popen(
        ["git", "-C", str(root), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        printed, said = process.communicate()
    finally:
        process.wait()
    if process.returncode:
        raise CompareError(f"git {arguments[0]} failed: {said.strip() or 'nothing found'}", hint)
    return printed.strip()
