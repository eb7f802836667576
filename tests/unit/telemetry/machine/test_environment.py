from __future__ import annotations

import getpass
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import redline
from redline.telemetry import describe_environment
from redline.telemetry.machine.environment import _source


def test_the_environment_is_a_json_document_with_what_the_numbers_depend_on() -> None:
    environment = json.loads(json.dumps(describe_environment()))
    assert environment["redline"] == redline.__version__
    assert environment["python"] == platform.python_version()
    assert environment["cpu"]["cores"] >= environment["cpu"]["usable_cores"] >= 1
    assert environment["memory_bytes"] > 2**28
    assert environment["packages"]["numpy"]
    assert isinstance(environment["gpus"], list)


def test_the_environment_does_not_say_who_ran_it(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        "train",
        "/home/someone/recipe.yaml",
        "model.path=/Users/some.one/model",
        f"run.folder={Path.home()}/runs",
        "/data/x",
    ]
    monkeypatch.setattr(sys, "argv", ["/home/someone/.venv/bin/redline", *arguments])
    environment = describe_environment()
    assert environment["command"] == ["redline", "train", "~/recipe.yaml", "model.path=~/model", "run.folder=~/runs", "/data/x"]
    text = json.dumps({key: value for key, value in environment.items() if key != "command"})
    assert platform.node() not in environment["platform"].split("-")
    assert str(Path.home()) + "/" not in text
    assert f"/{getpass.getuser()}/" not in text


def test_the_source_tree_is_named_by_commit_and_whether_it_changed(tmp_path: Path) -> None:
    assert _source(tmp_path) is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, text=True, check=True
        ).stdout

    git("init", "-q")
    assert _source(tmp_path) is None  # no commit yet
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "module.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    assert _source(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "src" / "module.py").write_text("x = 2\n")
    assert _source(tmp_path) == {"commit": commit, "dirty": True}


def test_telemetry_loads_no_torch() -> None:
    program = (
        "import sys, redline.telemetry as t; t.describe_environment(); sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_tree_without_its_git_folder_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDLINE_COMMIT", raising=False)
    assert _source(tmp_path) is None
    monkeypatch.setenv("REDLINE_COMMIT", "abc123")
    assert _source(tmp_path) == {"commit": "abc123", "dirty": None}
