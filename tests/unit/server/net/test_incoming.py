"""Messages of a stream: while a large one is worked at, the next one arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_server.net.arrivals import Arrivals
from swarm_server.net.incoming import Incoming
from tests.unit.support import until

LARGE = pb.SessionRequest(more=bytes(64 * 1024))
SMALL = pb.SessionRequest(more=b"token")


class Stream:
    """Counts how many messages somebody has asked for."""

    def __init__(self, *messages: pb.SessionRequest, fails: bool = False) -> None:
        self._messages = messages
        self._fails = fails
        self.num_asked = 0

    async def __aiter__(self) -> AsyncIterator[pb.SessionRequest]:
        for message in self._messages:
            self.num_asked += 1
            yield message
        self.num_asked += 1
        if self._fails:
            raise OSError("broken")


def incoming(stream: Stream, reads_ahead: bool = True) -> Incoming:
    return Incoming(aiter(stream), Arrivals(1 << 20, 20.0, 1000.0), reads_ahead)


@pytest.mark.parametrize(
    ("message", "reads_ahead", "num_asked"), [(LARGE, True, 2), (SMALL, True, 1), (LARGE, False, 1)]
)
async def test_after_a_large_message_one_more_is_asked_for(
    message: pb.SessionRequest, reads_ahead: bool, num_asked: int
) -> None:
    stream = Stream(message, SMALL, SMALL)
    messages = incoming(stream, reads_ahead)
    assert await messages.next() is message
    await until(lambda: stream.num_asked == num_asked)
    for _ in range(20):
        await asyncio.sleep(0)
    assert stream.num_asked == num_asked
    assert [await messages.next(), await messages.begin(5.0), await messages.next()] == [SMALL, SMALL, None]


async def test_an_error_comes_when_it_is_its_turn() -> None:
    messages = incoming(Stream(LARGE, fails=True))
    assert await messages.next() is LARGE
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="broken"):
        await messages.next()


@pytest.mark.parametrize("fails", [True, False])
async def test_a_stream_that_is_closed_is_not_read_any_more(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    messages = incoming(Stream(LARGE, fails=fails))
    await messages.next()
    await messages.aclose()
    await messages.aclose()
    await asyncio.sleep(0.01)
    assert caplog.text == ""


async def one_then_none() -> AsyncIterator[pb.SessionRequest]:
    yield LARGE
    await asyncio.Event().wait()


async def test_a_stream_that_is_read_ahead_may_be_closed_as_soon_as_nobody_reads_it() -> None:
    stream = one_then_none()
    messages = Incoming(stream, Arrivals(1 << 20, 20.0, 1000.0), reads_ahead=True)
    await messages.next()
    await asyncio.sleep(0)
    await messages.aclose()
    await stream.aclose()
