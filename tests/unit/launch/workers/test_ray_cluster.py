"""The address of a Ray cluster, as far as it can be judged without one."""

from __future__ import annotations

import pytest

from redline.config.sections.placement import PlacementConfig
from redline.errors import ConfigError
from redline.launch.workers.ray_cluster import check_address


def at(address: str) -> PlacementConfig:
    return PlacementConfig(cluster="ray", address=address)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("address", "head"),
    [
        ("local", None),
        ("auto", None),
        ("10.0.0.1:6379", ("10.0.0.1", 6379)),
        ("node-7:6379", ("node-7", 6379)),
        ("[fd00::1]:6379", ("fd00::1", 6379)),
    ],
)
def test_an_address_is_ray_s_own_word_or_that_of_a_head(address: str, head: tuple[str, int] | None) -> None:
    assert check_address(at(address)) == head


@pytest.mark.parametrize("address", ["", "10.0.0.1", "10.0.0.1:", ":6379", "10.0.0.1:70000", "a..b:6379", "10.0.0.1:head"])
def test_what_is_no_address_is_refused_before_anything_starts(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^placement.address = .*neither local, auto nor host:port") as refused:
        check_address(at(address))
    assert "10.0.0.1:6379" in refused.value.hint


def test_a_client_of_a_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs the cluster itself"):
        check_address(at("ray://10.0.0.1:10001"))


def test_auto_is_what_the_environment_says_and_a_bad_one_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert check_address(at("auto")) == ("10.0.0.1", 6379)
    assert check_address(at("local")) is None
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.1:8265")
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS = "):
        check_address(at("auto"))
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert check_address(at("auto")) is None
