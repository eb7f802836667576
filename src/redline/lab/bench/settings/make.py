"""From the command line of `redline bench` to settings with nothing left open."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redline.config import EngineRecipe, refuse_engine_keys_without_effect, resolve_engine, validate_engine
from redline.config.installation import how_to_install
from redline.config.sections.trainer import TrainerConfig
from redline.errors import ConfigError
from redline.lab.bench.overrides import read_overrides
from redline.lab.bench.settings.moving import (
    SerializeSettings,
    StoragePeer,
    TransferSettings,
    WeightSyncSettings,
)
from redline.lab.bench.settings.sampling import GenerateSettings, NSamplingSettings, RolloutSettings
from redline.lab.bench.settings.shared import BenchSettings
from redline.lab.bench.settings.training import (
    E2ESettings,
    MemorySettings,
    TelemetrySettings,
    TrainerSettings,
    fit_trainer,
)
from redline.lab.material.workloads import QUICK, RANDOM, SHAPES
from redline.telemetry import RunFolder

OTHER_WORK = ("loss", "aggregation", "mini_batches", "epochs", "dual_clip", "kl_coef", "entropy_coef", "mismatch", "lora")
"""Keys of the trainer that change what a step computes."""
SETTINGS: Mapping[str, type[BenchSettings]] = {
    "generate": GenerateSettings,
    "n-sampling": NSamplingSettings,
    "rollout": RolloutSettings,
    "trainer": TrainerSettings,
    "e2e": E2ESettings,
    "weight-sync": WeightSyncSettings,
    "memory": MemorySettings,
    "transfer": TransferSettings,
    "serialize": SerializeSettings,
    "telemetry": TelemetrySettings,
}


def make_settings(case: str, overrides: Sequence[str] = ()) -> BenchSettings:
    """Settings with nothing left open but what depends on the prompts. Raises `ConfigError`."""
    if case not in SETTINGS:
        raise ConfigError(f"{case!r} is no case of redline bench", f"one of {', '.join(SETTINGS)}, doctor, or all")
    settings = read_overrides(case, SETTINGS[case], overrides)
    try:
        config = as_recipe(settings)
    except ConfigError as error:
        if isinstance(settings, TransferSettings) and settings.device == "cuda":
            raise ConfigError(
                error.message, "expose the device, or copy from host memory to host memory: device=cpu"
            ) from error
        raise
    chosen: dict[str, Any] = {"device": config.run.device, "dtype": config.model.dtype, "num_threads": config.run.num_threads}
    if isinstance(settings, GenerateSettings):
        chosen |= _choose_prompts_and_peers(settings)
    if isinstance(settings, TrainerSettings):
        chosen |= {"peers": _training_peers(settings.peers, settings.trainer), "trainer": fit_trainer(settings.trainer)}
    if isinstance(settings, SerializeSettings):
        chosen |= {"peers": _storage_peers(settings.peers)}
    if isinstance(settings, TrainerSettings | RolloutSettings) and settings.replay is not None:
        RunFolder.open(settings.replay)
    if isinstance(settings, E2ESettings):
        chosen |= _against(settings)
    if isinstance(settings, WeightSyncSettings):
        chosen |= {"pairs": settings.iterations or settings.pairs}
    if isinstance(settings, MemorySettings):
        chosen |= {"peers": _training_peers(settings.peers, settings.trainer)}
        _refuse_all_of_the_host(settings, config.run.device)
    return settings.model_copy(update=chosen)


def quick_overrides(case: str) -> Sequence[str]:
    """What `--quick` says before anybody else does."""
    return QUICK.get(case, ())


def as_recipe(settings: BenchSettings) -> EngineRecipe:
    """Return the settings as a resolved recipe of an engine: one place knows what `auto` means and which models there are."""
    if settings.model.startswith(RANDOM) and settings.model.removeprefix(RANDOM) not in SHAPES:
        known = ", ".join(f"{RANDOM}{name}" for name in SHAPES)
        raise ConfigError(f"model = {settings.model!r}: no such shape", f"one of {known}")
    path = "builtin:tiny" if settings.model.startswith(RANDOM) else settings.model  # a shape is no path, and needs no check
    recipe = {
        "run": {"device": settings.device, "num_threads": settings.num_threads, "seed": settings.seed},
        "model": {"path": path, "dtype": settings.dtype},
    }
    engine = getattr(settings, "engine", None)
    if engine is not None and engine.quantization != "none":  # the machine decides whether that can be
        recipe["engine"] = {"kind": engine.kind, "quantization": engine.quantization}
    found = resolve_engine(validate_engine(recipe, "redline bench")).recipe
    refuse_engine_keys_without_effect(found)
    return found


def is_installed(peer: str, vllm_python: Path | None = None) -> bool:
    return peer == "redline" or (peer == "vllm" and vllm_python is not None) or importlib.util.find_spec(peer) is not None


def _choose_prompts_and_peers(settings: GenerateSettings) -> dict[str, Any]:
    """A shape has no tokenizer to write questions with. Peers asked for by name must be there."""
    missing = [peer for peer in settings.peers or () if not is_installed(peer, settings.vllm_python)]
    if missing:
        raise ConfigError(
            f"peers: {', '.join(missing)} is not installed here",
            "leave it out, or name an environment that has it: vllm_python=.venv-vllm/bin/python",
        )
    if settings.vllm_python is not None and not settings.vllm_python.is_file():
        raise ConfigError(f"vllm_python = {str(settings.vllm_python)!r}: no such file", "give the path of a python")
    tokens = settings.prompt_tokens or (128 if settings.model.startswith(RANDOM) else None)
    installed = [peer for peer in ("transformers", "vllm") if is_installed(peer, settings.vllm_python)]
    return {"prompt_tokens": tokens, "peers": tuple(installed) if settings.peers is None else settings.peers}


def _training_peers(peers: tuple[str, ...] | None, trainer: TrainerConfig) -> tuple[str, ...]:
    """transformers takes one plain update of all weights: where the trainer is to do other work, no ratio compares them."""
    plain = TrainerConfig()
    other = [key for key in OTHER_WORK if getattr(trainer, key) != getattr(plain, key)]
    if peers is not None and "transformers" in peers and other:
        raise ConfigError(
            f"trainer.{other[0]}: transformers would train otherwise beside us, in one plain update of all weights",
            "leave it out, or measure ours alone: peers=none",
        )
    return (() if other else ("transformers",)) if peers is None else peers


def _storage_peers(peers: tuple[StoragePeer, ...] | None) -> tuple[StoragePeer, ...]:
    """tensordict comes in two kinds; what is not ours to need is left out where it is not installed."""
    packages: dict[StoragePeer, str] = {
        "pickle": "pickle",
        "padded": "torch",
        "safetensors": "safetensors",
        "tensordict": "tensordict",
        "consolidated": "tensordict",
    }
    installed = [peer for peer, package in packages.items() if is_installed(package)]
    missing = [peer for peer in peers or () if peer not in installed]
    if missing:
        raise ConfigError(
            f"peers: {', '.join(missing)} needs a package that is not installed here",
            f"leave it out, or {how_to_install('bench')}",
        )
    return tuple(installed) if peers is None else peers


def _against(settings: E2ESettings) -> dict[str, Any]:
    if settings.against is None:
        return {}
    if settings.trl_python is not None and not settings.trl_python.is_file():
        raise ConfigError(f"trl_python = {str(settings.trl_python)!r}: no such file", "give the path of a python")
    if settings.trl_python is None and not is_installed("trl"):
        raise ConfigError(
            "redline bench e2e: trl is not installed here",
            "name an environment that has it: --trl-python .venv-trl/bin/python",
        )
    return {"lags": (0,)}


def _refuse_all_of_the_host(settings: MemorySettings, device: str) -> None:
    if device == "cpu" and settings.limit_bytes is None:
        raise ConfigError(
            "redline bench memory: the CPU's memory is not only ours to fill", "say how much: limit_bytes=4_000_000_000"
        )
