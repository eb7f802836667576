"""What `redline bench` was asked for, checked before torch is loaded."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PositiveInt, ValidationError, field_validator

from redline.config import Config, resolve, validate
from redline.config.schema import EngineConfig, Section
from redline.errors import ConfigError
from redline.lab.workloads import RANDOM, SHAPES, WORKLOADS

Peer = Literal["transformers", "vllm", "redline"]
NO_ROLLOUTS = {"group_size": 2, "task": {"kind": "import", "path": "redline.lab:nothing"}}
"""A recipe has to say where its tasks come from; nobody asks this one for any."""


class BenchSettings(Section):
    """What all cases have in common."""

    workload: str | None = None
    """A whole setting by name, such as W1; other keys change parts of it."""
    model: str = "builtin:smollm2-135m-instruct"
    """As `model.path` of a recipe, or `random:qwen2.5-0.5b`, `random:qwen2.5-7b`: that shape with random weights."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and keys and values, on every side."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a CUDA device if there is one."""
    num_threads: PositiveInt | None = None
    """CPU threads; null takes every core this process may use."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Decides random weights, prompts, samples and the order of the sides in each round."""
    pairs: PositiveInt = 8
    """Rounds; in each, every side runs once, in an order drawn by lot. An interval takes at least 6."""
    engine: EngineConfig = EngineConfig()
    """The engine section of a recipe. `max_num_seqs` and `max_model_len` follow from the workload unless given."""


class GenerateSettings(BenchSettings):
    prompts: PositiveInt = 64
    """Requests, all submitted at once."""
    prompt_tokens: PositiveInt | None = None
    """Random tokens per prompt, new ones in every round; null asks short questions in the model's chat template."""
    new_tokens: int = Field(128, ge=2)
    """Tokens per completion; nothing stops one earlier."""
    n: PositiveInt = 1
    """Completions per prompt."""
    peers: tuple[Peer, ...] | None = None
    """Who runs beside us: transformers, vllm, and redline itself for an A/A run; null takes those installed."""
    vllm_python: Path | None = None
    """The python of an environment with vllm, where it is not this one."""

    @field_validator("peers", mode="before")
    @classmethod
    def _read_peers(cls, value: Any) -> Any:
        return _split(value, nothing="none")


class NSamplingSettings(BenchSettings):
    prompts: PositiveInt = 1
    """Distinct prompts, all submitted at once."""
    prompt_tokens: PositiveInt = 2048
    """Random tokens per prompt, new ones in every run."""
    new_tokens: int = Field(128, ge=2)
    """Tokens per completion; nothing stops one earlier."""
    n: tuple[PositiveInt, ...] = (1, 2, 4, 8, 16)
    """Completions per prompt, each number in turn."""

    @field_validator("n", mode="before")
    @classmethod
    def _read_numbers(cls, value: Any) -> Any:
        return _split(value)


SETTINGS: Mapping[str, type[BenchSettings]] = {"generate": GenerateSettings, "n-sampling": NSamplingSettings}


def make_settings(case: str, overrides: Sequence[str] = ()) -> BenchSettings:
    """Settings with nothing left open but what depends on the prompts. Raises `ConfigError`."""
    if case not in SETTINGS:
        raise ConfigError(f"{case!r} is no case of redline bench", f"one of {', '.join(SETTINGS)}")
    given: dict[str, Any] = {}
    for override in overrides:
        _put(given, override)
    values = _over(_preset(case, given.get("workload")), given)
    try:
        settings = SETTINGS[case].model_validate(values)
    except ValidationError as error:
        raise _refusal(case, error) from error
    config = as_recipe(settings)
    chosen = {"device": config.run.device, "dtype": config.model.dtype, "num_threads": config.run.num_threads}
    if isinstance(settings, GenerateSettings):
        chosen |= _choose_prompts_and_peers(settings)
    return settings.model_copy(update=chosen)


def as_recipe(settings: BenchSettings) -> Config:
    """The settings as a resolved recipe: one place knows what `auto` means and which models there are."""
    if settings.model.startswith(RANDOM) and settings.model.removeprefix(RANDOM) not in SHAPES:
        known = ", ".join(f"{RANDOM}{name}" for name in SHAPES)
        raise ConfigError(f"model = {settings.model!r}: no such shape", f"one of {known}")
    path = "builtin:tiny" if settings.model.startswith(RANDOM) else settings.model  # a shape is no path, and needs no check
    recipe = {
        "run": {"device": settings.device, "num_threads": settings.num_threads, "seed": settings.seed},
        "model": {"path": path, "dtype": settings.dtype},
        "rollouts": NO_ROLLOUTS,
    }
    return resolve(validate(recipe, "redline bench")).config


def fit_engine(engine: EngineConfig, num_sequences: int, longest: int) -> EngineConfig:
    """Rows for every sequence at once and room for the longest, where the command line does not say otherwise."""
    derived = {"max_num_seqs": num_sequences, "max_model_len": longest}
    return engine.model_copy(update={key: value for key, value in derived.items() if key not in engine.model_fields_set})


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


# ── the command line ───────────────────────────────────────────────────────────────────────────────────────────────────


def _put(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.rpartition(".")
    if not equals or not key or (dot and (section != "engine" or not name)):
        raise ConfigError(f"{override!r} is not of the form key=value", "for example prompts=16 or engine.max_num_seqs=64")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{override!r}: not valid YAML", "quote the value") from error
    (values.setdefault("engine", {}) if dot else values)[name] = value


def _preset(case: str, name: Any) -> Mapping[str, Any]:
    if name is None:
        return {}
    known = WORKLOADS[case]
    if str(name).upper() not in known:
        raise ConfigError(f"workload = {str(name)!r}: {case} has no such workload", f"one of {', '.join(known)}")
    return {**known[str(name).upper()], "workload": str(name).upper()}


def _over(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    engine = {**preset.get("engine", {}), **given.get("engine", {})}
    named = {"workload": preset["workload"]} if preset else {}
    return {**preset, **given, **named, "engine": engine}


def _split(value: Any, nothing: str = "") -> Any:
    """`a,b` → [a, b]; a single value is a list of one."""
    if isinstance(value, str):
        return [] if value == nothing else [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, int) else value


def _refusal(case: str, error: ValidationError) -> ConfigError:
    """The first mistake, with the key as it was written."""
    problem = error.errors(include_url=False)[0]
    path = [str(part) for part in problem["loc"] if isinstance(part, str)]
    fields = (EngineConfig if path[0] == "engine" and len(path) > 1 else SETTINGS[case]).model_fields
    key, name = ".".join(path), path[-1]
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(fields)}"
        return ConfigError(f"redline bench {case}: {key}: unknown key", hint)
    meaning = " ".join((fields[name].description or "").split()) if name in fields else ""
    reason = problem["msg"][0].lower() + problem["msg"][1:]
    return ConfigError(f"redline bench {case}: {key} = {problem['input']!r}: {reason}", f"{key}: {meaning}")
