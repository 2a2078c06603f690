"""The room of a stage peer is shared by trainers."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from swarm_protocol.errors import PeerBusy
from swarm_training.stages.rpc.room import RequestRoom, StageLimits


def test_the_bytes_of_all_trainers_together_are_limited_and_those_of_each_to_half() -> None:
    room = RequestRoom(StageLimits(max_bytes=800))
    with ExitStack() as requests:
        anna, bert, carl = (requests.enter_context(room.request(name)) for name in ("anna", "bert", "carl"))
        anna.take(400)
        with pytest.raises(
            PeerBusy, match=r"no room for 1 bytes more of requests: 400 of 800 bytes .*, 400 of them by"
        ):
            anna.take(1)
        bert.take(300)
        with pytest.raises(
            PeerBusy, match=r"no room for 101 bytes more of requests: 700 of 800 bytes .*, 0 of them by"
        ):
            carl.take(101)
        carl.take(100)
        assert (room.requests.used, room.bytes.used) == (3, 800)
    assert (room.requests.used, room.bytes.used) == (0, 0)
