"""Names and addresses: of this machine, as servers bind them and as the Host header of a request gives them, and of servers
that are asked over HTTP.

A page of a foreign site may let its own name resolve to 127.0.0.1 and so become, to the browser, of one origin with a server
here (DNS rebinding). The browser still sends the page's name as Host: a server without a secret answers only to its own names.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LOGIN = re.compile(r"://[^\s'\"]*@")
"""Up to the last @: a password may hold a slash."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_interface() -> str | None:
    """The name of the interface by which this machine reaches itself (`lo`); None where none is called so."""
    return next((name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)), None)


def could_be_host(name: str) -> bool:
    """Whether a text may be asked of a resolver, as a name or an address: `a..b` and labels of more than 63 letters may not."""
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def is_own_name(header: str, names: Collection[str]) -> bool:
    """Whether a Host header names this machine's loopback or one of `names`."""
    return host_name(header) in (*LOOPBACK, *names)


def host_name(header: str) -> str:
    """`[::1]:8080` → `::1`; `LocalHost:8080` → `localhost`."""
    name = header[1:].partition("]")[0] if header.startswith("[") else header.rpartition(":")[0] or header
    return name.lower()


def is_server_address(url: str) -> bool:
    """Whether a text is the address of a server over HTTP: `http://127.0.0.1:8000/v1`."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large
        return False


def holds_login(url: str) -> bool:
    """Whether an address names a user or a password: `http://name:secret@127.0.0.1:8000`. Nothing here sends them, and an
    address is written into records and errors. An @ in the path of an address is none of it, unless there is no server before
    it: a password may hold a slash."""
    if not is_server_address(url):
        return without_login(url) != url
    parts = urlsplit(url)
    return parts.username is not None or parts.password is not None


def without_login(text: str) -> str:
    """Return a text with a star in place of the user and the password of every address in it."""
    return _LOGIN.sub("://*@", text)


def fits_header(secret: str) -> bool:
    """Whether an HTTP header can carry a secret: printable characters of ASCII, and no line break."""
    return secret.isascii() and secret.isprintable()


def address_towards(address: str) -> str:
    """Return the address of this machine by which the one at `address` (`host:port`) reaches it. Sends nothing."""
    host = address.rpartition(":")[0].strip("[]")
    family, *_, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])
