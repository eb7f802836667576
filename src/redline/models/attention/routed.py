"""The way from transformers' attention layers to an `Attend`.

Each layer of transformers asks a registry for the attention function that its config names. Ours finds the forward under way in
this thread, which counts the layers and hands on their queries, keys and values. No mask is made: `attend` knows who sees whom.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.models.attention.limits import NO_LIMITS, Limits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from redline.models.decoder import Attend

ROUTED, WATCHED = "redline", "redline_watched"
"""Names in the registry. The second has a mask function too, whose masks are empty and only say which layer takes which."""
UNDERSTOOD = {"dropout", "is_causal", "position_ids", "sliding_window", "softcap", "use_cache", "output_attentions"}
"""What a layer may tell its attention function: dropout is off, windows and caps are `Limits`, the rest changes nothing."""
Mask = Callable[..., Tensor]
"""(batch, head, query, key) → whether the query sees the key."""


class Route:
    """One forward on the caller's attention."""

    def __init__(self, attend: Attend, head_dim: int, limits: Sequence[Limits]) -> None:
        """`limits` are those of each layer."""
        self._attend = attend
        self._head_dim = head_dim
        self._limits = limits
        self._layer = 0

    def __call__(self, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scaling: float | None, extras: dict[str, Any]) -> Tensor:
        """[T, H, size of a value]. Smaller heads are padded with zeros, which add nothing to any product."""
        D, value_size = self._head_dim, v_KTD.shape[-1]
        # `attend` divides the scores by the root of the head size it sees; the rest of the scale goes into the queries.
        factor = math.sqrt(D) * (q_HTD.shape[-1] ** -0.5 if scaling is None else scaling)
        q_HTD = q_HTD if math.isclose(factor, 1) else q_HTD * factor
        q_THD, k_TKD, v_TKD = (F.pad(x, (0, D - x.shape[-1])).transpose(0, 1).contiguous() for x in (q_HTD, k_KTD, v_KTD))
        limits = self._limits[self._layer]
        given = () if limits == NO_LIMITS else (limits,)
        out_THD = self._attend(self._layer, q_THD, k_TKD, v_TKD, *given)
        self._layer += 1
        return out_THD[..., :value_size]


@dataclass(slots=True, frozen=True)
class AskedLimits:
    """What one layer said of its limits."""

    window: int | None
    softcap: float | None
    masks: tuple[Mask, ...]
    """The one that it took, if any: families make masks that none of their layers may need."""


@dataclass(slots=True)
class Watch:
    """One forward that only notes what the layers ask of attention; what it computes is of no use."""

    shapes: list[tuple[int, int, int]] = field(default_factory=list)
    """Query heads, key heads and the larger head size of each call."""
    extras: set[str] = field(default_factory=set)
    """What the layers said that is not understood."""
    layers: list[AskedLimits] = field(default_factory=list)
    """What each call said of windows and caps."""
    _offered: list[tuple[Tensor, Mask]] = field(default_factory=list)

    def __call__(self, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scaling: float | None, extras: dict[str, Any]) -> Tensor:
        self.shapes.append((len(q_HTD), len(k_KTD), max(q_HTD.shape[-1], v_KTD.shape[-1])))
        taken = [mask for empty, mask in self._offered if empty is extras["attention_mask"]]
        window = extras.get("sliding_window")
        self.layers.append(AskedLimits(window if (window or 0) > 0 else None, extras.get("softcap"), tuple(taken)))
        understood = UNDERSTOOD | {"attention_mask"} if taken else UNDERSTOOD
        self.extras |= {name for name, value in extras.items() if value is not None} - understood
        return v_KTD.repeat_interleave(len(q_HTD) // len(k_KTD), dim=0).transpose(0, 1)

    def offer(self, mask: Mask) -> Tensor:
        """An empty mask that stands for this one."""
        empty = torch.zeros(1, 1, 1, 1)
        self._offered.append((empty, mask))
        return empty


_layers: ContextVar[Route | Watch] = ContextVar("_layers")
"""The route of the forward under way in this thread: engine and trainer may run one network at the same time."""


@contextmanager
def through(layers: Route | Watch) -> Iterator[None]:
    """Attention goes there inside."""
    token = _layers.set(layers)
    try:
        yield
    finally:
        _layers.reset(token)


def set_attention(network: PreTrainedModel, name: str) -> None:
    """Choose by its name in the registry what the layers call. A network may hold several configs, and copies of them."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for ours in (ROUTED, WATCHED):
        AttentionInterface.register(ours, _attention)
    AttentionMaskInterface.register(WATCHED, _mask)
    for module in network.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = name


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **extras: Any
) -> tuple[Tensor, None]:
    """transformers' form of attention: [1, heads, T, D] → [1, T, heads, D]."""
    scaling = extras.pop("scaling", None)
    out_THD = _layers.get()(query[0], key[0], value[0], scaling, {"attention_mask": attention_mask, **extras})
    return out_THD[None].contiguous(), None


def _mask(mask_function: Mask, **details: Any) -> Tensor:
    layers = _layers.get()
    assert isinstance(layers, Watch), "only a watched forward has masks"
    return layers.offer(mask_function)
