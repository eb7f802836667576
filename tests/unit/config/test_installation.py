"""Hints that name a package say what works in the installation at hand."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from support.paths import ROOT

from redline.config.installation import how_to_install, requirement


def test_in_a_checkout_the_hint_names_the_checkout() -> None:
    assert how_to_install("serve").endswith(f"install -e '{ROOT}[serve]'")


def test_the_hint_runs_the_pip_of_this_interpreter_and_not_the_one_that_the_shell_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    how_to_install.cache_clear()
    assert how_to_install("serve").startswith(f"{sys.executable} -m pip install")
    how_to_install.cache_clear()


def test_every_extra_that_a_hint_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"""how_to_install\(["'](\w+)["']\)""", code))
    assert named >= {"demo", "serve", "gpu"}
    assert named <= extras.keys()


@pytest.mark.parametrize(
    ("direct_url", "wanted"),
    [
        (None, "redline-rl[gpu]"),
        ({"url": "file:///a%20place/redline", "dir_info": {}}, "/a place/redline[gpu]"),
        ({"url": "file:///w/redline_rl-1-py3-none-any.whl", "archive_info": {}}, "/w/redline_rl-1-py3-none-any.whl[gpu]"),
        (
            {"url": "https://a.example/redline.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "redline-rl[gpu] @ git+https://a.example/redline.git@abc",
        ),
        ({"url": "https://a.example/r.whl", "archive_info": {}}, "redline-rl[gpu] @ https://a.example/r.whl"),
    ],
)
def test_an_installed_package_is_named_by_where_it_came_from(direct_url: dict[str, object] | None, wanted: str) -> None:
    assert requirement("gpu", direct_url) == wanted


def test_no_hint_names_an_index_that_may_not_have_us() -> None:
    """One function makes all of them."""
    found = [
        path.relative_to(ROOT)
        for path in (ROOT / "src").rglob("*.py")
        if "pip install 'redline-rl[" in path.read_text(encoding="utf-8")
    ]
    assert not found
