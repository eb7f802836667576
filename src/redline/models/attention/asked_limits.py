"""From what a layer of transformers says of its attention, and its mask, to `Limits`, or to where sequences must end."""

from __future__ import annotations

import torch

from redline.errors import ModelError
from redline.models.attention.limits import Limits
from redline.models.attention.routed import AskedLimits, Mask

WINDOW_PROBE = 64
"""Tokens whose view is compared with that of a window, at the beginning and around the window's end."""


def limits_of(asked: AskedLimits, longest: int, device: torch.device) -> tuple[Limits, int]:
    """The limits of a layer, and how long a sequence may be for them to be all there is to its mask. A window that the layer's
    mask does not have, and a chunk, end sequences where they begin."""
    if asked.window is None:
        return Limits(softcap=asked.softcap), min([longest, *(_causal_up_to(mask, longest, device) for mask in asked.masks)])
    if asked.masks and all(_slides(mask, asked.window, longest, device) for mask in asked.masks):
        return Limits(asked.window, asked.softcap), longest
    reaches = (_causal_up_to(mask, longest, device) for mask in asked.masks)
    return Limits(softcap=asked.softcap), min([longest, asked.window, *reaches])


def _slides(mask: Mask, window: int, longest: int, device: torch.device) -> bool:
    """Whether a mask is that of a window: seen from the first tokens, and from some around the window's end and beyond."""
    near = torch.arange(min(longest, WINDOW_PROBE), device=device)
    far = near + max(0, min(window, longest) - WINDOW_PROBE // 2)
    query_Q, zero = torch.cat([near, far[far < longest]])[:, None], torch.zeros((), dtype=torch.long, device=device)
    key_N = torch.arange(int(query_Q.max()) + 1, device=device)
    seen_QN = mask(zero, zero, query_Q, key_N).expand(len(query_Q), len(key_N))
    return torch.equal(seen_QN, (key_N <= query_Q) & (query_Q - key_N < window))


def _causal_up_to(mask: Mask, longest: int, device: torch.device) -> int:
    """How long a sequence may be for the mask to hide the future and nothing else: a window or a chunk ends it."""
    zero, positions = torch.zeros((), dtype=torch.long, device=device), torch.arange(longest, device=device)
    sees_first = mask(zero, zero, positions, zero).expand(longest)
    reach = longest if bool(sees_first.all()) else int(sees_first.int().argmin())
    few = positions[: min(reach, 64)]
    if reach == 0 or not torch.equal(mask(zero, zero, few[:, None], few), few[:, None] >= few):
        raise ModelError("its mask is not causal")
    return reach
