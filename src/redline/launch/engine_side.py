"""The engine side of a run: what samples from the policy, and what brings the trainer's weights there.

colocated ──► engine.kind: native     an engine in this process, which reads the tensors that the trainer writes; nothing moves
              any other kind          an engine of others, with weights of its own where it cannot share them (`kinds.py`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from redline.config import Config
from redline.launch.engines import make_engine
from redline.launch.kinds import make_other_engine
from redline.launch.models import LoadedModel
from redline.launch.stages import RunEngine
from redline.ports import Trainer
from redline.weight_sync import SharedStorage
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


def colocated(config: Config, model: LoadedModel, trainer: Trainer) -> EngineSide:
    """Make an engine in this process. Ours samples from the trainer's own decoder, so that there is one set of weights."""
    if config.engine.kind != "native":
        other = make_other_engine(config, model, trainer)
        return EngineSide(other.engine, other.transport, other.close)
    engine = make_engine(model.decoder, config.engine, model.tokenizer)
    trained = trainer.weights().tensors
    engine_tensors = {name: tensor.detach() for name, tensor in engine.decoder.named_parameters() if name in trained}
    return EngineSide(engine, SharedStorage(engine_tensors))
