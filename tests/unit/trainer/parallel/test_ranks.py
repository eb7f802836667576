"""What rank 0 does once the store of the ranks is gone, as where their launcher was killed."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from redline.errors import RankLostError
from redline.trainer.parallel.orders import Orders
from redline.trainer.parallel.pulse import Pulse
from redline.trainer.parallel.ranks import Ranks


class GoneStore(dist.Store):
    """Its other side is gone."""

    def _fail(self, *arguments: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer\nC++ CapturedTraceback: …")

    add = check = get = set = delete_key = _fail  # type: ignore[assignment]


@pytest.fixture
def rank_0() -> Ranks:
    ranks, store = Ranks.__new__(Ranks), GoneStore()
    ranks.rank, ranks.world, ranks.store, ranks.over = 0, 2, store, threading.Event()  # type: ignore[assignment]
    ranks.pulse = Pulse(store, 0, 2)
    ranks.orders = Orders(store, ranks.pulse, 2)
    ranks._dismissed = False
    return ranks


def test_an_error_of_what_ranks_do_together_becomes_the_loss_of_the_store(rank_0: Ranks) -> None:
    with (
        pytest.raises(
            RankLostError, match="the store of the ranks, beside rank 0, does not answer any more: Connection reset by"
        ),
        rank_0.naming_who_is_lost(),
    ):
        raise RuntimeError("Connection closed by peer")


def test_the_end_of_the_run_raises_nothing_of_its_own(rank_0: Ranks) -> None:
    rank_0.dismiss()
    rank_0.wait_until_left()
    rank_0.closes()
    rank_0.closed()
    assert rank_0.over.is_set()
