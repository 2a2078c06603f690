"""Over gRPC: both sides know who the other is, and nobody speaks for somebody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
import torch

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import Grant, Role
from swarm_protocol.errors import AccessDenied, PeerBusy, PeerUnavailable, RequestRejected
from swarm_protocol.net.tls import ClientCredentials
from swarm_training.averaging.group import Group, GroupMember
from swarm_training.averaging.round import AveragingRound, VectorCoding
from swarm_training.compression.codecs import codec_of
from swarm_training.core.config import TrainingConfig
from swarm_training.core.network import MessageStream
from swarm_training.core.record import Progress
from swarm_training.core.signing import sign
from swarm_training.ledger.book import MAX_REPLY_BYTES
from swarm_training.net.channels import GrpcNetwork
from swarm_training.net.membership import serve
from swarm_training.net.service import TrainingService
from swarm_training.pb import training_pb2 as pb
from tests.marks import IN_VIRTUAL_TIME
from tests.worlds.identities import identity
from tests.worlds.runs import SimulatedPeer, World


@dataclass
class Echo:
    """Answers with the caller's peer id."""

    callers: list[str] = field(default_factory=list)

    async def exchange(self, peer_id: str, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        self.callers.append(peer_id)
        return pb.ExchangeReply(until=request.since + 1)

    async def meet(self, peer_id: str, stream: MessageStream[pb.MeetReply, pb.MeetRequest]) -> None:
        while (request := await stream.receive()) is not None:
            await stream.send(pb.MeetReply(dismissal=pb.Dismissal(reason=f"{peer_id} {request.join.step}")))

    async def reduce(self, peer_id: str, stream: MessageStream[pb.Chunk, pb.ReduceRequest]) -> None:
        raise RequestRejected("the caller is no member of the group")

    async def fetch(self, peer_id: str, request: pb.FetchRequest) -> AsyncIterator[pb.Chunk]:
        for index in request.chunks:
            yield pb.Chunk(index=index, data=b"x" * 1000)

    async def state(self, peer_id: str, request: pb.StateRequest) -> AsyncIterator[pb.StatePart]:
        yield pb.StatePart(data=b"1")
        raise PeerUnavailable("the run has gone on")

    async def rounds(self, peer_id: str, request: pb.RoundsRequest) -> pb.RoundsReply:
        self.callers.append(peer_id)
        return pb.RoundsReply(rounds=[b"x" * (MAX_REPLY_BYTES // 8)] * 8, has_more=True)


@asynccontextmanager
async def service(handlers: Any, access: AccessControl | None = None) -> AsyncIterator[Progress]:
    add_to = TrainingService(handlers, access).add_to
    async with AsyncExitStack() as resources:
        address, fingerprint = await serve(add_to, TrainingConfig(), "127.0.0.1", resources)
        yield Progress("toy", identity(0).peer_id, address=address, tls_fingerprint=fingerprint)


@asynccontextmanager
async def network_of(
    access: AccessControl | None = None, token: bytes = b""
) -> AsyncIterator[tuple[GrpcNetwork, Progress, Echo]]:
    echo = Echo()
    network = GrpcNetwork(ClientCredentials(identity(1), token))
    async with service(echo, access) as peer:
        try:
            yield network, peer, echo
        finally:
            await network.close()


async def test_the_called_peer_knows_the_caller() -> None:
    async with network_of() as (network, peer, echo):
        assert (await network.exchange(peer, pb.ExchangeRequest(since=4))).until == 5
        assert echo.callers == [identity(1).peer_id]
        async with network.meet(peer) as stream:
            for step in (1, 2):
                await stream.send(pb.MeetRequest(join=pb.Join(step=step)))
                assert (await stream.receive()).dismissal.reason == f"{identity(1).peer_id} {step}"
            await stream.finish()
            assert await stream.receive() is None
        chunks = [chunk.index async for chunk in network.fetch(peer, pb.FetchRequest(chunks=[3, 1]))]
        assert chunks == [3, 1]


async def test_every_member_may_ask_for_rounds_and_nobody_else() -> None:
    organiser, now = OrganiserKey.generate(), time.time()
    grant = Grant.new(organiser.public, Role.CLIENT, "ada", identity(1).peer_id, now - 10, now + 1000)
    async with network_of(AccessControl(organiser.public), grant.signed(organiser)) as (network, peer, echo):
        reply = await network.rounds(peer, pb.RoundsRequest(since_step=1))
        assert reply.has_more and sum(map(len, reply.rounds)) == MAX_REPLY_BYTES
        with pytest.raises(AccessDenied, match="is for the role client: expected trainer"):
            await network.exchange(peer, pb.ExchangeRequest())
        assert echo.callers == [identity(1).peer_id]
    async with network_of(AccessControl(organiser.public)) as (network, peer, echo):
        with pytest.raises(AccessDenied, match="takes only members"):
            await network.rounds(peer, pb.RoundsRequest())
        assert not echo.callers


async def test_bytes_that_are_no_message_are_refused_in_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    async with network_of() as (network, peer, echo):
        channel = await network.channel(peer)
        for method, message in (("Exchange", "ExchangeRequest"), ("Meet", "MeetRequest"), ("Fetch", "FetchRequest")):
            call = channel.stream_stream(f"/swarm.training.v1.Training/{method}")()
            await call.write(b"\xff\xff\n")
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await call.details() == f"the bytes sent are no message: expected a {message}"
        assert not echo.callers
    assert "Traceback" not in caplog.text


async def test_errors_travel() -> None:
    async with network_of() as (network, peer, _echo):
        async with network.reduce(peer) as stream:
            with pytest.raises(RequestRejected, match="no member of the group"):
                await stream.receive()
        with pytest.raises(PeerUnavailable, match="gone on"):
            [part async for part in network.state(peer, pb.StateRequest())]


async def test_errors_travel_to_who_is_sending() -> None:
    async with network_of() as (network, peer, _echo):
        for _ in range(10):
            async with network.reduce(peer) as stream:
                with pytest.raises(RequestRejected, match="no member of the group"):
                    for index in range(100):
                        await stream.send(pb.ReduceRequest(chunk=pb.Chunk(index=index, data=bytes(1 << 20))))
                    await stream.receive()


async def test_a_peer_with_another_certificate_is_not_talked_to() -> None:
    async with network_of() as (network, peer, echo):
        with pytest.raises(PeerUnavailable, match="another TLS certificate"):
            await network.exchange(replace(peer, tls_fingerprint=b"\0" * 32), pb.ExchangeRequest())
        assert echo.callers == []


async def test_a_process_that_has_ended_is_told_from_one_that_is_silent() -> None:
    async with network_of() as (network, peer, _echo):
        assert not await network.is_gone(peer)
        listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        listener.close()
        await listener.wait_closed()
        assert await network.is_gone(replace(peer, address=f"127.0.0.1:{port}"))
        for nonsense in ("127.0.0.1:99999", "127.0.0.1:-1", "nowhere", ""):
            assert not await network.is_gone(replace(peer, address=nonsense))


class _Silent:
    """A stream of one who sends these messages; ``receive`` raises those that are errors."""

    def __init__(self, *messages: Any) -> None:
        self._messages = list(messages)

    async def send(self, message: Any) -> None: ...

    async def finish(self) -> None: ...

    async def receive(self) -> Any:
        message = self._messages.pop(0) if self._messages else None
        if isinstance(message, Exception):
            raise message
        return message


@IN_VIRTUAL_TIME
async def test_nobody_speaks_for_another_and_strangers_give_no_parts() -> None:
    peer = SimulatedPeer.make(World(), 0, target=4).peer
    stranger, member = identity(2).peer_id, identity(1)
    record = sign(replace(peer.own, peer_id=member.peer_id), member)
    with pytest.raises(RequestRejected, match="another peer"):
        await peer.exchange(stranger, pb.ExchangeRequest(own=record))
    with pytest.raises(RequestRejected, match="another peer"):
        await peer.meet(stranger, _Silent(pb.MeetRequest(join=pb.Join(own=record))))
    with pytest.raises(RequestRejected, match="no message"):
        first = pb.MeetRequest(join=pb.Join(own=record))
        await peer.meet(member.peer_id, _Silent(first, RequestRejected("the bytes sent are no message")))
    members = tuple(GroupMember(replace(peer.own, peer_id=each.peer_id), 1, 1.0) for each in (identity(0), member))
    group = Group("g", 0, 1, members, 5.0, layout=(1.0, 1.0), roster=("x",))
    mine = AveragingRound(peer._network, group, 0, 0, torch.zeros(8), VectorCoding(codec_of("fp32"), 4))
    await peer._averager._rounds.add(mine)
    opening = pb.ReduceRequest(open=pb.ReduceOpen(group="g"))
    with pytest.raises(RequestRejected, match="no member"):
        await peer.reduce(stranger, _Silent(opening))
    with pytest.raises(RequestRejected, match="no member"):
        [chunk async for chunk in peer.fetch(stranger, pb.FetchRequest(group="g"))]


class _Quiet(_Silent):
    """A stream of one who sends nothing."""

    async def receive(self) -> Any:
        await asyncio.Event().wait()


@IN_VIRTUAL_TIME
async def test_a_caller_waits_for_few_rounds_at_once() -> None:
    peer = SimulatedPeer.make(World(), 0, target=4).peer
    stranger, other = identity(2).peer_id, identity(3).peer_id

    async def fetch(caller: str) -> list[pb.Chunk]:
        return [chunk async for chunk in peer.fetch(caller, pb.FetchRequest(group="g"))]

    calls = [fetch(stranger) for _ in range(8)] + [peer.reduce(stranger, _Quiet()) for _ in range(8)]
    waiting = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0.1)
    for call in (fetch(stranger), peer.reduce(stranger, _Quiet())):
        with pytest.raises(PeerBusy, match="has 16 calls that wait for a round already"):
            await call
    with pytest.raises(RequestRejected, match="takes no part"):
        await fetch(other)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RequestRejected] * 8 + [TimeoutError] * 8
    with pytest.raises(RequestRejected, match="takes no part"):
        await fetch(stranger)


@IN_VIRTUAL_TIME
@pytest.mark.parametrize("data", [b"", b"\0" * 12, b"\0" * 20])
async def test_a_part_of_another_size_is_left_out(data: bytes) -> None:
    peer = SimulatedPeer.make(World(), 0, target=4).peer
    members = tuple(
        GroupMember(replace(peer.own, peer_id=identity(n).peer_id), 1, share) for n, share in ((0, 1.0), (1, 0.0))
    )
    group = Group("g", 0, 1, members, 5.0, layout=(1.0, 0.0), roster=("x",))
    mine = AveragingRound(peer._network, group, 0, 0, torch.arange(4.0), VectorCoding(codec_of("fp32"), 4))
    averaging = asyncio.ensure_future(mine.first_attempt())
    bad = pb.ReduceRequest(chunk=pb.Chunk(index=0, data=data))
    await mine.serve_reduce(1, 0, _Silent(bad))
    await averaging
    assert torch.equal(await mine.mean(), torch.arange(4.0))
