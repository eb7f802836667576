"""A run of several trainer processes: which of them this is, what a launcher's restart means, and rank 0's end of it.
Importing this file loads no torch.

    torchrun --nproc-per-node 2 -m redline train RECIPE

Every process runs the same command. Rank 0 is the run; the others follow it (`follow.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from redline.config import Config
from redline.config.sections.run import RunConfig
from redline.errors import ConfigError, RedlineError
from redline.launch.workers.ray_cluster import GROUP_VARIABLE
from redline.telemetry import RunFolder, write_json
from redline.telemetry.files.durable import read_json

DIVISION = (
    "sharding",
    "replicate",
    "prefetch_layers",
    "sequence_parallel_size",
    "pipeline_parallel_size",
    "rank_timeout_s",
    "max_tokens_per_micro_batch",
    "max_tokens_per_forward",
    "gradient_checkpointing",
)
"""Keys of the trainer that a run may go on with: they divide its work among ranks and micro-batches, and change nothing of what
is computed."""
IN_RANK_0 = ("vllm", "sglang")
"""Kinds of engines that run in the trainer's process or are started by it, and expect to be the only ones who meet others."""
LAUNCH = "launch.json"
"""In a run folder: the launcher that began it, so that a restart by the same one goes on with the same run."""


def num_ranks() -> int:
    """Processes that were started for this run; 1 without torchrun."""
    return _number("WORLD_SIZE", 1)


def is_follower() -> bool:
    """Whether this process follows rank 0. Raises `ConfigError` where the environment says that there are other ranks, and not
    where to meet them."""
    rank = _number("RANK", 0)
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing and (rank or num_ranks() > 1):
        told = ", ".join(f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if os.environ.get(name))
        raise ConfigError(
            f"the environment has {told}: this is one rank of several, and without {' and '.join(missing)} they cannot meet",
            "start the ranks with torchrun --nproc-per-node N -m redline train RECIPE, which sets all of it; or unset RANK and"
            " WORLD_SIZE to train in one process",
        )
    return rank > 0


def _number(variable: str, alone: int) -> int:
    """What a launcher says by a variable of the environment; `alone` without one."""
    text = os.environ.get(variable) or str(alone)
    if not text.isdecimal():
        raise ConfigError(
            f"{variable}={text} in the environment is no number of a rank",
            f"unset {variable}, or start the ranks with torchrun",
        )
    return int(text)


@contextmanager
def leading() -> Iterator[None]:
    """Around a run in rank 0's process: whatever ends the block, the others hear of it. Does nothing without others. The block
    leaves nothing to be written."""
    if num_ranks() == 1:
        yield
        return
    from redline.trainer.parallel.ranks import join

    ranks = join()
    try:
        yield
    except BaseException:
        ranks.dismiss()
        ranks.closed()
        raise
    ranks.dismiss()
    ranks.wait_until_left()


@contextmanager
def closing_before_the_launcher_ends_it() -> Iterator[None]:
    """Around the steps of rank 0: an error that leaves the block has the process close its run though a SIGTERM comes then.
    A launcher sends one as soon as it misses a rank, at the very time at which rank 0 does, and would cut off the ledger and
    the message. The second ends the process at once. Does nothing without others, or where somebody handles SIGTERM."""
    if num_ranks() == 1 or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _pass_over_the_first)
    try:
        yield
    except Exception:
        raise
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _pass_over_the_first(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)


# ── refused before anything loads ──────────────────────────────────────────────────────────────────────────────────────


def check_ranks(config: Config) -> None:
    """Raise `ConfigError` where so many processes cannot divide the recipe's work."""
    from redline.trainer.parallel.place import TORCHRUN, TRAINERS, Division, find_place, refuse_offloads

    on_cluster = config.placement.cluster is not None
    ranks = config.placement.trainers if on_cluster else num_ranks()
    trainer = config.trainer
    find_place(0, ranks, Division.of(trainer), TRAINERS if on_cluster else TORCHRUN)
    if ranks == 1:
        return
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        raise ConfigError(
            "torchrun --max-restarts on several nodes: each node counts restarts for itself, and ranks would not meet again",
            "start it with --max-restarts 0, and go on after a loss with: redline train RUN --resume",
        )
    if config.rollouts.advantages == "gae":
        raise ConfigError(
            f"rollouts.advantages = gae: the critic is trained by one process, and {ranks} were started",
            ("set placement.trainers=1" if on_cluster else "start one, without torchrun")
            + ", or take an algorithm without a critic",
        )
    if config.engine.kind in IN_RANK_0 and not config.placement.engines:
        raise ConfigError(
            f"engine.kind = {config.engine.kind}: it makes a process group of its own, and inside rank 0 it would take"
            f" the group of the {ranks} ranks for that",
            "set engine.kind=native; or start it as a server beside the run, and set engine.kind=openai with engine.url",
        )
    refuse_offloads(trainer, Division.of(trainer))


def check_gpus_for_ranks(config: Config) -> None:
    """Raise `ConfigError` where the ranks of this machine have not each a GPU of their own. Imports torch."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if config.run.device != "cuda" or here == 1:
        return
    import torch

    if here > (gpus := torch.cuda.device_count()):
        raise ConfigError(
            f"{here} ranks were started on this machine, and each needs a GPU of its own: there {_are(gpus)}",
            f"start {gpus} here (torchrun --nproc-per-node {gpus})",
        )


def check_model_for_ranks(config: Config, folder: Path) -> None:
    """Raise `ConfigError` or `ModelError` where the model in this folder cannot be divided as the recipe asks."""
    from redline.models.spec import refuse_undivided

    described = json.loads((folder / "config.json").read_text())
    family = described.get("model_type")
    if (size := config.engine.tensor_parallel_size) > 1 and config.engine.kind == "native":  # others divide it in their way
        _check_divided_engine(size, family, folder)
    if config.trainer.sharding != "none":
        refuse_undivided(family, "trainer.sharding")
    heads = described.get("num_attention_heads")
    if config.trainer.sequence_parallel_size > 1 and isinstance(heads, int):
        from redline.models.attention.ulysses import check_heads

        check_heads(heads, config.trainer.sequence_parallel_size)
    if config.trainer.pipeline_parallel_size > 1:
        from redline.models.files.hf import load_config
        from redline.models.stage import check_stages

        check_stages(load_config(folder), config.trainer.pipeline_parallel_size)


def _check_divided_engine(size: int, family: object, folder: Path) -> None:
    from redline.models.files.hf import load_config
    from redline.models.parallel import shard_spec
    from redline.models.spec import refuse_undivided, spec_from_config

    refuse_undivided(family, f"engine.tensor_parallel_size = {size}")
    shard_spec(spec_from_config(load_config(folder)), size)


# ── restarts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_restart() -> bool:
    """Whether the launcher has started these processes before (torchrun --max-restarts), and one of them ended."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def has_begun(folder: RunFolder | None) -> bool:
    """Whether the launcher of this process has begun or continued the run in this folder before, and now starts it again."""
    may_be = is_restart() or GROUP_VARIABLE in os.environ  # an id that torchrun was given may name an earlier run of it
    return may_be and folder is not None and read_json(folder.path / LAUNCH).get("launch") == _launch()


def remember_launch(folder: RunFolder) -> None:
    """Write down which launcher began or continued the run, where there is one that may restart it."""
    if launch := _launch():
        write_json(folder.path / LAUNCH, {"launch": launch})


def run_to_take_up(run: RunConfig) -> RunFolder | None:
    """The run of this recipe that the same launcher began before a restart; None where it came to no run yet."""
    launch = _launch()
    if not is_restart() or not launch:
        return None
    for path in sorted(run.folder.glob(f"{run.name}-*/{LAUNCH}"), reverse=True):
        if json.loads(path.read_text())["launch"] == launch and (path.parent / "config.json").is_file():
            try:
                return RunFolder.open(path.parent)
            except RedlineError:
                return None
    return None


def _launch() -> str:
    """Names one run of a launcher: the room that a driver keeps on a Ray cluster; the id that torchrun was given, or its
    process."""
    if GROUP_VARIABLE in os.environ:
        return os.environ[GROUP_VARIABLE]
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    given, parent = os.environ["TORCHELASTIC_RUN_ID"], os.getppid()
    if given != "none":
        return given
    return f"{socket.gethostname()} {parent} {_began(parent)}"


def _began(pid: int) -> str:
    """When the process was started, in ticks since the machine was; empty where the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"
