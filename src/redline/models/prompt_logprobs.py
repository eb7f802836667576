"""What a network makes of a prompt, in one pass and without a cache: by this two copies of its weights are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from redline.kernels.segments import Segments
from redline.models.attention.flash import packed_attention
from redline.models.files.hf import AnyDecoder


@torch.no_grad()
def prompt_logprobs(decoder: AnyDecoder, tokens: Sequence[int]) -> list[float]:
    """The logprob of each token after the first. Blocks until the device has computed them."""
    device = decoder.output_weight.device
    tokens_T = torch.tensor(tokens, dtype=torch.int64, device=device)
    positions_T = torch.arange(len(tokens), device=device)
    hidden_TE = decoder(tokens_T, positions_T, packed_attention(Segments.independent([len(tokens)]), device))
    logprobs_TV = decoder.logits(hidden_TE[:-1]).float().log_softmax(dim=-1)
    found: list[float] = logprobs_TV.gather(1, tokens_T[1:, None]).squeeze(1).tolist()
    return found
