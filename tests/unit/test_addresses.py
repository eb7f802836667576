"""Addresses of servers: which of them hold a secret."""

from __future__ import annotations

import pytest

from redline.addresses import holds_login, without_login
from redline.config.sections.engine import EngineConfig


@pytest.mark.parametrize("url", ["https://gw.example.com/@acme/v1", "http://h:8000/v1?user=a@b.c", "http://h/v1#a@b"])
def test_an_at_sign_in_the_path_of_an_address_is_no_login(url: str) -> None:
    assert not holds_login(url)
    assert EngineConfig(kind="openai", url=url).url == url


@pytest.mark.parametrize("url", ["http://me@h/v1", "http://me:key@h:8000/v1", "http://:key@h", "http://me:k@y@h/@acme"])
def test_a_name_or_a_password_before_the_host_is_a_login(url: str) -> None:
    assert holds_login(url)
    with pytest.raises(ValueError, match="holds a name or a password"):
        EngineConfig(kind="openai", url=url)


def test_a_password_with_a_slash_is_one() -> None:
    assert holds_login("http://me:se/cret@h:8000/v1")
    assert without_login("http://me:se/cret@h:8000/v1") == "http://*@h:8000/v1"
