"""The program of the other ranks of a run's engine that is divided (`engine.tensor_parallel_size`): each holds its part of the
network, steps as rank 0 says, and takes its part of new weights between two steps.

    python -m redline.launch.workers.engine_rank NAME SPANS SETTINGS      started by rank 0, the program `engine_worker`

It ends with rank 0: by a message, or when its connections to rank 0 end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from redline.engine import NativeEngine
from redline.engine.native.tensor_parallel import Obey, Ranks, run_worker
from redline.models.decoder import Decoder
from redline.models.parallel import Shard, cuts_of
from redline.models.prompt_logprobs import prompt_logprobs
from redline.telemetry.processes import recording_process
from redline.types import WeightUpdate
from redline.weight_sync.divided import Follower, PartSet


def rank_program(name: str, spans: str | None) -> tuple[str, ...]:
    """The module and the first arguments of the other ranks of an engine. Their spans go to the folder `spans`, if there is
    one."""
    return "redline.launch.workers.engine_rank", name, spans or ""


def part_of(engine: NativeEngine, shard: Shard) -> PartSet:
    """One rank's part of the weights of its engine."""
    decoder = engine.decoder
    assert isinstance(decoder, Decoder), "another network is not divided"
    return PartSet(dict(decoder.named_parameters()), cuts_of(decoder, shard.world), shard, engine.version)


def _make_obey(engine: NativeEngine, ranks: Ranks) -> Obey:
    def take(version: int, names: tuple[str, ...], nbytes: int) -> None:
        engine.apply(WeightUpdate(version, names, nbytes))

    follower = Follower(part_of(engine, ranks.shard), ranks, take, lambda tokens: prompt_logprobs(engine.decoder, tokens))
    return follower.do


def main() -> None:
    name, spans, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    with recording_process(f"{name}-rank-{settings['rank']}", Path(spans) if spans else None):
        run_worker(settings, _make_obey)


if __name__ == "__main__":
    main()
