"""The Ray cluster of a run: joining it, and the room that is kept there for the run's processes.

    placement group      bundle 0 … trainers-1: one trainer rank each        bundle trainers …: one engine each

Every bundle has a CPU, and a GPU where the recipe's device is one; that of an engine which several processes divide has one for
each. PACK puts them on as few nodes as there is room. The group belongs to the driver: when that ends, however it ends, Ray
frees the room and ends every process in it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from redline.addresses import could_be_host
from redline.config.installation import how_to_install
from redline.config.sections.placement import PlacementConfig
from redline.errors import ConfigError

NAMESPACE = "redline"
GROUP_VARIABLE = "REDLINE_RAY_GROUP"
"""Names the placement group to the processes of a run; who has it was started by a driver, and is none itself."""
RUNTIME_VARIABLE = "REDLINE_RAY_RUNTIME_ENV"
"""Tells the processes of a run which runtime environment the driver's job has, such as a folder that was submitted with it."""
PASSED_ON = ("GLOO_", "HF_", "NCCL_", "TORCH")
"""Beginnings of variables that all processes of a run get from the driver's environment; all others are the node's."""
ROOM_S = 300.0
"""Seconds for Ray to find room: an autoscaler may have to start nodes."""
REACH_S = 10.0
"""Seconds for the head of a cluster to take a connection."""
_QUIET = {"log_to_driver": False, "logging_level": "ERROR", "namespace": NAMESPACE}


@dataclass(slots=True, frozen=True)
class Bundle:
    """Room for one process: a bundle of a placement group."""

    group: Any
    index: int
    resources: Mapping[str, float]

    def begin(self, actor: type) -> Any:
        """Begin an actor of this class here, and return its handle at once."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # Several calls at once: one waits for news while another sends a signal.
        remote = ray.remote(actor).options(
            num_cpus=self.resources["CPU"],
            num_gpus=self.resources.get("GPU", 0),
            max_concurrency=8,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.index),
        )
        return remote.remote()


@contextmanager
def joined(placement: PlacementConfig, processes: int) -> Iterator[None]:
    """Inside the block this process is a driver of the cluster that `placement.address` names. Raises `ConfigError` where there
    is none."""
    ray = import_ray()
    if ray.is_initialized():  # a program that called `ray.init` itself
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without GPUs of its own a process keeps what it sees
    try:
        _check_reachable(placement)
        if placement.address == "local":
            cpus = max(os.cpu_count() or 1, processes)
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **_QUIET)
        else:
            ray.init(address=placement.address, **_QUIET)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"placement.address = {placement.address!r}: no Ray cluster answers ({str(error).strip().splitlines()[0][:200]})",
            "start one (`ray start --head`), or set placement.address=local for one on this machine; one that is there may want"
            " its token: RAY_AUTH_MODE=token, with RAY_AUTH_TOKEN or ~/.ray/auth_token",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def check_address(placement: PlacementConfig) -> tuple[str, int] | None:
    """Return where the head of the cluster listens; None where Ray finds or starts the cluster itself. Raises `ConfigError` for
    what is no address of one. Connects to nobody."""
    address, key = placement.address, "placement.address"
    if address == "auto" and (given := os.environ.get("RAY_ADDRESS")):
        address, key = given, "RAY_ADDRESS"
    if address in ("auto", "local"):
        return None
    if "://" in address:
        raise ConfigError(
            f"{key} = {address!r}: a run needs the cluster itself, not a client of it",
            "give the address of its head, such as 10.0.0.1:6379, or use `ray job submit` (docs/ray.md)",
        )
    host, _, port = address.rpartition(":")
    if not could_be_host(host.strip("[]")) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{key} = {address!r}: it is neither local, auto nor host:port",
            "give the address of the cluster's head, such as 10.0.0.1:6379, or local for one on this machine",
        )
    return host.strip("[]"), int(port)


def _check_reachable(placement: PlacementConfig) -> None:
    """Raise OSError where nobody listens at the address: Ray itself would ask for minutes."""
    if head := check_address(placement):
        socket.create_connection(head, REACH_S).close()


def import_ray() -> Any:
    """The package. Raises `ConfigError` where it is not installed."""
    check_ray()
    import ray

    return ray


def check_ray() -> None:
    """Raise `ConfigError` where the package is not installed. Does not import it."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("placement.cluster = 'ray': the package ray is not installed", how_to_install("ray"))


def bundle_resources(device: str, width: int = 1) -> dict[str, float]:
    """What a process of a run takes, or an engine that `width` processes divide."""
    return {"CPU": width, "GPU": width} if device == "cuda" else {"CPU": width}


@contextmanager
def room(resources: Sequence[Mapping[str, float]], *, one_node: bool = False) -> Iterator[list[Bundle]]:
    """Inside the block there is room for each of these, with `one_node` all on the same one. Blocks until Ray has found it.
    Raises `ConfigError` where it finds none within `ROOM_S` seconds."""
    from ray.util.placement_group import placement_group, remove_placement_group

    name = f"redline-{os.getpid()}-{time.time_ns()}"
    strategy = "STRICT_PACK" if one_node else "PACK"
    group = placement_group([dict(each) for each in resources], strategy=strategy, name=name)
    try:
        wait_for_room(group, resources)
        yield [Bundle(group, index, each) for index, each in enumerate(resources)]
    finally:
        remove_placement_group(group)


def join_as_rank() -> None:
    """Make this process, which a driver has started, a member of the driver's cluster. What it begins there ends with it, and
    finds the modules that the driver's job brought along and the variables that ranks have from the driver."""
    import ray

    if not ray.is_initialized():
        runtime_env = json.loads(os.environ.get(RUNTIME_VARIABLE, "{}"))
        ray.init(address=os.environ["RAY_ADDRESS"], runtime_env=runtime_env or None, **_QUIET)


def runtime_env_of_job() -> str:
    """The runtime environment for what the ranks of this driver begin, as JSON: that of its job, and the variables that
    are passed on. Without any, Ray gives an actor a process that waits already."""
    import ray

    env = {key: value for key, value in dict(ray.get_runtime_context().runtime_env).items() if not key.startswith("_")}
    if passed_on := {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}:
        env["env_vars"] = {**passed_on, **env.get("env_vars", {})}
    return json.dumps(env)


def kept_room() -> tuple[list[Bundle], int]:
    """The bundles that the driver of this process keeps for its run, and how many machines the cluster has."""
    import ray
    from ray.util import get_placement_group

    group = get_placement_group(os.environ[GROUP_VARIABLE])
    bundles = [Bundle(group, index, resources) for index, resources in enumerate(group.bundle_specs)]
    return bundles, len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})


def wait_for_room(group: Any, resources: Sequence[Mapping[str, float]]) -> None:
    """Block until the group has its room, these; also after a node of it is gone, and Ray looks for another."""
    if not group.wait(ROOM_S):
        one_node = group_strategy(group) == "STRICT_PACK"
        where = "on one node of the Ray cluster" if one_node else "on the Ray cluster"
        more = "; or set placement.transport=broadcast, which reaches engines on other nodes" if one_node else ""
        raise ConfigError(
            f"{where} is no room for {_words(resources)} each within {ROOM_S:g} s; {_there()}",
            "lower placement.trainers or placement.engines, end other jobs (`ray status` lists what is in use), or add nodes"
            + more,
        )


def group_name(bundle: Bundle) -> str:
    """The name by which another process of the run finds the bundle's group."""
    return str(_about(bundle.group)["name"])


def group_strategy(group: Any) -> str:
    """How Ray is to place the bundles of a group."""
    return str(_about(group)["strategy"])


def _about(group: Any) -> dict[str, Any]:
    from ray.util.placement_group import placement_group_table

    return dict(placement_group_table(group))


def _words(resources: Sequence[Mapping[str, float]]) -> str:
    """`2 processes with 1 CPU and 1 GPU, 1 with 4 CPU and 4 GPU`."""
    each = Counter(" and ".join(f"{amount:g} {name}" for name, amount in one.items()) for one in resources)
    return ", ".join(f"{count} {'' if at else 'processes '}with {what}" for at, (what, count) in enumerate(each.items()))


def _there() -> str:
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    amounts = [f"{free.get(name, 0):g} of {total.get(name, 0):g} {name} free" for name in ("CPU", "GPU")]
    return f"on {sum(node['Alive'] for node in ray.nodes())} nodes it has {', '.join(amounts)}"
