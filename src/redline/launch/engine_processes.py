"""What the processes of a run's engines are to hold, each on its place. `workers/pool.py` starts them."""

from __future__ import annotations

from dataclasses import asdict

import torch

from redline.config import Config, EngineRecipe
from redline.config.sections.engine import ServedEngineConfig
from redline.errors import ConfigError
from redline.launch.placement import Place, Placement
from redline.launch.workers.spawn import EngineSpec
from redline.telemetry import RunFolder
from redline.telemetry.machine.hosts import HostSampling

ENGINE_OVERHEAD_BYTES = 2 << 30
"""What an engine's process takes of a GPU besides weights and KV cache: the context, graphs, workspaces."""


def engine_specs(
    config: Config,
    placement: Placement,
    folder: RunFolder,
    weight_bytes: int = 0,
    sampling: HostSampling | None = None,
) -> list[EngineSpec]:
    """What each process of an engine is to hold. Engines that share a GPU get what the trainer leaves of it: call this when the
    trainer is made, with the size of one set of weights. `sampling` says how they sample their machines."""
    return [
        EngineSpec(
            recipe=_recipe(config, placement, place, weight_bytes).model_dump(mode="json"),
            name=f"engine {place.process}",
            device=place.device,
            width=place.width,
            num_threads=place.cpu_threads,
            spans=str(folder.spans.absolute()),
            lora=config.trainer.lora.model_dump(mode="json") if config.trainer.lora.rank else None,
            remote=bool(place.joins_at),
            sampling=asdict(sampling) if sampling else None,
        )
        for place in placement.engines
    ]


def _recipe(config: Config, placement: Placement, place: Place, weight_bytes: int) -> EngineRecipe:
    engine = config.engine.model_dump()
    if placement.shares_gpu(place) and engine["kv_cache_memory_bytes"] is None:
        if config.trainer.lora.rank:  # what the frozen weights take is not among those that are sent
            why = f"placement.engines = {config.placement.engines}: with an adapter their share of {place.device} is not known"
            raise ConfigError(why, "set engine.kv_cache_memory_bytes")
        engine["kv_cache_memory_bytes"] = _kv_cache_bytes(config, placement, place.device, weight_bytes)
    return EngineRecipe(run=config.run, model=config.model, engine=ServedEngineConfig.model_validate(engine))


def _kv_cache_bytes(config: Config, placement: Placement, device: str, weight_bytes: int) -> int:
    """The part of an engine that shares a GPU: of `gpu_memory_utilization` less what is in use, less two sets of weights."""
    free, total = torch.cuda.mem_get_info(device)
    count, share = placement.engines_on(device), config.engine.gpu_memory_utilization
    part = (int(total * share) - (total - free)) // count
    taken = 2 * weight_bytes + ENGINE_OVERHEAD_BYTES
    if part <= taken:
        raise ConfigError(
            f"placement.engines = {config.placement.engines}: each of {count} on {device} gets {part / 2**30:.1f} GiB of"
            f" engine.gpu_memory_utilization = {share:g}, and needs {taken / 2**30:.1f} GiB"
            " before its KV cache",
            "raise engine.gpu_memory_utilization, lower placement.engines, or set engine.kv_cache_memory_bytes",
        )
    return part - taken
