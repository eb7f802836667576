"""What becomes of an attempt's turns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.fakes import completion
from support.played_groups import turn

from redline.rollouts.episodes.sequences import SequenceUnderWay
from redline.types import UNKNOWN_EXPERT

FIRST, ANSWER = np.array([1, 2, 3], np.int32), [7, 8]
NEXT = np.array([1, 2, 3, 7, 8, 4], np.int32)


def routing(length: int, expert: int) -> np.ndarray:
    """All tokens but the last went there."""
    found = np.full((length, 2), expert, np.uint8)
    found[-1] = UNKNOWN_EXPERT
    return found


def two_turns(first: np.ndarray | None, second: np.ndarray | None) -> SequenceUnderWay:
    sequence = SequenceUnderWay("")
    sequence.take(FIRST, replace(completion(ANSWER), routing=first), turn(3, 5))
    assert sequence.goes_on_with(NEXT)
    sequence.take(NEXT, replace(completion([9]), routing=second), turn(6, 7))
    return sequence


def test_experts_of_a_token_are_those_of_the_turn_that_first_computed_it() -> None:
    """The reply's last token passes through the network with the next turn; what came before may do so again, otherwise."""
    trajectory = two_turns(routing(5, 1), routing(7, 2)).trajectory(0, 0, 0.0)
    assert trajectory.routing is not None
    assert trajectory.routing[:, 0].tolist() == [1, 1, 1, 1, 2, 2, UNKNOWN_EXPERT]
    assert len(trajectory.routing) == len(trajectory.token_ids)


def test_a_sequence_of_which_a_turn_has_no_record_has_none() -> None:
    assert two_turns(None, routing(7, 2)).trajectory(0, 0, 0.0).routing is None
