"""Bytes on one device: what a run holds from its first step to its last, and what each token takes on the way.

`models/sizes/memory.py` has what each term is made of, and the trainer plans its micro-batches with it.
"""

from __future__ import annotations

import torch

from redline.kernels.cpu import logprobs
from redline.lab.plan.setup import Setup
from redline.models.sizes.flops import quantized_bytes
from redline.models.sizes.memory import (
    FLOAT32,
    LayerBytes,
    ParameterBytes,
    TokenBytes,
    around_bytes,
    counted_bytes,
    layer_bytes,
    message_bytes,
)
from redline.trainer.loss.logprobs import KEPT_BYTES, chunk_rows
from redline.trainer.optimizer.quantized_states import bytes_per_moments

FEWER_BITS = "engine weights in fewer bits"


def policy_bytes(setup: Setup) -> ParameterBytes:
    """The trainer's parameters, on one device: the fullest, where stages divide the layers. With FSDP the parts are float32
    masters, and whole weights exist beside them."""
    trainer = setup.config.trainer
    return counted_bytes(
        setup.own_parameters + setup.own_adapter,
        setup.own_trained,
        setup.dtype,
        bytes_per_moments=bytes_per_moments(trainer.optimizer_states),
        offloaded=trainer.offload_optimizer and setup.device.is_gpu,
        num_shards=setup.shards,
        sharded_weights=setup.sharding == "full",
    )


def held_terms(setup: Setup) -> dict[str, int]:
    """On one device from the first step to the last, the KV cache apart."""
    own, config, size = policy_bytes(setup), setup.config, setup.dtype.itemsize
    terms = {"weights": own.weights, "masters": own.masters, "moments": own.moments}
    if not setup.engine_shares_weights:
        terms["engine weights"] = size * setup.model.parameters // setup.tensor_parallel_size
    if config.engine.quantization != "none":
        terms[FEWER_BITS] = int(quantized_bytes(config.engine.quantization) * _quantized_parameters(setup))
    if config.needs_reference and not config.trainer.lora.rank and not config.trainer.reference_offload:
        terms["reference"] = -(-size * setup.own_parameters // setup.shards)  # divided as the policy is
    if config.needs_critic:
        critic = critic_bytes(setup)
        terms["critic"] = critic.weights + critic.masters + critic.moments
    if setup.reward_parameters:
        terms["reward model"] = size * setup.reward_parameters
    if not setup.device.is_gpu:
        terms["gradients"] = own.gradients  # kept from step to step (trainer/optimizer/adamw.py)
    return {name: value for name, value in terms.items() if value}


def critic_bytes(setup: Setup) -> ParameterBytes:
    """A copy of the policy without its head, or a second adapter beside the same frozen weights."""
    trainer, model = setup.config.trainer, setup.model
    kept = model.parameters - (0 if model.tied else model.head_parameters)
    count = setup.adapter or kept
    moments = bytes_per_moments(trainer.optimizer_states)
    offloaded = trainer.offload_optimizer and setup.device.is_gpu
    return counted_bytes(count, count, setup.dtype, bytes_per_moments=moments, offloaded=offloaded)


# ── what tokens take ───────────────────────────────────────────────────────────────────────────────────────────────────


def layer(setup: Setup, tokens: int) -> LayerBytes:
    """Bytes of a token in a micro-batch of `tokens`."""
    lora = setup.config.trainer.lora
    return layer_bytes(
        setup.model.shape,
        setup.model.parameters,
        setup.dtype,
        setup.layer_code,
        adapter_columns=lora.rank * len(lora.targets) if lora.rank else 0,
        scores=setup.scores_per_token(tokens),
        padded=setup.pads_attention,
    )


def per_token(setup: Setup, tokens: int) -> TokenBytes:
    """What each of so many tokens adds to a micro-batch, as the trainer counts it: a stage has fewer layers, and keeps as many
    more micro-batches."""
    around = around_bytes(setup.model.shape, setup.dtype, setup.layer_code)
    messages = message_bytes(setup.model.shape, setup.dtype, setup.stages)
    return messages.beside(layer(setup, tokens).through(setup.model.shape.num_layers, setup.checkpointing, around))


def kept_logits(setup: Setup, predicted: int) -> tuple[int, int]:
    """Logits that stay for the backward pass, and the most that are there beside them, chunk by chunk as
    `trainer/loss/logprobs.py` makes them."""
    kind, vocabulary = setup.kind, setup.model.shape.vocab_size
    rows = chunk_rows(predicted, vocabulary, setup.dtype, kind, KEPT_BYTES[kind])
    chunks = [rows] * (predicted // rows) + ([predicted % rows] if predicted % rows else [])
    room, kept, passing = KEPT_BYTES[kind], 0, 0
    in_c = logprobs.serves(torch.device("cpu"), setup.dtype)
    for chunk in chunks:
        size = chunk * vocabulary * setup.dtype.itemsize
        room -= size
        kept += size if room >= 0 else 0
        # Without its C, a CPU also has a float32 copy, which becomes the log-probabilities, and the probabilities.
        copies = 0 if setup.device.is_gpu or in_c else 2 * chunk * vocabulary * FLOAT32
        passing = max(passing, (0 if room >= 0 else size) + copies)
    return kept, passing


def _quantized_parameters(setup: Setup) -> int:
    """Those that `engine.quantization` has copies of: on a CPU the head as well; never an embedding that is only looked up."""
    model, heads = setup.model, 1 if setup.model.tied else 2  # an embedding has as many parameters as the head
    kept = heads if setup.config.engine.quantization == "fp8" else heads - 1
    return model.parameters - kept * model.head_parameters
