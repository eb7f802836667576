"""One try of `redline bench memory`, in a process of its own. Whatever it leaves behind ends with it:

    python -m redline.lab.bench.memory_probe '{"settings": {...}, "side": "redline", "sequences": 8}'
    →  {"memory": {"weights": ..., ...}, "planned": {...}, "bytes_per_token": ...}

`memory` is null where there was not enough.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch

from redline.child import KILLED, ChildError, only_answer, take_stdout
from redline.errors import NoRoomError, TrainingError
from redline.kernels.available import has_triton
from redline.kernels.cpu import training
from redline.lab.bench.settings import MemorySettings, as_recipe
from redline.lab.material.networks import Network, make_network
from redline.lab.material.train_batches import random_batch
from redline.lab.measure.machine import MemoryMeter
from redline.lab.measure.phases import Memory, memory_by_kind
from redline.lab.peers.training_sides import RedlineTraining, TrainingSide, TransformersTraining, trained_size_of
from redline.launch.process import prepare_process
from redline.models.files.hf import AnyDecoder
from redline.models.layer_code import Checkpointing, layer_code
from redline.models.sizes.memory import parameter_bytes, token_bytes
from redline.trainer.batches.budget import logits_bytes
from redline.trainer.optimizer.quantized_states import bytes_per_moments

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(slots=True, frozen=True)
class Found:
    """What one try found."""

    memory: Mapping[str, int] | None
    """Bytes at the peak of a step, by kind; None where memory ran out."""
    planned: Mapping[str, int] | None = None
    """What the trainer's memory plan expects, by the same kinds; None for others than our trainer, and on a CPU, where it has
    none."""
    bytes_per_token: int = 0
    """Bytes of the inputs of all layers, in the compute dtype."""
    trained_bytes: int | None = None
    """Bytes of the weights that have a gradient; None where all have."""

    @property
    def peak_bytes(self) -> int | None:
        return None if self.memory is None else sum(self.memory.values())


def probe(settings: MemorySettings, side: str, sequences: int) -> Found:
    """Train on a micro-batch of so many sequences in a new process. Blocks until it has ended."""
    task = {"settings": settings.model_dump(mode="json", exclude_unset=True), "side": side, "sequences": sequences}
    command = [sys.executable, "-m", "redline.lab.bench.memory_probe", json.dumps(task)]
    try:
        return Found(**only_answer(command))
    except ChildError as failed:
        if failed.code == KILLED:
            return Found(None)
        raise TrainingError(f"a try {failed}", "search less far: most_tokens=8192") from None


# ── in the process ─────────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    reply, task = take_stdout(), json.loads(sys.argv[1])
    settings = MemorySettings.model_validate(task["settings"])
    prepare_process(as_recipe(settings))
    # Libraries and workspaces that a first step loads would count as its memory.
    train(settings.model_copy(update={"model": "builtin:tiny", "tokens": 4}), task["side"], sequences=1)
    if settings.device == "cuda" and settings.limit_bytes is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, settings.limit_bytes / total))
    reply(asdict(train(settings, task["side"], task["sequences"])))


def train(settings: MemorySettings, side_name: str, sequences: int) -> Found:
    """Two steps on one micro-batch: after the first the optimizer's states are there, the second is watched."""
    device = torch.device(settings.device)
    try:
        meter = MemoryMeter(device)
        network = make_network(settings.model, device, getattr(torch, settings.dtype), settings.seed)
        shape = network.decoder.spec
        bytes_per_token = (shape.num_layers + 1) * shape.hidden_size * network.decoder.output_weight.element_size()
        side = _side(side_name, network, settings, sequences)
        is_planned = side_name == "redline" and device.type == "cuda"
        planned = _planned(network.decoder, settings, sequences) if is_planned else None
        trained = trained_size_of(network.decoder) if side_name == "redline" else None
        del network  # transformers has a copy
        lengths = np.full(sequences, settings.tokens, dtype=np.int64)
        batch = random_batch(lengths, prompt_tokens=1, group_size=1, vocab_size=shape.vocab_size, key=(settings.seed,))
        steps = [side.step(batch)]
        memory = memory_by_kind(lambda: steps.append(side.step(batch)), meter, side.weight_bytes, side.gradient_bytes)
    except NoRoomError:
        return Found(None)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return Found(None)
    in_one_piece = all(step.micro_batches == 1 for step in steps)  # a trainer may cut a micro-batch that does not fit
    return Found(memory.as_json() if in_one_piece else None, planned, bytes_per_token, trained)


def _planned(decoder: AnyDecoder, settings: MemorySettings, sequences: int) -> dict[str, int]:
    """Of the network as it is trained: with its adapter, where it has one."""
    config, dtype = settings.trainer, getattr(torch, settings.dtype)
    held = parameter_bytes(
        decoder,
        dtype,
        bytes_per_moments=bytes_per_moments(config.optimizer_states),
        offloaded=config.offload_optimizer and settings.device == "cuda",
    )
    checkpointing: Checkpointing = config.gradient_checkpointing
    kernels = settings.device == "cuda" and has_triton()
    compiled = settings.device == "cpu" and training.is_there(dtype)
    code = layer_code(decoder.spec, dtype, checkpointing, kernels=kernels, whole=not config.lora.rank, compiled=compiled)
    each = token_bytes(decoder.spec, sum(p.numel() for p in decoder.parameters()), dtype, checkpointing, code)
    activations = logits_bytes(decoder.spec, dtype) + sequences * settings.tokens * each.training
    return Memory(held.weights, held.masters + held.moments, held.gradients, activations).as_json()


def _side(name: str, network: Network, settings: MemorySettings, sequences: int) -> TrainingSide:
    config = settings.trainer.model_copy(update={"max_tokens_per_micro_batch": sequences * settings.tokens})
    if name == "redline":
        return RedlineTraining(network.decoder, getattr(torch, settings.dtype), config)
    if name == "transformers":
        return TransformersTraining(network.as_transformers(), config, rows=sequences)
    raise AssertionError(name)


def _is_out_of_memory(error: Exception) -> bool:
    """Torch has an error of its own for its GPU allocator alone; its others can only be told by their words."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
