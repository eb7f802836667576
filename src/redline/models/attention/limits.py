"""What some layers' attention does beside letting a token see everything before it: windows, and caps on scores (Gemma)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, frozen=True)
class Limits:
    """The limits of one layer."""

    window: int | None = None
    """Tokens that a token sees, itself the last; None is all before it."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap); None leaves them."""


NO_LIMITS = Limits()


def hidden_by_window(hidden: Tensor, window: int) -> Tensor:
    """bool[..., keys]: what is hidden once a window hides what is too far back, too. `hidden` hides the future alone, so that
    each query sees keys 0 up to its own position."""
    position = (~hidden).sum(dim=-1, keepdim=True) - 1
    return hidden | (torch.arange(hidden.shape[-1], device=hidden.device) <= position - window)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, softcap: float) -> Tensor:
    """Softmax attention in float32 with a cap on the scores, before the bias hides some: queries [..., Q, D], keys and values
    [..., N, D], a bias that is added to [..., Q, N]."""
    scale = q.shape[-1] ** -0.5
    scores = softcap * torch.tanh(q.float() @ k.float().transpose(-1, -2) * (scale / softcap))
    return (torch.softmax(scores + bias, dim=-1) @ v.float()).to(q.dtype)
