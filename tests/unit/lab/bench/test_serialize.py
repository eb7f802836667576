from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from redline.errors import ConfigError
from redline.lab.bench.cases import serialize
from redline.lab.bench.handover import Handover, handing_over
from redline.lab.bench.run import bench
from redline.lab.bench.settings import SerializeSettings, make_settings
from redline.lab.bench.table import render
from redline.lab.peers.contest import OURS
from redline.lab.peers.storage_sides import ONE_BY_ONE, least_bytes, make_pool, make_side, make_steps

SMALL = ["tokens=24", "prompt_tokens=8", "longest=64", "group_size=2", "groups_per_step=4"]


def small(*overrides: str) -> SerializeSettings:
    settings = make_settings("serialize", [*SMALL, *overrides])
    assert isinstance(settings, SerializeSettings)
    return settings


def installed() -> tuple[str, ...]:
    return small().peers or ()


def test_the_lengths_are_long_tailed_and_have_the_mean_asked_for() -> None:
    settings = small()
    lengths = np.array([len(t.token_ids) for group in make_pool(settings) for t in group.trajectories])
    assert lengths.mean() == settings.tokens
    assert (lengths.min(), lengths.max()) == (settings.prompt_tokens + 1, settings.longest)


@pytest.mark.parametrize("name", [OURS, ONE_BY_ONE, *installed()])
def test_every_side_gives_back_what_it_was_given(tmp_path: Path, name: str) -> None:
    settings = small()
    steps = list(make_steps(make_pool(settings), 3, settings.groups_per_step))
    side = make_side(name, settings)
    seconds = side.write(tmp_path / "store", steps)
    assert len(seconds) == 4, "each step, and the end"
    batches = list(side.batches(tmp_path / "store"))
    assert len(batches) == 3
    for batch, groups in zip([*batches, side.last_batch(tmp_path / "store")], [*steps, steps[-1]], strict=True):
        attempts = [t for group in groups for t in group.trajectories]
        np.testing.assert_array_equal(batch.tokens, np.concatenate([t.token_ids for t in attempts]))
        np.testing.assert_array_equal(batch.loss_mask, np.concatenate([t.loss_mask for t in attempts]))
        np.testing.assert_array_equal(batch.old_logprobs, np.concatenate([t.logprobs for t in attempts]))
        np.testing.assert_array_equal(batch.advantages, np.concatenate([group.advantages for group in groups]))
        assert np.diff(batch.group_offsets).tolist() == [2] * 4


def test_a_run_ends_in_a_document_with_bounds_and_peers() -> None:
    settings = small("trajectories=16,48", "pairs=2", "peers=pickle,padded", "handed_over=none")
    output = io.StringIO()
    console = Console(file=output, width=160)
    measured = bench("serialize", settings, console)
    console.print(render(measured))
    document = measured.as_json()
    beside = [(result["name"], result["peer"]["name"]) for result in document["results"] if result["peer"]]
    kinds = ["write", "read", "first batch", "size"]
    assert beside == [(f"{count}: {kind}", peer) for count in (16, 48) for kind in kinds for peer in ("pickle", "padded")]
    alone = [result["name"] for result in document["results"] if not result["peer"]]
    assert alone == [f"{count}: write group by group" for count in (16, 48)]
    assert all(result["fraction_of_bound"] > 0 for result in document["results"])
    assert all(result["fraction_of_bound"] < 1 for result in document["results"] if result["name"].endswith("size"))
    sizes = [result["value"] for result in document["results"] if result["name"] == "16: size"]
    assert sizes[0] >= sum(least_bytes(group) for step in make_steps(make_pool(settings), 2, 4) for group in step)
    assert set(document["identity"]["peers"]) == {"pickle", "padded"}
    assert "48: first batch" in output.getvalue()


@pytest.fixture(scope="module")
def handover() -> Iterator[Handover]:
    with handing_over() as started:
        yield started


def test_a_batch_arrives_in_this_process_and_in_another_on_every_route(handover: Handover) -> None:
    settings = small()
    groups = next(make_steps(make_pool(settings), 1, 4))
    attempts = [t for group in groups for t in group.trajectories]
    expected = sum(int(t.token_ids.sum()) + int(t.loss_mask.sum()) for t in attempts)
    expected += round(float(np.concatenate([t.logprobs for t in attempts]).sum()))
    for name in ("redline", *installed()):
        for route in ("memory", "pipe", "file"):
            handed = handover.hand(name, groups, route)
            assert handed.checksum == expected, f"{name} by {route}"
            assert handed.num_bytes > 0
            assert handed.seconds > 0
    assert not list(handover._folder.iterdir()), "nothing is left behind"


def test_the_other_process_says_when_it_cannot_go_on(handover: Handover) -> None:
    """The last test that uses it."""
    handover.hand("pickle", next(make_steps(make_pool(small()), 1, 1)), "pipe")
    handover._connection.send_bytes(b"nonsense")
    handover._connection.send_bytes(b"")
    with pytest.raises(EOFError):
        handover._connection.recv_bytes()


@pytest.mark.slow  # the routes are tested above, the document below
def test_handing_over_is_part_of_the_document() -> None:
    settings = small("trajectories=16", "pairs=2", "peers=pickle,safetensors", "handed_over=2")
    results = bench("serialize", settings, Console(quiet=True)).results
    found = [(result.name, result.peer.name) for result in results if "attempts" in result.name]
    assert found == [
        ("4 attempts to the same process", "pickle, memory"),
        ("4 attempts to the same process", "safetensors, memory"),
        ("4 attempts to another process, peers by pipe", "pickle, pipe"),
        ("4 attempts to another process, peers by pipe", "safetensors, pipe"),
        ("4 attempts to another process by file", "pickle, file"),
        ("4 attempts to another process by file", "safetensors, file"),
    ]
    assert all(len(result.samples) == 2 for result in results)


def test_a_store_that_grows_is_compared_with_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialize, "WINDOW", 384)
    settings = small("trajectories=896", "group_size=8", "groups_per_step=16", "pairs=1", "peers=none", "handed_over=none")
    results = bench("serialize", settings, Console(quiet=True)).results
    growth = results[-1]
    assert growth.name == "896: growth of write"
    assert growth.bound.value == 1
    assert 0.2 < growth.value < 5


def test_lengths_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="is not between prompt_tokens = 128 and longest"):
        make_settings("serialize", ["tokens=100"])


def test_a_peer_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.lab.bench.settings.make.is_installed", lambda package: package != "tensordict")
    with pytest.raises(ConfigError, match="consolidated needs a package"):
        make_settings("serialize", ["peers=pickle,consolidated"])
    assert small().peers == ("pickle", "padded", "safetensors")


def test_what_is_no_setting_is_told_with_an_example() -> None:
    with pytest.raises(ConfigError) as caught:
        make_settings("serialize", ["engine.block_size=3"])
    assert "pairs=6" in caught.value.hint
