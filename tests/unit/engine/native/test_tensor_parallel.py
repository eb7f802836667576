"""How the ranks of an engine over several processes find each other."""

from __future__ import annotations

import socket

import pytest

from redline.engine.native.tensor_parallel import join_meeting, new_meeting


def test_two_engines_that_start_at_once_meet_at_ports_of_their_own() -> None:
    """Each port is held from the moment at which it is chosen: a port that was only free then may be another engine's."""
    meetings = [new_meeting() for _ in range(2)]
    assert meetings[0].port != meetings[1].port
    for number, meeting in enumerate(meetings):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", meeting.port))
        meeting.set("which", str(number))
        assert join_meeting(meeting.port).get("which") == str(number).encode()
