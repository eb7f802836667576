"""What the routers of a network do, summed up where they do it: how evenly experts are used, and how sure routers are.

For a layer with X experts and C choices of each token, over the tokens of a step:

    load f_x          pairs of a token and an expert that are expert x's, of all pairs
    router_busiest    max f_x                            1 / X if all experts are used alike
    router_balance    X · Σ f_x · mean probability_x     1 if all are used alike, X if one has everything (Switch, eq. 4)
    router_entropy    mean entropy of a token's probabilities over all experts, in nats

Where the engine has recorded which experts tokens went to:

    routing_mismatch  tokens for which the router chooses another set of experts, of those with a record

Each is a mean over the layers that have experts. A layer that is computed again in the backward pass notes its tokens twice, as
all layers then do, and that changes none of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.types import UNKNOWN_EXPERT

NAMES = ("router_busiest", "router_balance", "router_entropy", "routing_mismatch")
"""In the order of `summary`."""


class RoutingNotes:
    """The sums of one layer, float64[2 · X + 4]: pairs of each expert, its probabilities, entropies, tokens, and of the tokens
    with a record those that differ, and all."""

    def __init__(self, num_experts: int, device: torch.device, *, replays: bool = False) -> None:
        """With `replays`, tokens go where they went when they were sampled."""
        self.sums = torch.zeros(self.width(num_experts), dtype=torch.float64, device=device)
        self._replays = replays

    @staticmethod
    def width(num_experts: int) -> int:
        """How many sums there are."""
        return 2 * num_experts + 4

    @torch.no_grad()
    def add(self, probability_TX: Tensor, experts_TC: Tensor) -> None:
        """Note the tokens of one pass. Does not wait for the device."""
        T, X = probability_TX.shape
        # Whole numbers add up to the same whatever their order.
        load_X = torch.zeros(X, dtype=torch.float64, device=self.sums.device)
        load_X.scatter_add_(0, experts_TC.flatten(), torch.ones_like(experts_TC.flatten(), dtype=torch.float64))
        entropy = -torch.special.xlogy(probability_TX, probability_TX).sum(dtype=torch.float64)
        mass_X = probability_TX.sum(dim=0, dtype=torch.float64)
        self.sums[: 2 * X + 2] += torch.cat([load_X, mass_X, torch.stack([entropy, torch.full_like(entropy, T)])])

    def compare(self, experts_TC: Tensor, sampled_TC: Tensor) -> Tensor:
        """Note how many tokens the router would send elsewhere than they went when they were sampled, in passes with gradients.
        Returns where they are to go."""
        known_T = sampled_TC[:, 0] != UNKNOWN_EXPERT
        sampled_TC = sampled_TC.to(experts_TC.dtype)
        if torch.is_grad_enabled():
            differs_T = (experts_TC.sort(dim=1).values != sampled_TC.sort(dim=1).values).any(dim=1)
            self.sums[-2:] += torch.stack([(differs_T & known_T).sum(), known_T.sum()])
        return torch.where(known_T[:, None], sampled_TC, experts_TC) if self._replays else experts_TC


def summary(sums_LZ: Tensor) -> Tensor:
    """float64[4]: `NAMES`, from the sums of all layers, one below the other. NaN where no token was noted."""
    X = (sums_LZ.shape[1] - 4) // 2
    load_LX, mass_LX, around_L4 = sums_LZ.split([X, X, 4], dim=1)
    entropy_L, tokens_L, differing_L, known_L = around_L4.unbind(dim=1)
    share_LX = load_LX / load_LX.sum(dim=1, keepdim=True)
    balance_L = X * (share_LX * mass_LX / tokens_L[:, None]).sum(dim=1)
    mismatch_L = differing_L / known_L
    return torch.stack([share_LX.amax(dim=1).mean(), balance_L.mean(), (entropy_L / tokens_L).mean(), mismatch_L.mean()])
