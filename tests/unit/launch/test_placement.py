"""What runs where is decided, or refused, from the recipe alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch

from redline.config import Config, EngineRecipe, resolve, validate
from redline.errors import ConfigError
from redline.launch import joining
from redline.launch.placement import check_engine_place, place, visible_gpus


def recipe(num_threads: int = 1, **sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "run": {"device": "cpu"},
        "model": {"path": "builtin:tiny"},
        "rollouts": {"task": {"kind": "import", "path": "tests:Fake"}},
        **sections,
    }
    config = resolve(validate(values)).config
    return config.model_copy(update={"run": config.run.model_copy(update={"num_threads": num_threads})})


def test_in_lockstep_every_stage_is_in_the_thread_of_the_loop() -> None:
    placement = place(recipe(4))
    assert placement.is_lockstep
    assert placement.num_processes == 1
    assert str(placement) == "rollouts, engine, buffer, trainer, weight_sync: process 0, thread main (cpu, 4 CPU threads)"


@pytest.mark.parametrize(("cores", "trainer", "engine"), [(1, 1, 1), (2, 1, 1), (5, 3, 2), (8, 4, 4)])
def test_with_a_lag_engine_and_trainer_have_threads_of_their_own_and_divide_the_cores(
    cores: int, trainer: int, engine: int
) -> None:
    placement = place(recipe(cores, buffer={"max_lag": 1}))
    assert not placement.is_lockstep
    assert placement.stages["trainer"].cpu_threads == trainer
    assert placement.stages["engine"].cpu_threads == engine
    assert placement.stages["engine"].thread == placement.stages["rollouts"].thread == "rollouts"
    assert placement.stages["buffer"] == placement.stages["weight_sync"] == placement.stages["trainer"]


@pytest.mark.parametrize(
    ("ranks", "sections", "message"),
    [
        ("1", {"trainer": {"sharding": "full"}}, "there is one process"),
        ("3", {"trainer": {"sequence_parallel_size": 2}}, "does not divide the trainer's 3 processes"),
        ("2", {"trainer": {"algorithm": "ppo"}}, "the critic is trained by one process, and 2 were started"),
        ("2", {"trainer": {"sharding": "full", "offload_optimizer": True}}, "the state is divided among the devices"),
        ("3", {"trainer": {"pipeline_parallel_size": 2}}, "does not divide the trainer's 3 processes"),
        ("2", {"trainer": {"pipeline_parallel_size": 2, "algorithm": "ppo"}}, "the critic is trained by one process"),
        (
            "2",
            {"trainer": {"pipeline_parallel_size": 2, "offload_optimizer": True}},
            "pipeline_parallel_size the state is",
        ),
    ],
)
def test_what_the_started_processes_cannot_divide_is_refused(
    ranks: str, sections: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(ConfigError, match=message):
        place(recipe(**sections))


def test_on_a_cluster_the_way_out_is_one_of_the_cluster() -> None:
    for sections in ({"trainer": {"sharding": "full"}}, {"trainer": {"sequence_parallel_size": 2}}):
        with pytest.raises(ConfigError) as refused:
            place(recipe(placement={"cluster": "ray"}, **sections))
        assert "placement.trainers" in refused.value.hint
        assert "torchrun" not in refused.value.hint, "it is refused there"
    with pytest.raises(ConfigError) as refused:
        place(recipe(placement={"cluster": "ray", "trainers": 2}, trainer={"algorithm": "ppo"}))
    assert "set placement.trainers=1" in refused.value.hint


def test_two_processes_may_train_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    place(recipe(trainer={"sharding": "full"}))


# ── engines in processes of their own ──────────────────────────────────────────────────────────────────────────────────


def on_cuda(**sections: dict[str, Any]) -> Config:
    config = recipe(8, **sections)
    return config.model_copy(update={"run": config.run.model_copy(update={"device": "cuda"})})


@pytest.mark.parametrize(
    ("cores", "engines", "lag", "of_trainer", "of_each"),
    [(8, 1, 0, 8, 8), (8, 2, 0, 8, 4), (8, 2, 1, 4, 2), (2, 1, 1, 1, 1), (3, 2, 0, 3, 1), (2, 4, 1, 1, 1)],
)
def test_engines_divide_the_cores_that_the_trainer_leaves_while_they_work(
    cores: int, engines: int, lag: int, of_trainer: int, of_each: int
) -> None:
    placement = place(recipe(cores, placement={"engines": engines}, buffer={"max_lag": lag}))
    assert placement.num_processes == 1 + engines
    assert [(place.process, place.cpu_threads) for place in placement.engines] == [(i + 1, of_each) for i in range(engines)]
    assert placement.stages["trainer"].cpu_threads == of_trainer
    assert "engine" not in placement.stages
    assert placement.is_lockstep == (lag == 0)


def test_a_placement_says_who_runs_where_and_how_weights_get_there_and_who_shares_what() -> None:
    assert str(place(recipe(4, placement={"engines": 1}))) == (
        "rollouts, buffer, trainer, weight_sync: process 0, thread main (cpu, 4 CPU threads); engine: process 1, thread engine"
        " (cpu, 4 CPU threads); weights by cuda_ipc: engines are on the trainer's machine"
    )
    assert str(place(recipe(2, placement={"engines": 3}))).endswith("; 3 threads of engines share 2 cores")


@pytest.mark.parametrize(
    ("gpus", "engines", "devices", "shares"),
    [
        (1, 1, ["cuda:0"], "the engine gets what the trainer leaves of engine.gpu_memory_utilization = 0.5"),
        (1, 2, ["cuda:0", "cuda:0"], "2 engines get equal parts of what the trainer leaves"),
        (2, 1, ["cuda:1"], None),
        (3, 3, ["cuda:1", "cuda:2", "cuda:1"], "2 engines share cuda:1: each gets an equal part"),
    ],
)
def test_engines_take_the_gpus_that_the_trainer_leaves_and_share_where_there_are_too_few(
    gpus: int, engines: int, devices: list[str], shares: str | None
) -> None:
    placement = place(on_cuda(placement={"engines": engines}), gpus)
    assert [place.device for place in placement.engines] == devices
    assert [shares in note for note in placement.notes] == [True] if shares else placement.notes == ()
    assert placement.transport == ("cuda_ipc" if gpus == 1 else "broadcast")


def test_engines_that_are_divided_have_gpus_of_their_own_or_parts_of_the_cores() -> None:
    divided = {"tensor_parallel_size": 2}
    placement = place(on_cuda(placement={"engines": 2}, engine=divided), 5)
    assert [(place.device, place.width) for place in placement.engines] == [("cuda:1", 2), ("cuda:3", 2)]
    assert placement.transport == "broadcast"
    assert "divided among 2 processes (2 GPUs from cuda:3 on)" in str(placement)
    with pytest.raises(ConfigError, match="take 4 GPUs besides the trainer's, and 3 are left"):
        place(on_cuda(placement={"engines": 2}, engine=divided), 4)
    on_cpu = place(recipe(8, placement={"engines": 2}, engine=divided))
    assert [(place.cpu_threads, place.width) for place in on_cpu.engines] == [(2, 2), (2, 2)]
    assert on_cpu.transport == "cuda_ipc"


@pytest.mark.parametrize(
    ("sections", "message", "fix"),
    [
        ({}, "an engine in the trainer's process is whole", "set placement.engines=1"),
        ({"engine": {"kind": "vllm"}}, "an engine in the trainer's process is whole", "set placement.engines=1"),
        ({"engine": {"kind": "transformers"}}, "engine.kind = transformers", "leave it out"),
        ({"placement": {"engines": 1}, "trainer": {"lora": {"rank": 4}}}, "is not divided", "leave one of them out"),
        ({"placement": {"engines": 1, "remote_engines": 1}}, "machines that join are whole", "placement.remote_engines=0"),
    ],
)
def test_an_engine_that_must_be_whole_is_not_divided(sections: dict[str, Any], message: str, fix: str) -> None:
    engine = {"tensor_parallel_size": 2, **sections.get("engine", {})}
    with pytest.raises(ConfigError, match=message) as refused:
        place(recipe(**{**sections, "engine": engine}))
    assert fix in refused.value.hint


def test_memory_of_one_gpu_is_not_shared_with_an_engine_on_another() -> None:
    config = on_cuda(placement={"engines": 1, "transport": "cuda_ipc"})
    assert place(config, 1).transport == "cuda_ipc"
    with pytest.raises(ConfigError, match="an engine on cuda:1 does not see it") as refused:
        place(config, 2)
    assert refused.value.hint == "leave it out, which takes broadcast"


@pytest.mark.parametrize(("engines", "transport"), [(0, "cuda_ipc"), (0, "broadcast"), (0, "checkpoint_engine"), (2, "shared")])
def test_a_transport_that_does_not_reach_the_engines_is_refused_and_each_way_out_is_one(engines: int, transport: str) -> None:
    with pytest.raises(ConfigError, match=f"placement.transport = {transport}") as refused:
        place(recipe(placement={"engines": engines, "transport": transport}))
    assert "leave it out" in str(refused.value.hint)
    place(recipe(placement={"engines": engines}))
    place(recipe(placement={"engines": 1 - min(engines, 1), "transport": transport}))


# ── engines on other machines ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_TOKEN", "0123456789abcdef")


def remote(engines: int, remote_engines: int, **keys: Any) -> dict[str, Any]:
    return {"engines": engines, "remote_engines": remote_engines, **keys}


@pytest.mark.usefixtures("token")
def test_engines_of_other_machines_are_said_with_where_they_join_and_how_weights_get_there() -> None:
    placement = place(recipe(4, placement=remote(2, 1, listen="127.0.0.1")))
    assert [place.joins_at for place in placement.engines] == ["", "127.0.0.1:29600"]
    assert [place.cpu_threads for place in placement.engines] == [4, 0]
    assert str(placement).endswith(
        "engine: process 1, thread engine (cpu, 4 CPU threads); engine: process 2, on a machine that joins at 127.0.0.1:29600"
        " (cpu); weights by broadcast: trainer and engines form a process group; placement.listen = 127.0.0.1: this machine"
        " alone can join"
    )


@pytest.mark.usefixtures("token")
def test_engines_of_other_machines_take_no_core_and_no_gpu_from_the_trainer() -> None:
    assert place(recipe(8, placement=remote(2, 2), buffer={"max_lag": 1})).stages["trainer"].cpu_threads == 8
    assert place(recipe(8, placement=remote(2, 1), buffer={"max_lag": 1})).stages["trainer"].cpu_threads == 4
    placement = place(on_cuda(placement=remote(3, 2)), 2)
    assert [place.device for place in placement.engines] == ["cuda:1", "cuda", "cuda"]
    assert not any(map(placement.shares_gpu, placement.engines))


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (remote(1, 2), "there are 1 engines in all"),
        (remote(0, 1), "there are 0 engines in all"),
        (remote(1, 1, cluster="ray"), "placement.cluster = ray starts engines on its nodes"),
        (remote(1, 1, transport="cuda_ipc"), "engines on other machines do not see the memory of this one"),
        (remote(1, 1, transport="shared"), "do not read the trainer's weights"),
        (remote(1, 1, listen="192.0.2.7"), "placement.listen = 192.0.2.7: "),
        (remote(1, 1, listen="no.such.host.invalid:80"), "placement.listen = no.such.host.invalid:80: "),
        (remote(1, 1, listen=":80"), "it is no address"),
        (remote(1, 1, listen="a..b:80"), "it is no address"),
        (remote(1, 1, listen="127.0.0.1:http"), "it is no address"),
        (remote(1, 1, listen="127.0.0.1:99999"), "it is no address"),
    ],
)
def test_engines_of_other_machines_that_could_not_join_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        place(recipe(placement=keys))
    assert refused.value.hint


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize(
    ("listen", "joins_at"),
    [("127.0.0.1", "127.0.0.1:29600"), ("localhost:29601", "localhost:29601"), ("::1", "[::1]:29600"), ("[::1]:7", "[::1]:7")],
)
def test_an_address_to_join_may_name_a_port_or_not(listen: str, joins_at: str) -> None:
    if "::" in listen and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    assert place(recipe(placement=remote(1, 1, listen=listen))).engines[0].joins_at == joins_at


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("token", "what"), [("", "is not set"), ("short", "has 5 characters, fewer than 16")])
def test_without_a_good_token_nobody_may_join(token: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_taken", [])
    monkeypatch.setenv("REDLINE_TOKEN", token)
    with pytest.raises(ConfigError, match=f"REDLINE_TOKEN {what}") as refused:
        place(recipe(placement=remote(1, 1)))
    assert "openssl rand" in refused.value.hint


def test_the_token_leaves_the_environment_and_a_later_run_of_the_process_still_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_taken", [])
    monkeypatch.setenv("REDLINE_TOKEN", "0123456789abcdef")
    assert joining.take_token() == "0123456789abcdef"
    assert "REDLINE_TOKEN" not in os.environ
    assert joining.take_token() == "0123456789abcdef"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (recipe(placement={"sleep": True}), "on the CPU"),
        (on_cuda(placement={"sleep": True, "engines": 1}), "processes of their own"),
        (on_cuda(placement={"sleep": True}, buffer={"max_lag": 1}), "with a lag"),
    ],
)
def test_a_sleep_that_frees_nothing_for_the_trainer_is_refused(config: Config, why: str) -> None:
    with pytest.raises(ConfigError, match=f"placement.sleep = true: .*{why}"):
        place(config, 1)
    place(on_cuda(placement={"sleep": True}), 1)


def test_guesses_have_a_place_on_every_device() -> None:
    place(recipe(engine={"speculation": "auto"}))
    place(on_cuda(engine={"speculation": "auto"}), 1)


@pytest.mark.parametrize(("named", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,2", 2), ("GPU-a, GPU-b", 2)])
def test_gpus_are_those_that_the_environment_shows(named: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus() == count


@pytest.mark.parametrize(("devices", "hint"), [(1, "set it to 1"), (2, "set it to 2 or less")])
def test_an_engine_of_more_processes_than_there_are_gpus_is_refused(
    devices: int, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    values = {"model": {"path": "builtin:tiny"}, "run": {"device": "cuda"}}
    check_engine_place(EngineRecipe.model_validate({**values, "engine": {"tensor_parallel_size": devices}}))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 4: each process needs a GPU of its own") as refused:
        check_engine_place(EngineRecipe.model_validate({**values, "engine": {"tensor_parallel_size": 4}}))
    assert refused.value.hint == hint


def test_a_device_that_torch_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch cannot use it"):
        check_engine_place(EngineRecipe.model_validate({"model": {"path": "builtin:tiny"}, "run": {"device": "cuda"}}))


def test_placing_a_recipe_loads_no_torch() -> None:
    code = "import sys, redline.launch.placement; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_weights_reach_a_server_over_http_and_no_other_engine() -> None:
    server = {"kind": "openai", "url": "http://127.0.0.1:1/v1"}
    for transport in ("auto", "http"):
        placement = place(recipe(engine=server, placement={"transport": transport}))
        assert placement.transport == "http"
        assert str(placement).endswith("; weights by http: the engine is a server")
    with pytest.raises(ConfigError, match=r"placement\.transport = cuda_ipc: the engine is a server"):
        place(recipe(engine=server, placement={"transport": "cuda_ipc"}))
    for sections in ({}, {"placement": {"engines": 1, "transport": "http"}}):
        with pytest.raises(ConfigError, match=r"engine\.kind = native is no server"):
            place(recipe(**{"placement": {"transport": "http"}, **sections}))
