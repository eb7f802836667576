"""Where engines of other machines join a run, and by which token. Importing this file loads no torch.

run        REDLINE_TOKEN=… redline train RECIPE placement.engines=2 placement.remote_engines=2 placement.listen=10.0.0.1
machine    REDLINE_TOKEN=… redline join 10.0.0.1:29600
"""

from __future__ import annotations

import os
import socket

from redline.addresses import could_be_host, is_loopback
from redline.config import Config
from redline.config.sections.placement import JOIN_PORT
from redline.errors import ConfigError

TOKEN_VARIABLE = "REDLINE_TOKEN"
"""The environment variable that holds the token of a run, here and on the machines that join it."""
MIN_TOKEN = 16
"""The shortest token, in characters: it lets its holder use the run's engines."""
_HINT = f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32), and the same value on every machine that joins"


def address_to_join(config: Config) -> str:
    """Return `host:port` where engines of other machines join the run. Raises `ConfigError` where they could not."""
    wanted = config.placement
    key = f"placement.remote_engines = {wanted.remote_engines}"
    if wanted.remote_engines > wanted.engines:
        raise ConfigError(
            f"{key}: there are {wanted.engines} engines in all (placement.engines)",
            f"set placement.engines to {wanted.remote_engines} or more: it counts those of other machines too",
        )
    if wanted.cluster is not None:
        raise ConfigError(f"{key}: placement.cluster = {wanted.cluster} starts engines on its nodes", "leave one of them out")
    host, port = _host_and_port(wanted.listen)
    _check_own(wanted.listen, host)
    _token()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_to(config: Config) -> tuple[str, int]:
    """Return host and port to listen on."""
    return _host_and_port(config.placement.listen)


def note_on(config: Config) -> str:
    """What a person should know of the address; empty where it is reached from other machines."""
    host, _ = _host_and_port(config.placement.listen)
    return f"placement.listen = {config.placement.listen}: this machine alone can join" if is_loopback(host) else ""


def take_token() -> str:
    """Return the token. It is taken out of the environment, so that children do not inherit it. Raises `ConfigError` where
    there is none."""
    token = _token()
    os.environ.pop(TOKEN_VARIABLE, None)
    _taken[:] = [token]
    return token


_taken: list[str] = []
"""The token that was taken, for a later run of this process."""


def _token() -> str:
    token = os.environ.get(TOKEN_VARIABLE) or (_taken[-1] if _taken else "")
    if len(token) < MIN_TOKEN:
        what = f"has {len(token)} characters, fewer than {MIN_TOKEN}" if token else "is not set"
        raise ConfigError(f"{TOKEN_VARIABLE} {what}: engines of other machines join a run by a token", _HINT)
    return token


def _host_and_port(text: str) -> tuple[str, int]:
    """`10.0.0.1`, `10.0.0.1:29600`, `[fd00::1]:29600`, `node-7` → host and port."""
    host, port = text, str(JOIN_PORT)
    if text.count(":") == 1 or "]:" in text:
        host, _, port = text.rpartition(":")
    if not could_be_host(host.strip("[]")) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"placement.listen = {text}: it is no address", "write HOST or HOST:PORT, such as 10.0.0.1:29600")
    return host.strip("[]"), int(port)


def _check_own(text: str, host: str) -> None:
    """Raise `ConfigError` unless this machine has the address."""
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        why = f"placement.listen = {text}: {error.strerror or error}"
        raise ConfigError(why, "name an address of this machine (`ip addr` lists them)") from None
