"""Looks at the room that a stage of a pipeline has for messages while it passes micro-batches on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.parallel_training import parted
from support.policy_training import make_trainer, recipe, weights_of

from redline.trainer.parallel.processes import connect
from redline.types import TrainBatch


@dataclass
class MessageTokens:
    """Tokens of all messages that there is room for, at the beginning of each pass over a micro-batch."""

    of_inputs: list[int] = field(default_factory=list)
    of_gradients: list[int] = field(default_factory=list)
    micro_batches: int = 0


def message_tokens(folder: Path, batch: TrainBatch, keys: dict[str, Any]) -> MessageTokens:
    """Take a step, on as many processes as there are."""
    from redline.trainer.parallel.pipeline import _OwnStage

    division, of_trainer = parted(keys)
    parallel = connect(division, torch.device("cpu"))
    trainer = make_trainer(folder, recipe(**of_trainer), parallel=parallel, **weights_of(folder, parallel))
    found, forward, backward = MessageTokens(), _OwnStage.forward_one_chunk, _OwnStage.backward_one_chunk

    def look(stage: Any) -> None:
        found.of_inputs.append(tokens_of(stage.args_recv_info.values()))
        found.of_gradients.append(tokens_of(stage.grad_recv_info.values()))

    def looked_forward(stage: Any, *arguments: Any, **named: Any) -> Any:
        look(stage)
        return forward(stage, *arguments, **named)

    def looked_backward(stage: Any, *arguments: Any, **named: Any) -> None:
        look(stage)
        backward(stage, *arguments, **named)

    _OwnStage.forward_one_chunk, _OwnStage.backward_one_chunk = looked_forward, looked_backward
    try:
        found.micro_batches = trainer.step(batch).num_micro_batches
    finally:
        _OwnStage.forward_one_chunk, _OwnStage.backward_one_chunk = forward, backward
    return found


def tokens_of(chunks: Iterable[Iterable[Any]]) -> int:
    return sum(len(info.buffer) for infos in chunks for info in infos if info.buffer is not None)
