"""Lengths that are drawn for attempts: a tail, the same for the same seed."""

from __future__ import annotations

import numpy as np

from redline.lab.material.forced_lengths import LogNormalLengths


def test_lengths_follow_from_seed_and_group_alone() -> None:
    lengths, again = LogNormalLengths(1024, 8, seed=3), LogNormalLengths(1024, 8, seed=3)
    assert lengths[7].tolist() == again[7].tolist()
    assert lengths[7].tolist() != lengths[8].tolist()
    assert lengths[7].tolist() != LogNormalLengths(1024, 8, seed=4)[7].tolist()


def test_they_have_a_long_tail_up_to_the_longest_and_a_mean_of_an_eighth() -> None:
    lengths = LogNormalLengths(1024, 8, seed=0)
    drawn = np.concatenate([lengths[index] for index in range(500)])
    assert drawn.min() >= 1
    assert drawn.max() == 1024
    assert 110 < drawn.mean() < 135
    assert np.median(drawn) < 0.7 * drawn.mean()
