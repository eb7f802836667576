"""What the driver of a Ray cluster decides without one."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from support.paths import ROOT

import redline
from redline.config import Config, load_recipe, resolve
from redline.errors import ConfigError, RedlineError, RunFolderError
from redline.launch.ranks import has_begun, remember_launch
from redline.launch.workers import ray_ranks
from redline.launch.workers.ray_host import Job, ProcessHost
from redline.launch.workers.ray_process import HostedProcess
from redline.telemetry import RunFolder

ABOUT = {"redline": redline.__version__}


def config(*overrides: str) -> Config:
    return load_recipe(ROOT / "recipes" / "smoke.yaml", overrides)


class FakeRank:
    """A rank on a node that sees other files than the driver's where `sees` is False."""

    def __init__(self, name: str, sees: bool = True) -> None:
        self.where, self._sees = f"{name} on node-7 (10.0.0.7)", sees

    def call(self, method: str, path: str) -> str | None:
        assert method == "reads"
        return Path(path).read_text() if self._sees else None


def check(tmp_path: Path, *ranks: FakeRank, about: dict[str, str] = ABOUT) -> None:
    hosts = cast(list[HostedProcess], list(ranks))
    ray_ranks.check_nodes(hosts, dict.fromkeys(hosts, about), RunFolder(tmp_path))


def test_a_recipe_without_a_cluster_has_no_driver() -> None:
    assert not ray_ranks.is_driver(config())


def test_ray_makes_the_first_process_a_driver_and_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config("placement.cluster=ray")
    assert ray_ranks.is_driver(asked)
    monkeypatch.setenv("REDLINE_RAY_GROUP", "redline-1")
    assert not ray_ranks.is_driver(asked)


def test_torchrun_and_ray_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigError, match="so does torchrun"):
        ray_ranks.is_driver(config("placement.cluster=ray"))


@pytest.mark.parametrize("more", [(), ("trainer.schedule.kind=cosine", "buffer.max_lag=2", "trainer.mini_batches=2")])
def test_ranks_resolve_the_recipe_to_what_the_driver_resolved(tmp_path: Path, more: tuple[str, ...]) -> None:
    resolved = resolve(config(*more))
    path = tmp_path / "recipe.yaml"
    path.write_text(ray_ranks.as_recipe(resolved.recorded))
    assert yaml.safe_load(path.read_text())["trainer"]["learning_rate"] == 3e-3
    assert resolve(load_recipe(path, [])).config == resolved.config


def test_a_folder_that_a_node_does_not_see_is_refused_with_the_node(tmp_path: Path) -> None:
    check(tmp_path, FakeRank("rank 0"), FakeRank("rank 1"))
    with pytest.raises(RunFolderError, match=r"rank 1 on node-7 \(10.0.0.7\) does not see") as refused:
        check(tmp_path, FakeRank("rank 0"), FakeRank("rank 1", sees=False))
    assert "all nodes share" in refused.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_node_with_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"redline 0\.0\.1, the driver has"):
        check(tmp_path, FakeRank("rank 0"), about={"redline": "0.0.1"})


def test_a_rank_that_was_killed_is_lost_and_one_that_refuses_is_not() -> None:
    def ended(**how: Any) -> Any:
        return SimpleNamespace(**{"was_ended": False, "gone": "", "code": 0} | how)

    assert [ray_ranks._is_lost(ended(code=code)) for code in (0, 2, 130, 1, -9)] == [False, False, False, True, True]
    assert ray_ranks._is_lost(ended(gone="lost its actor", code=None))
    assert not ray_ranks._is_lost(ended(gone="was ended", was_ended=True, code=None))


def test_rank_0_has_time_for_its_checkpoint_where_the_others_ended_well() -> None:
    def rank(code: int | None) -> Any:
        return SimpleNamespace(code=code, is_alive=code is None)

    assert not ray_ranks.must_end([rank(None), rank(None)], stops=1)
    assert not ray_ranks.must_end([rank(None), rank(0)], stops=1), "rank 0 may be at a checkpoint"
    assert ray_ranks.must_end([rank(0), rank(None)], stops=0)
    assert ray_ranks.must_end([rank(None), rank(-9)], stops=0)
    assert ray_ranks.must_end([rank(None), rank(None)], stops=2)


def ended_driver(tmp_path: Path, **how: Any) -> Any:
    """A driver whose only rank has ended so."""
    rank = HostedProcess.__new__(HostedProcess)
    given: dict[str, Any] = {"name": "rank 0", "host": "node-7", "address": "10.0.0.7", "code": None, "gone": "", "_err": []}
    for name, value in (given | how).items():
        setattr(rank, name, value)
    driver = ray_ranks._Driver(cast(Any, None), RunFolder(tmp_path), [])
    driver._ranks = [rank]
    return driver


def test_a_rank_that_the_driver_had_to_end_is_an_error_with_its_reason(tmp_path: Path) -> None:
    driver = ended_driver(tmp_path, gone="was ended: 30 s had passed since it should have")
    with pytest.raises(RedlineError, match=r"rank 0 on node-7 \(10.0.0.7\) was ended: 30 s") as caught:
        driver._result()
    assert "--resume" in caught.value.hint


def test_an_error_of_rank_0_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(RedlineError, match="ended with the error above"):
        ended_driver(tmp_path, code=2)._result()


def test_a_start_after_a_loss_begins_from_scratch_unless_an_earlier_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    assert not has_begun(folder), "nothing may restart it"
    monkeypatch.setenv("REDLINE_RAY_GROUP", "redline-1")
    assert not has_begun(folder)
    assert not has_begun(None)
    remember_launch(folder)
    assert has_begun(folder)
    monkeypatch.setenv("REDLINE_RAY_GROUP", "redline-2")
    assert not has_begun(folder), "another driver's"


def news_until_the_end(host: ProcessHost) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    deadline = time.monotonic() + 30
    while not found or found[-1][0] != "end":
        assert time.monotonic() < deadline, found
        found += host.news(1.0)
    return found


def test_a_host_tells_what_its_process_writes_and_how_it_ended(tmp_path: Path) -> None:
    host = ProcessHost()
    host.start(Job("base64", ["-e", "{files}/a.txt"], files={"a.txt": "abc"}, folder=str(tmp_path)))
    assert news_until_the_end(host) == [("out", "YWJj"), ("end", 0)]


def test_a_hosted_process_hears_signals_and_is_killed() -> None:
    host = ProcessHost()
    host.start(Job("http.server", ["0", "--bind", "127.0.0.1"]))
    assert host.news(30.0)[0][0] == "out"
    host.signal(signal.SIGTERM)
    assert news_until_the_end(host)[-1] == ("end", -signal.SIGTERM)
    with pytest.raises(OSError, match="no-such-folder"):
        ProcessHost().start(Job("base64", folder="/no-such-folder"))
