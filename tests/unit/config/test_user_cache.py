from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from redline.config.user_cache import user_cache
from redline.errors import ConfigError
from redline.kernels.cpu import compiled
from redline.models.files.sources import model_folder
from redline.telemetry.machine.environment import describe_environment


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container under a number that no list of users has."""

    def nobody(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)


def test_it_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "redline"


@pytest.mark.parametrize("named", ["cache", "./cache", "../cache", ""])
def test_a_relative_folder_does_not_count(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert user_cache() == tmp_path / ".cache" / "redline"


def test_a_tilde_that_no_shell_has_seen_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/kept")
    assert user_cache() == tmp_path / "kept" / "redline"


@pytest.mark.usefixtures("homeless")
def test_without_a_home_the_error_names_the_variable() -> None:
    with pytest.raises(ConfigError) as caught:
        model_folder("builtin:tiny")
    assert "XDG_CACHE_HOME" in caught.value.hint


@pytest.mark.usefixtures("homeless")
def test_what_needs_no_cache_works_without_a_home(tmp_path: Path) -> None:
    assert model_folder(str(tmp_path)) == tmp_path
    assert describe_environment()["command"]
    assert compiled._place("kept.so") is None


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_may_name_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled._place("kept.so") == tmp_path / "redline" / "kernels" / "kept.so"
