"""What one token costs in a network, and how many operations a step of training has to do.

    operations = 6 · body parameters · tokens + 6 · head parameters · trained tokens
               + 12 · layers · heads · head size · Σ pairs of a query and a key that it sees

Every product is computed forward, and twice more backward, for its input and for its weight; where the weight is frozen, only
for its input. Tokens are those of the sequences themselves, without padding, and the prompt of a group counts once: its
attempts can share it. What is computed a second time to save memory does not count, so that MFU (these operations / seconds /
peak) is about progress, not about being busy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from redline.config.sections.engine import Quantization
from redline.kernels.cpu.quantized import GROUP, WHOLE_BYTES
from redline.models.decoder import Decoder
from redline.models.files.hf import AnyDecoder
from redline.models.sizes.memory import expert_share, idle_parameters, knows_experts
from redline.models.spec import ModelShape


def quantized_bytes(quantization: Quantization) -> float:
    """Bytes of a parameter in fewer bits, its part of a group's scale included."""
    return 1.0 if quantization == "fp8" else WHOLE_BYTES[quantization] + torch.float32.itemsize / GROUP


def window_shares(shape: ModelShape) -> tuple[tuple[int, float], ...]:
    """The windows of a network's layers, each with the share of all layers that have it."""
    return tuple((window, shape.windows.count(window) / shape.num_layers) for window in sorted(set(shape.windows)))


@dataclass(slots=True, frozen=True)
class NetworkCost:
    """What one token costs in a network."""

    body_params: int
    """Parameters of the layers that a token goes through: products for every token."""
    head_params: int
    """Parameters of the language-model head: products only where a token is sampled."""
    bytes_per_param: float
    kv_bytes_per_token: int
    """2 · layers · kv heads · head size · bytes per value."""
    attention_flops: int
    """Per query and key: 4 · layers · heads · head size."""
    frozen_body_params: int = 0
    """Parameters of the body that are not trained, as where an adapter is."""
    frozen_head_params: int = 0
    idle_params: int = 0
    """Parameters of experts that a token does not go to."""
    expert_share: float = 1.0
    """Experts that a token goes to, over all experts of a layer."""
    is_known: bool = True
    """False where it cannot be told how many experts a token goes to: all count, and nothing is bounded by that."""
    windows: tuple[tuple[int, float], ...] = ()
    """Tokens that a token sees in some layers, itself the last, and the share of the layers that is so. Others see all."""
    product_rate: float = 1.0
    """Products by weights that a processor does in the time of one in the compute dtype."""
    quantized_bytes: float = 0.0
    """Bytes of a parameter where weights are multiplied in fewer bits; else 0."""
    quantizes_head: bool = False
    """Whether the head is, too."""

    @classmethod
    def of(cls, decoder: AnyDecoder) -> NetworkCost:
        shape, head = decoder.spec, decoder.output_weight
        embed = decoder.embed if isinstance(decoder, Decoder) else decoder.network.get_input_embeddings().weight
        total = sum(parameter.numel() for parameter in decoder.parameters())
        looked_up = 0 if embed is head else embed.numel()
        around = {id(embed), id(head)}
        frozen = sum(p.numel() for p in decoder.parameters() if not p.requires_grad and id(p) not in around)
        width, idle = shape.num_layers * shape.head_dim, idle_parameters(shape)
        return cls(
            body_params=total - head.numel() - looked_up - idle,
            head_params=head.numel(),
            bytes_per_param=head.element_size(),
            kv_bytes_per_token=2 * width * shape.num_kv_heads * head.element_size(),
            attention_flops=4 * width * shape.num_heads,
            frozen_body_params=frozen,
            frozen_head_params=0 if head.requires_grad else head.numel(),
            idle_params=idle,
            expert_share=expert_share(shape),
            is_known=knows_experts(shape),
            windows=window_shares(shape),
        )

    def quantized(self, quantization: Quantization, dtype: torch.dtype) -> NetworkCost:
        """What the network costs where it samples in fewer bits (`engine.quantization`). A GPU multiplies twice as many numbers
        of 8 bits as of bfloat16. A CPU adds as many products of whole numbers at once as fit the bits of one in float32; how
        many beside one in another type nobody knows, so that they do not count there."""
        if quantization == "none":
            return self
        if quantization == "fp8":
            return replace(self, quantized_bytes=quantized_bytes(quantization), product_rate=2.0)
        rate = torch.float32.itemsize / WHOLE_BYTES[quantization] if dtype is torch.float32 else math.inf
        return replace(self, quantized_bytes=quantized_bytes(quantization), product_rate=rate, quantizes_head=True)

    def product_flops(self, tokens: float, sampled: float) -> float:
        """Operations of the products by weights for so many tokens, after some of which something is sampled: as many as take
        as long in the compute dtype."""
        of_head = self.product_rate if self.quantizes_head else 1.0
        return 2 * (self.body_params * tokens / self.product_rate + self.head_params * sampled / of_head)

    def weight_bytes(self, tokens: float) -> int:
        """Bytes that a step of so many tokens reads: of the experts, those that the tokens go to between them if all are as
        likely, 1 - (1 - share) ^ tokens of them. The embedding is looked up, not read, unless it is the head as well."""
        idle = 1 - self.expert_share
        reached = (idle - idle ** max(1.0, tokens)) / idle if idle else 0.0
        of_body = self.quantized_bytes or self.bytes_per_param
        of_head = of_body if self.quantizes_head else self.bytes_per_param
        return int((self.body_params + reached * self.idle_params) * of_body + self.head_params * of_head)


@dataclass(slots=True, frozen=True)
class TrainLoad:
    """What a trainer is given for one step, and what of it has to be computed."""

    sampled_tokens: int
    """The sum of the sequences' lengths."""
    tokens: int
    """The same with each group's prompt once."""
    trained_tokens: int
    """All but the prompts: only these need the head."""
    pairs: int
    """Pairs of a query and a key that it sees, itself included; a prompt's own once for its group."""
    longest: int = 0
    """Tokens of the longest sequence; 0 where that is not said, and no window counts."""

    @classmethod
    def of(cls, lengths: np.ndarray, prompt_tokens: int, group_size: int) -> TrainLoad:
        """`lengths` are those of whole sequences, int64[S]; the first `prompt_tokens` of each are common to its group."""
        own = lengths - prompt_tokens
        prompts = np.full(len(lengths) // group_size, prompt_tokens)
        return cls.of_families(own, np.full(len(lengths), prompt_tokens), prompts, int(own.sum()))

    @classmethod
    def of_families(cls, own_S: np.ndarray, before_S: np.ndarray, prompt_F: np.ndarray, trained_tokens: int) -> TrainLoad:
        """Sequences of `own_S` tokens that continue `before_S` tokens of a shared prompt, one of `prompt_F` for each family."""
        return cls(
            sampled_tokens=int((own_S + before_S).sum()),
            tokens=int(own_S.sum() + prompt_F.sum()),
            trained_tokens=trained_tokens,
            pairs=int((prompt_F * (prompt_F + 1) // 2).sum() + (own_S * before_S + own_S * (own_S + 1) // 2).sum()),
            longest=int((own_S + before_S).max(initial=0)),
        )

    def seen_pairs(self, windows: tuple[tuple[int, float], ...]) -> int:
        """Pairs in a layer on average, where some layers have windows: at least so many. A token that sees c tokens without
        a window of w sees min(c, w) >= c · w / longest within it."""
        hidden = sum(share * max(0.0, 1 - window / self.longest) for window, share in windows if self.longest)
        return round(self.pairs * (1 - hidden)) if hidden else self.pairs


def training_flops(cost: NetworkCost, load: TrainLoad) -> int:
    """Operations of one step: three times a forward pass, less the gradients of weights that are frozen. 0 where it cannot be
    told how many experts a token goes to."""
    if not cost.is_known:
        return 0
    products = 2 * cost.body_params * load.tokens + 2 * cost.head_params * load.trained_tokens
    frozen = 2 * cost.frozen_body_params * load.tokens + 2 * cost.frozen_head_params * load.trained_tokens
    return 3 * (products + cost.attention_flops * load.seen_pairs(cost.windows)) - frozen
