"""Bytes of a network by kind, from its shapes: what it holds all the time, and what each token adds while it is computed.

    weights      in the compute dtype
    masters      float32, unless the weights are their own   ┐
    gradients    summed in float32                           │ of the parameters that are trained
    moments      Adam's two, in float32 or 8 bits            ┘
    kept         what the backward pass reads of the forward one   ┐ for every token of a micro-batch
    passing      what the layer at work needs                      ┘

Logits are never whole: `trainer/loss/logprobs.py` has a chunk of them at a time, whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from redline.models.layer_code import Checkpointing, LayerCode
from redline.models.lora.per_token import projections
from redline.models.spec import DecoderSpec, ModelShape

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
    return counted_bytes(
        everything,
        trained,
        dtype,
        bytes_per_moments=bytes_per_moments,
        offloaded=offloaded,
        num_shards=num_shards,
        sharded_weights=sharded_weights,
    )


def counted_bytes(
    everything: int,
    trained: int,
    dtype: torch.dtype,
    *,
    bytes_per_moments: float = 2 * FLOAT32,
    offloaded: bool = False,
    num_shards: int = 1,
    sharded_weights: bool = False,
) -> ParameterBytes:
    """`parameter_bytes` of a network that is known only by its number of parameters, and of those that are trained."""
    part = -(-trained // num_shards)
    state = 0 if offloaded else part
    return ParameterBytes(
        weights=dtype.itemsize * (-(-everything // num_shards) if sharded_weights else everything),
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

    def beside(self, other: TokenBytes) -> TokenBytes:
        """The bytes of both."""
        return TokenBytes(self.training + other.training, self.forward + other.forward)


NO_BYTES = TokenBytes(0, 0)


@dataclass(slots=True, frozen=True)
class LayerBytes:
    """What each token takes in one layer."""

    inputs: int
    """The residual stream, and what is to be added to it."""
    kept: int
    """For the backward pass, where nothing is computed again."""
    mlp: int
    """The part of `kept` inside the MLP."""
    activation: int
    """The part of that which is between its products."""
    backward: int
    """Gradients and scratch, while its backward pass is at work."""
    forward: int
    """All of a pass that keeps nothing."""

    def kept_with(self, checkpointing: Checkpointing) -> int:
        return {
            "none": self.kept,
            "light": self.kept - self.activation,
            "selective": self.kept - self.mlp,
            "full": self.inputs,
        }[checkpointing]

    def again(self, checkpointing: Checkpointing) -> int:
        """Made a second time, by the layer whose backward pass is at work."""
        return {"none": 0, "light": self.activation, "selective": self.mlp, "full": self.kept}[checkpointing]

    def through(self, num_layers: int, checkpointing: Checkpointing, around: int) -> TokenBytes:
        """Bytes of all layers, of the one whose backward pass is at work, and of what is `around` them."""
        kept = num_layers * self.kept_with(checkpointing) + self.again(checkpointing)
        return TokenBytes(training=kept + self.backward + around, forward=self.forward + around)


def layer_bytes(
    shape: ModelShape,
    num_parameters: int,
    dtype: torch.dtype,
    code: LayerCode,
    *,
    adapter_columns: int = 0,
    scores: float = 0,
    padded: bool = True,
) -> LayerBytes:
    """E hidden, A = H · D attention, C = K · D keys or values, I intermediate; elements kept per token:

                    fused       kernels     eager
        norms       4 E + 2 f   4 E + 2 f   2 E + 4 E f   residual sums and their norms; eager: also before the gain, and wide
        heads       A + 2 C     A + 2 C     A + 2 C       queries, keys, values after rotation
        attention   A + H f     A + H f     A + H f       its output, and a log-sum-exp per head
        padded      -           -           A             its output in token order too, where it has rectangles
        qk norm     -           A + C       2 (A + C) f   its inputs, where there is one
        MLP         3 I         3 I         4 I           gate, up and their product; eager: silu(gate)
        experts     -           3 I + 2 P   4 I + 2 P     I of all that a token goes to; P: what they are given, or return
        adapters    -           theirs      theirs        `adapter_columns`: what A makes of a token

    f: in float32 whatever the dtype. Compiled is eager but for norms and MLP, which are those of kernels. Where attention is
    `padded` (`attention/padded.py`) and `scores` are written out (on the CPU), heads times keys for each token, they take the
    place of the log-sum-exps and of the output in rows, and queries, keys and values are float32.
    """
    E, A, C = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    (I, passed), H = _mlp_columns(shape, num_parameters, 3 + (code == "eager")), shape.num_heads  # noqa: E741
    has_qk_norm = isinstance(shape, DecoderSpec) and shape.qk_norm
    size = dtype.itemsize
    heads, scratch = A + 2 * C, _attention_scratch(shape, size)
    if code in ("eager", "compiled"):
        is_eager = code == "eager"
        norms = 2 * (2 * FLOAT32 + size) * E if is_eager else size * 4 * E + 2 * FLOAT32
        qk_norm = 2 * FLOAT32 * (A + C) if has_qk_norm else 0
        attention = size * A * padded + (FLOAT32 * (heads + scores) if scores else size * (heads + A) + FLOAT32 * H)
        mlp = size * ((3 + is_eager) * I + passed)
        backward = size * (4 * E + max((3 + 2 * is_eager) * I + passed, 3 * heads)) + 2 * FLOAT32 * scores
    else:
        norms = size * 4 * E + 2 * FLOAT32
        qk_norm = size * (A + C) if has_qk_norm else 0
        attention = size * (heads + A) + FLOAT32 * H
        mlp = size * (3 * I + passed)
        own = I if code == "fused" else 3 * I + passed  # gradients
        backward = size * (4 * E + max(own, A + 2 * heads)) + scratch
    return LayerBytes(
        inputs=size * 2 * E,
        kept=round(norms + attention + qk_norm + mlp + size * adapter_columns),
        mlp=mlp,
        activation=mlp - size * (2 * I + passed),
        backward=round(backward),
        forward=size * (3 * E + max(3 * A + 4 * C, 3 * I + passed)),
    )


def _attention_scratch(shape: ModelShape, size: int) -> int:
    """FlashAttention's backward pass, per token: the queries' gradient in float32, and where several heads share a key, the
    gradients of keys and values for each of them."""
    A = shape.num_heads * shape.head_dim
    return FLOAT32 * A + (2 * size * A if shape.num_heads != shape.num_kv_heads else 0)


def token_bytes(
    shape: ModelShape, num_parameters: int, dtype: torch.dtype, checkpointing: Checkpointing, code: LayerCode = "eager"
) -> TokenBytes:
    """Bytes of all layers, of the one whose backward pass is at work, and of the hidden states around the head."""
    layer = layer_bytes(shape, num_parameters, dtype, code)
    return layer.through(shape.num_layers, checkpointing, around_bytes(shape, dtype, code))


def message_bytes(shape: ModelShape, dtype: torch.dtype, stages: int, stage: int = 0) -> TokenBytes:
    """What a stage of a pipeline holds of a token that it passes on. Of every micro-batch under way, stages - stage of them, it
    has the residual stream that came and the one that went, and of one the gradients of both; without gradients those of one
    micro-batch, and of the one before what is still being sent."""
    if stages == 1:
        return NO_BYTES
    stream = dtype.itemsize * shape.hidden_size
    return TokenBytes(training=2 * (stages - stage + 1) * stream, forward=3 * stream)


def around_bytes(shape: ModelShape, dtype: torch.dtype, code: LayerCode) -> int:
    """The last norm, and the hidden states that predict with their gradient."""
    norm = 2 * FLOAT32 if code == "eager" else dtype.itemsize
    return (norm + 2 * dtype.itemsize) * shape.hidden_size


def num_parameters(spec: DecoderSpec) -> int:
    """Parameters of a `Decoder` of this shape."""
    embeddings = (1 if spec.tied_embeddings else 2) * spec.vocab_size * spec.hidden_size
    return layer_parameters(spec, range(spec.num_layers)) + embeddings + spec.hidden_size


def layer_parameters(spec: DecoderSpec, layers: Iterable[int]) -> int:
    """Parameters of these layers: with experts a layer has many times those of one without."""
    E, A, I = spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size  # noqa: E741
    qkv = sum(spec.qkv_sizes)
    attention = E * qkv + A * E + spec.qkv_bias * qkv + spec.o_bias * E
    norms = 2 * E + spec.qk_norm * 2 * spec.head_dim
    mlp = 3 * E * I + spec.mlp_bias * (2 * I + E)
    experts = [spec.experts_of(layer) for layer in layers]
    sparse = (each.count * E * (1 + 3 * each.intermediate_size) if each else mlp for each in experts)
    return len(experts) * (attention + norms) + sum(sparse)


def idle_parameters(shape: ModelShape) -> int:
    """Parameters of the experts that a token does not go to, in all layers; 0 without experts, and where `knows_experts` is
    False."""
    if not isinstance(shape, DecoderSpec):
        return round(shape.mixture.parameters * (1 - expert_share(shape))) if shape.mixture else 0
    experts = shape.experts
    if experts is None:
        return 0
    idle = (experts.count - experts.per_token) * experts.intermediate_size
    return 3 * shape.hidden_size * idle * len(experts.layers)


def expert_share(shape: ModelShape) -> float:
    """Experts that a token goes to, over all of a layer; 1 without experts, and where `knows_experts` is False."""
    if not isinstance(shape, DecoderSpec):
        return (shape.mixture.share if shape.mixture else None) or 1.0
    return 1.0 if shape.experts is None else shape.experts.per_token / shape.experts.count


def knows_experts(shape: ModelShape) -> bool:
    """Whether it can be told how many of its experts a token goes to, if it has experts."""
    return shape.mixture is None or shape.mixture.share is not None


def inner_columns(spec: DecoderSpec) -> int:
    """Inner columns of all MLPs and experts that a token goes through, in all layers."""
    experts = spec.experts
    sparse = () if experts is None else experts.layers
    of_experts = 0 if experts is None else len(sparse) * experts.per_token * experts.intermediate_size
    return (spec.num_layers - len(sparse)) * spec.intermediate_size + of_experts


def adapter_parameters(spec: DecoderSpec, rank: int, targets: Sequence[str]) -> int:
    """Parameters of a LoRA adapter: A [rank, inputs] and B [outputs, rank] beside every targeted projection."""
    E, A, I = spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size  # noqa: E741
    inputs = {"qkv": E, "o": A, "gate_up": E, "down": I}
    sizes = (
        inputs[layer] + rows
        for layer, members in projections(spec).items()
        for name, rows in members.items()
        if name in targets
    )
    return spec.num_layers * rank * sum(sizes)


def _mlp_columns(shape: ModelShape, num_parameters: int, times: int) -> tuple[int, int]:
    """Inner columns of a token in one layer, which are kept so many `times`, and columns of what its experts are given and
    return; of layers of both kinds, the kind that keeps more. Where only the size of the whole network is known: as if layers
    were all gated MLP beside attention, which overrates a mixture of experts."""
    if isinstance(shape, DecoderSpec):
        plain, experts = (shape.intermediate_size, 0), shape.experts
        if experts is None:
            return plain
        sparse = experts.per_token * experts.intermediate_size, 2 * experts.per_token * shape.hidden_size
        is_mixed = len(experts.layers) < shape.num_layers
        return max(plain, sparse, key=lambda each: times * each[0] + each[1]) if is_mixed else sparse
    attention = 2 * shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    per_layer = (num_parameters - shape.vocab_size * shape.hidden_size) // shape.num_layers
    return max(shape.hidden_size, (per_layer - attention) // (3 * shape.hidden_size)), 0
