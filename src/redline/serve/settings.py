"""What `redline serve` was asked for, checked before torch is loaded."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from redline.addresses import fits_header, is_loopback
from redline.config import EngineRecipe, ResolvedEngine, refuse_engine_keys_without_effect, resolve_engine, validate_engine
from redline.config.installation import how_to_install
from redline.config.load import parse_yaml
from redline.errors import ConfigError
from redline.serve.requests.limits import ServeLimits

PACKAGES = ("starlette", "uvicorn")
"""What the extra `serve` brings."""


@dataclass(slots=True, frozen=True)
class ServeSettings:
    """A server with nothing left open."""

    config: EngineRecipe
    name: str
    """The model's name to clients."""
    host: str
    port: int
    """0 takes a free one."""
    api_key: str | None
    adapters: dict[str, Path]
    """LoRA adapters: name → folder."""
    limits: ServeLimits
    """How much one request may ask for."""
    allowed_hosts: tuple[str, ...]
    """Names that requests may be addressed to beside the loopback's, where there is no key."""
    weights_token: str | None = None
    """What a client must show to send weights; None takes none from anybody."""
    warnings: tuple[str, ...] = ()
    """What was asked for and will disappoint."""


def make_settings(
    model: str,
    overrides: Sequence[str] = (),
    *,
    host: str,
    port: int,
    device: str,
    dtype: str,
    api_key_env: str,
    served_model_name: str | None,
    adapters: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    weights_token_env: str | None = None,
) -> ServeSettings:
    """Raises `ConfigError` for whatever cannot be served."""
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"redline serve needs {' and '.join(missing)}", how_to_install("serve"))
    name = served_model_name or model
    folders = _adapters(adapters, name)
    recipe: dict[str, dict[str, Any]] = {
        "run": {"device": device},
        "model": {"path": model, "dtype": dtype},
        "engine": {"max_loras": len(folders)},
    }
    limits, others = _limits(overrides)
    resolved = _resolved(recipe, others)
    api_key = _api_key(host, api_key_env)
    return ServeSettings(
        resolved.recipe,
        name,
        host,
        port,
        api_key,
        folders,
        limits,
        (host, *allowed_hosts),
        _weights_token(weights_token_env, resolved.recipe, api_key),
        resolved.warnings,
    )


def _limits(overrides: Sequence[str]) -> tuple[ServeLimits, list[str]]:
    """The limits that `serve.key=value` set, and the overrides that are not of them."""
    values, others = {}, []
    for override in overrides:
        if override.startswith("serve."):
            _, key, values_of = _override(override)
            values[key] = values_of
        else:
            others.append(override)
    try:
        return ServeLimits.model_validate(values), others
    except ValidationError as error:
        raise _wrong_limit(error.errors(include_url=False)[0]) from error


def _wrong_limit(problem: Mapping[str, Any]) -> ConfigError:
    key, known = str(problem["loc"][0]), ServeLimits.model_fields
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        return ConfigError(f"serve.{key}: unknown key", f"did you mean serve.{(near or list(known))[0]}?")
    return ConfigError(f"serve.{key} = {problem['input']!r}: {problem['msg']}", f"serve.{key}: {known[key].description}")


def _resolved(recipe: dict[str, dict[str, Any]], overrides: Sequence[str]) -> ResolvedEngine:
    """The command line as a recipe, so that one place knows what a key may hold."""
    for override in overrides:
        section, key, value = _override(override)
        recipe[section][key] = value
    asked = validate_engine(recipe, "redline serve")
    refuse_engine_keys_without_effect(asked)
    return resolve_engine(asked)


def _override(text: str) -> tuple[str, str, Any]:
    """Section, key, value; a key without a section is the engine's."""
    name, equals, value = text.partition("=")
    section, _, key = name.rpartition(".")
    if not equals or not key or section not in ("", "engine", "run", "serve"):
        raise ConfigError(
            f"override {text!r} is not of the form key=value, engine.key=value, run.key=value or serve.key=value",
            "for example max_num_seqs=64",
        )
    return section or "engine", key, parse_yaml(value, f"override {text!r}")


def _api_key(host: str, variable: str) -> str | None:
    key = os.environ.get(variable) or None
    if key is not None and not fits_header(key):
        raise ConfigError(
            f"{variable}: the API key has a character that no HTTP header takes, so that nobody could send it",
            f"has it a line break? export {variable} without it",
        )
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} is reachable from other machines, and {variable} holds no API key",
            f"export {variable}=... with a secret of your choice, or serve on 127.0.0.1",
        )
    return key


def _weights_token(variable: str | None, recipe: EngineRecipe, api_key: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable) or None
    if token is None:
        raise ConfigError(
            f"--weights-token-env {variable}: the variable holds no token",
            f"export {variable}=... with a secret of your choice",
        )
    if not fits_header(token):
        raise ConfigError(
            f"--weights-token-env {variable}: the token has a character that no HTTP header takes, so nobody could send it",
            f"has it a line break? export {variable} without it",
        )
    if token == api_key:
        raise ConfigError(
            f"--weights-token-env {variable}: the token is the API key, so that every client could replace the model",
            f"export {variable}=... with another secret",
        )
    if recipe.engine.tensor_parallel_size > 1:
        raise ConfigError(
            "--weights-token-env: an engine of several processes takes no new weights", "leave out tensor_parallel_size"
        )
    return token


def _adapters(given: Sequence[str], base: str) -> dict[str, Path]:
    adapters: dict[str, Path] = {}
    for text in given:
        name, _, path = text.partition("=")
        if not name or not path:
            raise ConfigError(f"--lora {text!r} is not of the form NAME=PATH", "for example --lora poet=adapters/poet")
        if name == base or name in adapters:
            raise ConfigError(f"--lora {name}: the name is taken", "give every adapter a name of its own")
        if not Path(path).expanduser().is_dir():
            raise ConfigError(f"--lora {name}={path}: no such folder", "give a folder with adapter_config.json in it")
        adapters[name] = Path(path).expanduser()
    return adapters
