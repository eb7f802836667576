"""The engine side of a run: what samples from the policy, and what brings the trainer's weights there.

colocated ──► engine.kind: native     an engine in this process, which reads the tensors that the trainer writes; nothing moves
              any other kind          an engine of others, with weights of its own where it cannot share them (`kinds.py`)
apart     ──► engines in processes of their own, with weights of their own, as one; a transport moves new weights there
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from redline.addresses import address_towards, is_loopback
from redline.config import Config
from redline.engine.replicas import Replicas
from redline.launch.engines import make_engine, tell_what_is_missing
from redline.launch.kinds import make_other_engine
from redline.launch.models import LoadedModel
from redline.launch.placement import Placement
from redline.launch.sleeping import Sleeper
from redline.launch.stages import EnginesElsewhere, RunEngine
from redline.launch.starting_engines import StartingEngines
from redline.launch.workers.pool import EnginePool
from redline.ports import Trainer
from redline.telemetry import RunFolder
from redline.weight_sync import Broadcast, CheckpointEngine, CudaIpc, Sending, SharedStorage, WeightProtocol
from redline.weight_sync.transport import Transport


@dataclass(slots=True, frozen=True)
class EngineSide:
    """The engines of a run as the trainer's process has them, wherever they run."""

    engine: RunEngine
    """All of them as one."""
    transport: Transport
    """Brings the trainer's weights to every one of them."""
    close: Callable[[], None] = lambda: None
    """Ends the processes that they run in. Called when no request is under way any more."""
    join: Callable[[WeightProtocol], None] = lambda weight_sync: None
    """Says who brings an engine that was started again to the current version."""
    sleeper: Sleeper | None = None
    """The engine, where it sleeps while the trainer works."""
    elsewhere: EnginesElsewhere | None = None
    """The engines, where they have processes of their own."""


def colocated(config: Config, model: LoadedModel, trainer: Trainer, tell: Callable[[str], None]) -> EngineSide:
    """Make an engine in this process. Ours samples from the trainer's own decoder, so that there is one set of weights."""
    if config.engine.kind != "native":
        other = make_other_engine(config, model, trainer)
        return EngineSide(other.engine, other.transport, other.close, other.join, other.sleeper)
    engine = make_engine(model.decoder, config.engine, model.tokenizer, shares_device=config.buffer.max_lag > 0)
    tell_what_is_missing(model.decoder, tell)
    trained = trainer.weights().tensors
    engine_tensors = {name: tensor.detach() for name, tensor in engine.decoder.named_parameters() if name in trained}
    return EngineSide(engine, SharedStorage(engine_tensors), sleeper=engine if config.placement.sleep else None)


def apart(
    config: Config, placement: Placement, starting: StartingEngines, trainer: Trainer, tell: Callable[[str], None]
) -> EngineSide:
    """Connect the trainer to engines in processes of their own. Blocks until each has loaded its model. Raises EngineLostError
    where one does not start; the caller then closes `starting`."""
    tensors = trainer.weights().tensors
    pool = starting.pool(sum(tensor.nbytes for tensor in tensors.values()))
    transport = _transport(placement, pool, tensors, starting.folder)
    max_restarts = config.placement.max_restarts
    engines = Replicas(pool.engines, pool.restart, max_restarts=max_restarts, arrived=pool.arrived, tell=tell)

    def join(weight_sync: WeightProtocol) -> None:
        pool.catch_up = weight_sync.catch_up

    def close() -> None:
        engines.close()
        starting.close()
        transport.close()

    return EngineSide(engines, transport, close, join, elsewhere=engines)


def _transport(placement: Placement, pool: EnginePool, tensors: Mapping[str, Tensor], folder: RunFolder) -> Transport:
    """What brings weights to engines in processes of their own; `shared` is for one in this process."""
    name = placement.transport
    shares_gpu = any(placement.shares_gpu(place) for place in placement.engines)
    host = _own_address([spawned.address for spawned in pool.spawned])
    sending = Sending(on_lost=pool.lose, host=host, holds_engines=shares_gpu)
    if name == "cuda_ipc":
        return CudaIpc(pool.channels, tensors, sending)
    if name == "broadcast":
        return Broadcast(pool.channels, tensors, sending)
    if name == "checkpoint_engine":
        return CheckpointEngine(pool.channels, tensors, folder.path / "weights", sending)
    raise AssertionError(f"no transport {name}")


def _own_address(engines: Sequence[str]) -> str:
    """The address of this machine that all engines reach: loopback where they are all here."""
    elsewhere = [address for address in engines if not is_loopback(address.rpartition(":")[0].strip("[]"))]
    return address_towards(elsewhere[0]) if elsewhere else "127.0.0.1"
