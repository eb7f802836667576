"""The port, taken before torch is imported: who asks for one that is in use should not wait for the news."""

from __future__ import annotations

import errno
import socket

from redline.addresses import could_be_host
from redline.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A socket of our own, not listening yet: until there is a model, clients are turned away."""
    if not could_be_host(host):
        raise ConfigError(f"--host {host}: it is no host's name", "give an address of this machine")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}", "give an address of this machine") from error
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from error
    return listener


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} of {host} is taken", "choose another with --port, or 0 for any free one")
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", "give an address of this machine and a free port")
