"""How the steps of a stream are put together: what is refused, and what room they have meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from swarm_protocol.errors import PeerBusy, RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import Assembler, encode
from swarm_protocol.wire.constants import MAX_RESENT, MAX_RESENT_STEPS, MIB
from swarm_server.net.arrivals import Arrivals, ByteReservation
from swarm_server.net.incoming import Incoming
from swarm_server.sessions.reading import StepReader, read_resent
from tests.unit.support import run

HEADER, PARTS = encode(torch.randn(5, MIB // 4))
SMALL, _ = encode(torch.ones(3))


class FakeSession:
    """Stands for a hosted session: remembers what it was given, and what was refused."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.refused: list[tuple[int, Exception]] = []

    def require_number(self, number: int) -> None:
        if number > 100:
            raise RequestRejected("far ahead")

    def start(self, step: pb.Step) -> Assembler:
        return Assembler(step.hidden)

    def heard(self) -> None:
        pass

    async def step(self, step: pb.Step, _payload: torch.Tensor, on_done: Callable[[], None]) -> bool:
        self.taken.append(step.number)
        self.on_done = on_done
        return True

    async def refuse(self, number: int, error: Exception) -> None:
        self.refused.append((number, error))


async def test_a_step_counts_while_it_arrives() -> None:
    session, arrivals = FakeSession(), Arrivals()
    with StepReader(session, arrivals) as reader:
        await reader.start(pb.Step(number=1, hidden=HEADER))
        for number, part in enumerate(PARTS, start=1):
            assert reader.is_reading and arrivals.used_bytes == number * MIB
            await reader.more(part)
        assert not reader.is_reading and arrivals.used_bytes == (1 + len(PARTS)) * MIB
        session.on_done()  # it is computed
        assert arrivals.used_bytes == 0
        await reader.start(pb.Step(number=2, hidden=HEADER))
    assert arrivals.used_bytes == 0  # the stream has ended
    assert session.taken == [1] and session.refused == []


@pytest.mark.parametrize("room_bytes", [MIB // 2, 2 * MIB], ids=["at-once", "in-the-middle"])
async def test_a_step_for_which_there_is_no_room_is_refused_and_the_next_is_not(room_bytes: int) -> None:
    session, arrivals = FakeSession(), Arrivals(room_bytes)
    with StepReader(session, arrivals) as reader:
        await reader.start(pb.Step(number=1, hidden=HEADER))
        for part in PARTS:
            await reader.more(part)
        assert arrivals.used_bytes == 0
        await reader.start(pb.Step(number=2, hidden=SMALL))
    ((number, error),) = session.refused
    assert number == 1 and isinstance(error, PeerBusy)
    assert session.taken == [2]


def test_a_number_that_cannot_be_ends_the_stream() -> None:
    """Its client has no such step: nobody is told that it failed."""
    session = FakeSession()
    with pytest.raises(RequestRejected, match="far ahead"):
        run(StepReader(session, Arrivals()).start(pb.Step(number=2**64 - 1, hidden=SMALL)))
    assert session.taken == [] and session.refused == []


def resent(arrivals: Arrivals, *messages: pb.RerouteRequest) -> list[pb.Step]:
    async def more() -> AsyncIterator[pb.RerouteRequest]:
        for message in messages[1:]:
            await asyncio.sleep(0)
            yield message

    async def read() -> list[pb.Step]:
        with ByteReservation(arrivals) as reservation:
            return await read_resent(Incoming(more(), arrivals), messages[0], reservation)

    return run(read())


def test_steps_to_be_resent_come_in_several_messages() -> None:
    messages = [pb.RerouteRequest(resend=[pb.Step(number=n), pb.Step(number=n + 1)]) for n in range(0, 10, 2)]
    assert [step.number for step in resent(Arrivals(), pb.RerouteRequest(), *messages)] == list(range(10))


def test_too_many_are_refused() -> None:
    full = pb.RerouteRequest(resend=[pb.Step()] * MAX_RESENT)
    assert len(resent(Arrivals(), *[full] * (MAX_RESENT_STEPS // MAX_RESENT))) == MAX_RESENT_STEPS
    with pytest.raises(RequestRejected, match=f"more than {MAX_RESENT_STEPS} steps"):
        resent(Arrivals(), *[full] * (MAX_RESENT_STEPS // MAX_RESENT + 1))
    with pytest.raises(RequestRejected, match="65 steps are in one message: expected at most 64"):
        resent(Arrivals(), pb.RerouteRequest(resend=[pb.Step()] * 65))
    arrivals = Arrivals(MIB)
    with pytest.raises(PeerBusy):
        resent(arrivals, *[full] * 16)
    assert arrivals.used_bytes == 0
