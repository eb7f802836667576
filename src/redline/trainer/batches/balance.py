"""Sequences → micro-batches of even cost, for one rank or several.

    families ─cut─► units ─longest first─► bins ─in rounds, dearest first─► one bin of each round for every rank

A family stays together where it fits. It is cut where the budget demands it, or where ranks would otherwise wait for each
other longer than it takes to compute the prompt twice: finer and finer cuts are planned, and the plan that ends first is
taken. Every rank plans the whole batch and comes to the same result: there is no random choice, ties go to the lower number.

Letters: S sequences, F families (`shared_prompts.py`), U units that stay together, X bins (micro-batches to be), R ranks.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from redline.trainer.batches.cost import CostModel
from redline.trainer.batches.shared_prompts import Families

FINENESS = (0.0, 1.0, 2.0, 4.0, math.inf)
"""How finely to cut, from not at all to single sequences: a family becomes this many parts for each mean bin it fills."""
LITTLE_WAITING = 0.01
"""Finer cuts are not tried where the ranks wait for each other no longer than this part of the time."""
CHEAPEST = 8
"""Bins that are asked for room. The cheapest have the most: where they have none, the others hardly will."""


@dataclass(slots=True, frozen=True)
class Bins:
    """Sequences that go through the network together."""

    bin_S: np.ndarray
    """int64: the bin of each sequence."""
    cost_X: np.ndarray
    """float64, in tokens (`CostModel`)."""
    tokens_X: np.ndarray
    """int64: through the network. A prompt counts once in each bin that has it."""


def fill_bins(families: Families, max_tokens: int, num_ranks: int, cost: CostModel) -> Bins:
    """A multiple of `num_ranks` bins of at most `max_tokens` each; only a single sequence may have more."""
    work = _Work(families, max_tokens, num_ranks, cost)
    plans: list[tuple[float, Bins]] = []
    for fineness in FINENESS:
        bins = work.fill(work.cut(fineness))
        time = _time(bins, num_ranks)
        plans.append((time, bins))
        if time * (1 - LITTLE_WAITING) <= bins.cost_X.sum() / num_ranks:
            break
    return min(plans, key=lambda plan: plan[0])[1]


class _Work:
    """One batch to be divided."""

    def __init__(self, families: Families, max_tokens: int, num_ranks: int, cost: CostModel) -> None:
        self._families = families
        self._max_tokens = max_tokens
        self._num_ranks = num_ranks
        self._own_cost_S = cost.run(families.own_S, families.prompt_S)
        self._prompt_cost_F = cost.run(families.prompt_F, np.zeros_like(families.prompt_F))
        self._whole = self._weigh(families.family_S)

    def cut(self, fineness: float) -> Bins:
        """Families in parts, each a bin of its own."""
        families, size_F, parts_F = self._families, np.bincount(self._families.family_S), self._num_parts(fineness)
        if (parts_F == 1).all():
            return self._whole
        first_F = np.cumsum(size_F) - size_F
        whole_S = (parts_F == 1)[families.family_S]
        unit_S = np.where(whole_S, first_F[families.family_S], np.arange(len(whole_S)))
        for family in np.flatnonzero((parts_F > 1) & (parts_F < size_F)):
            members = slice(first_F[family], first_F[family] + size_F[family])
            room = self._max_tokens - int(families.prompt_F[family])
            parts = longest_first(self._own_cost_S[members], families.own_S[members], int(parts_F[family]), room)
            unit_S[members] = first_F[family] + parts
        return self._weigh(np.unique(unit_S, return_inverse=True)[1])

    def _num_parts(self, fineness: float) -> np.ndarray:
        """int64[F]: several for a family too large for the budget, and as many as `fineness` says."""
        whole, prompt_F = self._whole, self._families.prompt_F
        room_F = np.maximum(self._max_tokens - prompt_F, 1)
        needed_F = np.where(whole.tokens_X > self._max_tokens, np.ceil((whole.tokens_X - prompt_F) / room_F), 1)
        mean = whole.cost_X.sum() / self._fewest_bins(whole)
        wanted_F = np.ceil(whole.cost_X * fineness / mean)
        return np.minimum(np.bincount(self._families.family_S), np.maximum(needed_F, wanted_F)).astype(np.int64)

    def fill(self, units: Bins) -> Bins:
        """The units in few bins, longest first. Where bins had to be opened on the way, they are there from the start the next
        time, so that they fill evenly."""
        num_bins = self._fewest_bins(units)
        while True:
            bin_U = longest_first(units.cost_X, units.tokens_X, num_bins, self._max_tokens)
            opened = int(bin_U.max()) + 1 - num_bins
            if opened <= 0:
                break
            num_bins = self._whole_rounds(num_bins + max(opened, num_bins // 50))
        bins = self._weigh(bin_U[units.bin_S])
        if (idle := num_bins - len(bins.cost_X)) == 0:
            return bins
        return Bins(bins.bin_S, np.append(bins.cost_X, np.zeros(idle)), np.append(bins.tokens_X, np.zeros(idle, np.int64)))

    def _weigh(self, bin_S: np.ndarray) -> Bins:
        """Cost and tokens of bins that hold these sequences. The prompt of a family counts once in each."""
        families, num_bins = self._families, int(bin_S.max()) + 1
        pairs = bin_S * len(families.prompt_F) + families.family_S
        if len(families.prompt_F) < len(bin_S):  # else no two sequences are of one family
            pairs = np.unique(pairs)
        bin_P, family_P = np.divmod(pairs, len(families.prompt_F))
        cost_X = np.bincount(bin_S, self._own_cost_S, num_bins) + np.bincount(bin_P, self._prompt_cost_F[family_P], num_bins)
        tokens_X = np.bincount(bin_S, families.own_S, num_bins) + np.bincount(bin_P, families.prompt_F[family_P], num_bins)
        return Bins(bin_S, cost_X, tokens_X.astype(np.int64))

    def _fewest_bins(self, units: Bins) -> int:
        """No fewer can hold the units."""
        return self._whole_rounds(math.ceil(np.minimum(units.tokens_X, self._max_tokens).sum() / self._max_tokens))

    def _whole_rounds(self, num_bins: int) -> int:
        return -(-num_bins // self._num_ranks) * self._num_ranks


def _time(bins: Bins, num_ranks: int) -> float:
    """In tokens. The ranks run a round of bins together, and each round takes as long as its dearest."""
    return float(np.sort(bins.cost_X)[::-1][::num_ranks].sum())


def longest_first(cost_U: np.ndarray, tokens_U: np.ndarray, num_bins: int, max_tokens: int) -> np.ndarray:
    """int64[U], the bin of each unit: by falling cost, each to the cheapest bin with room for its tokens.

    A unit above the budget has a bin to itself, and what fits nowhere opens another bin. Where the budget does not bind, the
    dearest bin costs at most 4/3 - 1/(3 X) of the best possible (Graham 1969), and at most (1 - 1/X) of a unit above the mean.
    """
    order = np.argsort(-cost_U, kind="stable")
    smallest_left = np.minimum.accumulate(tokens_U[order][::-1])[::-1].tolist()
    cost, tokens = cost_U.tolist(), tokens_U.tolist()
    bins, room = [(0.0, number) for number in range(num_bins)], [max_tokens] * num_bins
    bin_U = np.empty(len(cost), dtype=np.int64)
    for unit, smallest in zip(order.tolist(), smallest_left, strict=True):
        full: list[tuple[float, int]] = []
        while bins and len(full) < CHEAPEST and room[bins[0][1]] < min(tokens[unit], max_tokens):
            full.append(heapq.heappop(bins))
        if not bins or len(full) == CHEAPEST:
            heapq.heappush(bins, (0.0, len(room)))
            room.append(max_tokens)
        load, number = bins[0]
        heapq.heapreplace(bins, (load + cost[unit], number))
        room[number] -= tokens[unit]
        bin_U[unit] = number
        for waiting in full:
            if room[waiting[1]] >= smallest:  # else nothing that is left fits
                heapq.heappush(bins, waiting)
    return bin_U


def deal(cost_X: np.ndarray, num_ranks: int) -> np.ndarray:
    """int64[R, X / R], the bins of each rank in the order to run them. X is a multiple of R.

    The R dearest bins come first and run at the same time, then the next R: ranks that wait for each other wait little, and
    a bin too large for the device shows at once. Within a round the rank with the least so far gets the dearest.
    """
    rounds_NR = np.argsort(-cost_X, kind="stable").reshape(-1, num_ranks)
    bins_RN = np.empty(rounds_NR.T.shape, dtype=np.int64)
    total_R = np.zeros(num_ranks)
    for number, round_R in enumerate(rounds_NR):
        poorest_first = np.argsort(total_R, kind="stable")
        bins_RN[poorest_first, number] = round_R
        total_R[poorest_first] += cost_X[round_R]
    return bins_RN
