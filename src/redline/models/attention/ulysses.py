"""Attention over a packed batch whose tokens are divided among processes (Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

Everything but attention treats tokens one by one, so each process keeps a run of the tokens throughout. Around attention two
exchanges turn "some tokens, all heads" into "all tokens, some heads" and back:

    rank 0   tokens 0..4, heads 0..3 ─┐           ┌─ tokens 0..8, heads 0..1 ─ attend ─┐           ┌─ tokens 0..4, heads 0..3
                                      ├─ exchange ┤                                    ├─ exchange ┤
    rank 1   tokens 5..8, heads 0..3 ─┘           └─ tokens 0..8, heads 2..3 ─ attend ─┘           └─ tokens 5..8, heads 0..3

Tokens need not divide evenly: the exchanges send runs as long as they are.

Letters: N processes, L tokens of this one, J heads of queries, keys and values together that go to one process.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from redline.errors import ConfigError
from redline.models.attention.limits import NO_LIMITS, Limits

if TYPE_CHECKING:
    from redline.models.decoder import Attend


def check_heads(num_heads: int, ranks: int) -> None:
    """Each query head goes to one process. Key and value heads may be copied, so they need not divide."""
    if num_heads % ranks:
        fitting = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ConfigError(
            f"sequence_parallel_size = {ranks}: the model's {num_heads} attention heads cannot be divided so",
            f"set it to one of {fitting}",
        )


class UlyssesAttention:
    """An `Attend` that is given this process's tokens and lets `attend` see all of them."""

    def __init__(self, attend: Attend, lengths_N: list[int], group: dist.ProcessGroup) -> None:
        self._attend = attend
        self._lengths_N = lengths_N
        self._group = group
        self._rank = dist.get_rank(group)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, limits: Limits = NO_LIMITS) -> Tensor:
        N, L = len(self._lengths_N), self._lengths_N[self._rank]
        (_, H, D), K = q_THD.shape, k_TKD.shape[1]
        copies = math.lcm(K, N) // K
        if copies > 1:  # key and value heads that several processes need
            k_TKD, v_TKD = (x_TKD.repeat_interleave(copies, dim=1) for x_TKD in (k_TKD, v_TKD))
        sizes = [H // N, K * copies // N, K * copies // N]
        mine_LNJD = torch.cat([x.reshape(L, N, size, D) for x, size in zip((q_THD, k_TKD, v_TKD), sizes, strict=True)], dim=2)
        all_TJD = self._exchange(mine_LNJD.transpose(0, 1).flatten(0, 1), [L] * N, self._lengths_N)
        q_THD, k_TKD, v_TKD = all_TJD.split(sizes, dim=1)
        attended = self._attend(layer, q_THD, k_TKD, v_TKD, limits)
        rows = self._exchange(attended, self._lengths_N, [L] * N)
        return rows.view(N, L, H // N, D).transpose(0, 1).reshape(L, H, D)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return _Exchange.apply(rows, sent, received, self._group)


class _Exchange(torch.autograd.Function):
    """Rows to and from every process, in the order of the processes. What it does is a permutation over all of them, so its
    gradient is the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits = sent, received, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.splits
        (grad,) = grads
        back = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(back, grad.contiguous(), sent, received, group=group)
        return back, None, None, None
