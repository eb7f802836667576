"""Bytes of a network by kind, from its shapes: what it holds all the time, and what each token adds while it is computed.

    weights      in the compute dtype
    masters      float32, unless the weights are their own   ┐
    gradients    summed in float32                           │ of the parameters that are trained
    moments      Adam's two, in float32 or 8 bits            ┘
    kept         what the backward pass reads of the forward one   ┐ for every token of a micro-batch
    passing      what the layer at work needs                      ┘

Logits are never whole: `trainer/logprobs.py` has a chunk of them at a time, whatever the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from redline.models.spec import DecoderSpec, ModelShape

Checkpointing = Literal["none", "selective", "full"]
"""What the backward pass computes again. `selective`: the MLPs, `full`: all layers, from their inputs."""
FLOAT32 = 4


@dataclass(slots=True, frozen=True)
class ParameterBytes:
    """What a network and its optimizer hold on the device, micro-batch or not."""

    weights: int
    masters: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        return self.weights + self.masters + self.gradients + self.moments


def parameter_bytes(
    network: nn.Module,
    dtype: torch.dtype,
    *,
    bytes_per_moments: float = 2 * FLOAT32,
    offloaded: bool = False,
    num_shards: int = 1,
    sharded_weights: bool = False,
) -> ParameterBytes:
    """For a network that computes in `dtype`.

    `bytes_per_moments` is that of both moments of a parameter; `offloaded` masters and moments are in host memory. Of what
    `num_shards` processes divide among them, each holds its part: of the weights only where they are sharded as well.
    """
    everything = sum(parameter.numel() for parameter in network.parameters())
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    part = -(-trained // num_shards)
    state = 0 if offloaded else part
    return ParameterBytes(
        weights=dtype.itemsize * (everything - trained + part if sharded_weights else everything),
        masters=0 if dtype == torch.float32 else FLOAT32 * state,
        gradients=FLOAT32 * part,
        moments=round(bytes_per_moments * state),
    )


@dataclass(slots=True, frozen=True)
class TokenBytes:
    """What each token of a micro-batch adds."""

    training: int
    """Forward and backward pass."""
    forward: int
    """Without gradients."""


def token_bytes(shape: ModelShape, num_parameters: int, dtype: torch.dtype, checkpointing: Checkpointing) -> TokenBytes:
    """E hidden, A = H · D attention, C = K · D keys or values, I intermediate; elements per token and layer:

        norms       4 E              both inputs and both outputs
        attention   3 A + 2 C        queries, keys, values and outputs as the kernel has them, and the output in token order
        qk norm     A + C            its inputs, where there is one
        MLP         4 I              gate and up, silu(gate), their product

    A backward pass goes through one layer at a time, which then has as much again in gradients.
    """
    E, A, C = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    I = _intermediate_size(shape, num_parameters)  # noqa: E741
    has_qk_norm = isinstance(shape, DecoderSpec) and shape.qk_norm
    mlp = E + 4 * I
    layer = 3 * E + 3 * A + 2 * C + (A + C if has_qk_norm else 0) + mlp
    kept_per_layer = {"none": layer, "selective": layer - mlp, "full": 2 * E}[checkpointing]
    again = 0 if checkpointing == "none" else layer
    around = 3 * E  # the last norm, and the hidden states that predict
    passing = 3 * E + max(3 * A + 4 * C, 3 * I)
    return TokenBytes(
        training=dtype.itemsize * (shape.num_layers * kept_per_layer + again + passing + around),
        forward=dtype.itemsize * (passing + around),
    )


def num_parameters(spec: DecoderSpec) -> int:
    """Of a `Decoder` of this shape."""
    E, A, I = spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size  # noqa: E741
    qkv = sum(spec.qkv_sizes)
    matrices = E * qkv + A * E + 3 * E * I
    biases = spec.qkv_bias * qkv + spec.o_bias * E + spec.mlp_bias * (2 * I + E)
    norms = 2 * E + spec.qk_norm * 2 * spec.head_dim
    embeddings = (1 if spec.tied_embeddings else 2) * spec.vocab_size * E
    return spec.num_layers * (matrices + biases + norms) + embeddings + E


def _intermediate_size(shape: ModelShape, num_parameters: int) -> int:
    """Of the MLP. Where only the size of the whole network is known: as if layers were all gated MLP beside attention, which
    overrates a mixture of experts."""
    if isinstance(shape, DecoderSpec):
        return shape.intermediate_size
    attention = 2 * shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    per_layer = (num_parameters - shape.vocab_size * shape.hidden_size) // shape.num_layers
    return max(shape.hidden_size, (per_layer - attention) // (3 * shape.hidden_size))
