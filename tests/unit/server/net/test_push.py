"""What a session sends to another server: over real gRPC, which has ways of its own to end a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.rpc.stubs import BLOCKS, ServiceStub
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import MIB
from swarm_server.net.push import ChannelPool, Pusher
from swarm_server.net.push_bundle import PushStream, PushStreams
from tests.marks import SLOW
from tests.worlds.partial_service import serve_methods

TIMEOUT_S = 60.0  # of what would otherwise never end


class OtherServer:
    """Takes the first ``num_taken`` steps, and no more. ``is_older``: it does not know that a step may be settled."""

    def __init__(self, num_taken: int, is_older: bool = False) -> None:
        self.is_older = is_older
        self.taken: list[int] = []
        self.bundles: list[list[int]] = []
        self.asked, self.answering = asyncio.Event(), asyncio.Event()
        self.answering.set()
        self._num_taken = num_taken

    async def Push(self, requests: AsyncIterator[pb.PushRequest], context: grpc.aio.ServicerContext) -> None:
        self.asked.set()
        async for request in requests:
            if request.HasField("step") and len(self.taken) < self._num_taken:
                self.taken.append(request.step.number)
                await self.answering.wait()
                if self.is_older or not request.step.settled:
                    await context.write(pb.PushReply(number=request.step.number))

    async def PushSteps(self, requests: AsyncIterator[pb.PushBundle], context: grpc.aio.ServicerContext) -> None:
        """Loses what it does not take."""
        self.asked.set()
        async for request in requests:
            await self.answering.wait()
            self.bundles.append([entry.step.number for entry in request.steps])
            steps = []
            for entry in request.steps:
                lost = len(self.taken) >= self._num_taken
                if not lost:
                    self.taken.append(entry.step.number)
                if lost or self.is_older or not entry.step.settled:
                    steps.append(pb.TakenStep(push_key=entry.push_key, number=entry.step.number, lost=lost))
            await context.write(pb.TakenBundle(steps=steps))


class GivenUp(list[int]):
    """The numbers of the steps that a pusher, which calls this, has given up."""

    async def __call__(self, step: pb.Step, _parts: list[bytes]) -> None:
        self.append(step.number)


class Channels:
    """The way to the other server; ``called`` hears when a stream to it begins."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self.called, self.address = asyncio.Event(), address
        self._stub = ServiceStub(BLOCKS, channel)
        self._streams = PushStreams(self.stub)

    async def push_stream(self, peer_id: str) -> PushStream:
        return await self._streams.to(peer_id)

    def open_push_stream(self, peer_id: str) -> PushStream | None:
        return self._streams.living(peer_id)

    async def stub(self, _peer_id: str) -> Channels:
        return self

    def Push(self) -> grpc.aio.StreamStreamCall:
        self.called.set()
        return self._stub.Push()

    def PushSteps(self) -> grpc.aio.StreamStreamCall:
        return self._stub.PushSteps()


@asynccontextmanager
async def connected(other: OtherServer) -> AsyncIterator[tuple[grpc.aio.Server, Channels]]:
    server = grpc.aio.server(options=[("grpc.http2.bdp_probe", 0)])  # which makes what it reads ahead larger and larger
    serve_methods(other, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        try:
            yield server, Channels(channel, f"127.0.0.1:{port}")
        finally:
            await server.stop(None)


def step(number: int) -> tuple[pb.Step, list[bytes]]:
    return pb.Step(number=number), [b"part"]


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_sender_is_let_go_however_early_its_stream_is_retired(num_turns):
    """In particular before gRPC has begun the call: it leaves its own writers waiting then."""
    async with connected(OtherServer(num_taken=9)) as (_server, channels):
        pusher = Pusher(channels, pb.NextHop(), never)
        sending = asyncio.ensure_future(pusher.send(*step(1)))
        await channels.called.wait()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await pusher.retire()
        await ended(sending)


async def test_one_that_waits_for_a_slow_server_is_let_go():
    other = OtherServer(num_taken=1)
    async with connected(other) as (_server, channels):
        pusher = Pusher(channels, pb.NextHop(), never)
        sending = asyncio.ensure_future(send_all(pusher, 9))
        await asyncio.wait_for(other.asked.wait(), TIMEOUT_S)
        await pusher.retire()
        await ended(sending)


async def test_a_sender_waits_while_the_next_hop_has_four_steps_to_take():
    other = OtherServer(num_taken=9)
    other.answering.clear()
    async with connected(other) as (_server, channels):
        pusher = Pusher(channels, pb.NextHop(), never)
        await asyncio.wait_for(send_all(pusher, 4), TIMEOUT_S)
        fifth = asyncio.ensure_future(pusher.send(*step(5)))
        await asyncio.wait_for(other.asked.wait(), TIMEOUT_S)
        assert list(pusher._untaken) == [1, 2, 3, 4] and not fifth.done()
        other.answering.set()
        await ended(fifth)
        assert await asyncio.wait_for(pusher.drain(), TIMEOUT_S)
        assert other.taken == [1, 2, 3, 4, 5]


async def test_what_a_server_that_ends_has_not_taken_is_given_up_in_order():
    given_up: list[int] = []

    async def give_up(step: pb.Step, parts: list[bytes]) -> None:
        assert parts == [b"part"]
        given_up.append(step.number)

    other = OtherServer(num_taken=2)
    async with connected(other) as (server, channels):
        pusher = Pusher(channels, pb.NextHop(), give_up)
        sending = asyncio.ensure_future(send_all(pusher, 9))
        await asyncio.wait_for(other.asked.wait(), TIMEOUT_S)
        await server.stop(None)
        await ended(sending)
        await send_all(pusher, 10, first=10)
        known = sorted({*other.taken, *given_up})
        assert known == list(range(1, 11))
        assert given_up == sorted(given_up)
        assert not await pusher.drain()


async def test_what_comes_after_a_stream_broke_does_not_overtake_what_was_under_way() -> None:
    given_up: list[int] = []
    slowly = asyncio.Event()

    async def give_up(step: pb.Step, _parts: list[bytes]) -> None:
        await slowly.wait()
        given_up.append(step.number)

    other = OtherServer(num_taken=0)
    async with connected(other) as (server, channels):
        pusher = Pusher(channels, pb.NextHop(), give_up)
        await send_all(pusher, 3)
        await asyncio.wait_for(other.asked.wait(), TIMEOUT_S)
        await server.stop(None)
        assert not await pusher.drain()
        later = asyncio.ensure_future(send_all(pusher, 5, first=4))
        await asyncio.sleep(0)
        slowly.set()
        await ended(later)
        assert given_up == [1, 2, 3, 4, 5]


async def test_a_stream_is_retired_at_once_though_a_client_does_not_take_what_is_given_up() -> None:
    begun = asyncio.Event()

    async def give_up(_step: pb.Step, _parts: list[bytes]) -> None:
        assert not begun.is_set()  # nothing more once it is retired
        begun.set()
        await may_go_on.wait()

    may_go_on = asyncio.Event()
    other = OtherServer(num_taken=0)
    async with connected(other) as (server, channels):
        pusher = Pusher(channels, pb.NextHop(), give_up)
        await send_all(pusher, 2)
        await asyncio.wait_for(other.asked.wait(), TIMEOUT_S)
        await server.stop(None)
        await asyncio.wait_for(begun.wait(), TIMEOUT_S)
        await pusher.retire()
        may_go_on.set()
        await pusher.send(*step(3))


async def test_small_steps_of_sessions_that_are_ready_together_are_one_message() -> None:
    other = OtherServer(num_taken=9)
    async with connected(other) as (_server, channels):
        pushers = [Pusher(channels, pb.NextHop(push_key=bytes([key])), never, True) for key in range(3)]
        await asyncio.gather(*(pusher.send(pb.Step(number=7 + key), []) for key, pusher in enumerate(pushers)))
        assert all([await pusher.drain() for pusher in pushers])
    assert other.bundles == [[7, 8, 9]]


async def test_a_settled_step_is_sent_at_once_on_a_stream_that_is_open_after_steps_that_were_taken() -> None:
    other = OtherServer(num_taken=9)
    async with connected(other) as (_server, channels):
        pusher = Pusher(channels, pb.NextHop(push_key=b"key"), never, True)
        settled = [pb.Step(number=number, settled=True) for number in range(5)]
        assert not pusher.send_at_once(settled[0])  # no stream is open
        await pusher.send(settled[1], [])
        assert not pusher.send_at_once(pb.Step(number=2))
        assert pusher.send_at_once(settled[2]) and pusher.send_at_once(settled[3])
        await pusher.send(pb.Step(number=4), [])
        assert await pusher.drain()
        await pusher.retire()
        assert not pusher.send_at_once(settled[4])
    assert sorted(set(other.taken)) == [1, 2, 3, 4]


async def test_nothing_is_sent_at_once_on_a_stream_that_has_ended_and_another_takes_its_place() -> None:
    other = OtherServer(num_taken=9)
    async with connected(other) as (_server, channels):
        pusher = Pusher(channels, pb.NextHop(push_key=b"key"), never, True)
        await pusher.send(pb.Step(number=1), [])
        assert await pusher.drain()
        stream = await channels.push_stream("")
        stream._call.cancel()
        while not stream.ended:
            await asyncio.sleep(0)
        settled = pb.Step(number=2, settled=True)
        assert not pusher.send_at_once(settled)
        await pusher.send(settled, [])
        await pusher.send(pb.Step(number=3), [])
        assert await pusher.drain()
    assert sorted(set(other.taken)) == [1, 2, 3]


async def test_a_session_that_the_other_server_has_lost_is_given_up_and_the_others_are_not() -> None:
    given_up = GivenUp()
    async with connected(OtherServer(num_taken=1)) as (_server, channels):
        known = Pusher(channels, pb.NextHop(push_key=b"known"), never, True)
        lost = Pusher(channels, pb.NextHop(push_key=b"lost"), given_up, True)
        await asyncio.gather(known.send(pb.Step(number=1), []), lost.send(pb.Step(number=2), []))
        assert await known.drain() and not await lost.drain()
        await lost.send(pb.Step(number=3), [])
    assert given_up == [2, 3]


async def test_a_bundle_that_breaks_gives_up_what_was_not_taken_and_another_takes_its_place() -> None:
    given_up = GivenUp()
    other = OtherServer(num_taken=9)
    async with connected(other) as (_server, channels):
        first = await channels.push_stream("")
        pusher = Pusher(channels, pb.NextHop(push_key=b"key"), given_up, True)
        await pusher.send(pb.Step(number=1), [])
        first._call.cancel()  # before the answer is here
        assert not await pusher.drain()
        while not first.ended:
            await asyncio.sleep(0)
        assert given_up == [1]
        another = Pusher(channels, pb.NextHop(push_key=b"another"), never, True)
        await another.send(pb.Step(number=2), [])
        assert await another.drain()
    assert 2 in other.taken


async def test_a_small_step_does_not_overtake_a_large_one() -> None:
    other = OtherServer(num_taken=9)
    other.answering.clear()
    async with connected(other) as (_server, channels):
        pusher = Pusher(channels, pb.NextHop(), never, True)
        await pusher.send(*step(1))
        await pusher.send(pb.Step(number=2), [])
        other.answering.set()
        assert await pusher.drain()
        await pusher.send(pb.Step(number=3), [])
        assert await pusher.drain()
    assert other.taken == [1, 2, 3] and other.bundles == [[3]]


async def test_nor_a_large_one_a_small_one() -> None:
    other = OtherServer(num_taken=9)
    other.answering.clear()
    async with connected(other) as (_server, channels):
        pusher = Pusher(channels, pb.NextHop(), never, True)
        await pusher.send(pb.Step(number=1), [])
        sending = asyncio.ensure_future(pusher.send(*step(2)))
        await asyncio.wait_for(other.asked.wait(), TIMEOUT_S)
        assert not channels.called.is_set()
        other.answering.set()
        await ended(sending)
        assert await pusher.drain()
    assert other.taken == [1, 2] and other.bundles == [[1]]


async def test_nothing_is_kept_of_sessions_that_are_over_for_a_server_that_does_not_answer() -> None:
    other = OtherServer(num_taken=9)
    other.answering.clear()
    async with connected(other) as (_server, channels):
        for number in range(1, 9):
            pusher = Pusher(channels, pb.NextHop(push_key=bytes([number])), never, True)
            await pusher.send(pb.Step(number=number), [])
            await pusher.retire()
        assert (await channels.push_stream(""))._waiting == {}


async def test_a_server_that_does_not_read_has_no_more_than_it_may() -> None:
    other = OtherServer(num_taken=9)
    other.answering.clear()
    async with connected(other) as (_server, channels):
        stream = await channels.push_stream("")
        large = pb.Step(number=1, hidden=pb.Tensor(data=bytes(MIB // 16)))
        waiting = [stream.send(bytes([number]), large) for number in range(200)]
        refused = [taken for taken in waiting if taken.done()]
        assert refused and not any(taken.result() for taken in refused)
        assert stream._outbox.size_bytes < 5 * MIB


@pytest.mark.parametrize("is_bundled", [False, True])
async def test_a_settled_step_is_kept_until_the_next_and_given_up_if_the_stream_breaks(is_bundled) -> None:
    given_up = GivenUp()
    other = OtherServer(num_taken=9)
    async with connected(other) as (server, channels):
        pusher = Pusher(channels, pb.NextHop(push_key=b"key"), given_up, is_bundled)
        await pusher.send(pb.Step(number=1), [])
        assert await pusher.drain()
        for number in range(2, 6):
            await pusher.send(pb.Step(number=number, settled=True), [])
            while number not in other.taken:
                await asyncio.sleep(0)
        await server.stop(None)
        assert not await pusher.drain()
    assert other.taken == [1, 2, 3, 4, 5] and given_up == [5]


@pytest.mark.parametrize("is_bundled", [False, True])
@pytest.mark.parametrize("large", [False, True])
async def test_the_other_server_says_of_all_what_it_has_taken_if_one_is_not_settled(is_bundled, large) -> None:
    other = OtherServer(num_taken=99)
    async with connected(other) as (_server, channels):
        pusher = Pusher(channels, pb.NextHop(push_key=b"key"), never, is_bundled)
        for number in range(1, 20, 2):
            await pusher.send(pb.Step(number=number, settled=True), [])
            await asyncio.wait_for(pusher.send(pb.Step(number=number + 1), [b"part"] * large), TIMEOUT_S)
            while number + 1 not in other.taken:  # the next one is settled: all before it are taken
                await asyncio.sleep(0)
        assert await asyncio.wait_for(pusher.drain(), TIMEOUT_S)
    assert list(dict.fromkeys(other.taken)) == list(range(1, 21))


@pytest.mark.parametrize("is_bundled", [False, True])
@pytest.mark.parametrize("is_answered", [False, True])
async def test_an_older_server_says_of_settled_steps_too_that_it_has_taken_them(is_bundled, is_answered) -> None:
    """Its answers, which may come when the next step is sent already, are of steps that nobody waits for.

    A settled step is sent once those before it are taken. ``is_answered``: and the sender has heard so.
    """
    other = OtherServer(num_taken=99, is_older=True)
    async with connected(other) as (_server, channels):
        pusher = Pusher(channels, pb.NextHop(push_key=b"key"), never, is_bundled)
        for number in range(1, 31):
            await asyncio.wait_for(pusher.send(pb.Step(number=number, settled=number % 10 != 0), []), TIMEOUT_S)
            while number not in other.taken or (is_answered and pusher._untaken):
                await asyncio.sleep(0)
        assert await asyncio.wait_for(pusher.drain(), TIMEOUT_S)
    # What shares a stream is sent again when somebody wants to know of it; twice is harmless.
    assert list(dict.fromkeys(other.taken)) == list(range(1, 31))
    assert not pusher._untaken and not pusher._bundled


async def test_a_large_step_is_settled_for_nobody() -> None:
    """It would be kept, outside all budgets, while the session is silent."""
    other = OtherServer(num_taken=9)
    async with connected(other) as (_server, channels):
        pusher = Pusher(channels, pb.NextHop(), never)
        hidden = pb.Tensor(size_bytes=MIB // 8, data=bytes(MIB // 8))
        await pusher.send(pb.Step(number=1, settled=True, hidden=hidden), [])
        await pusher.send(pb.Step(number=2, settled=True), [b"part"])
        assert await asyncio.wait_for(pusher.drain(), TIMEOUT_S)


async def send_all(pusher: Pusher, last: int, first: int = 1) -> None:
    for number in range(first, last + 1):
        await pusher.send(*step(number))


async def never(step: pb.Step, _parts: list[bytes]) -> None:
    raise AssertionError(f"step {step.number} was given up")


async def ended(task: asyncio.Task) -> None:
    """Not ``wait_for``, which would cancel the task, and thus let it go."""
    done, _ = await asyncio.wait([task], timeout=TIMEOUT_S)
    assert done
    task.result()


async def test_a_connection_that_failed_when_nobody_waited_for_it_any_more_is_tried_again() -> None:
    failing = asyncio.Event()
    tried: list[str] = []

    async def connect(address: str, *_options: object) -> grpc.aio.Channel:
        tried.append(address)
        await failing.wait()
        raise PeerUnavailable("nobody is there")

    channels, server = (
        ChannelPool(connect),
        ServerRecord("peer", ("192.0.2.1:1",), "model", "revision", 1, Span(0, 1)),
    )
    waiting = asyncio.ensure_future(channels.stub(server))
    while not tried:
        await asyncio.sleep(0)
    waiting.cancel()
    failing.set()
    await asyncio.wait([waiting])
    for number in (2, 3):
        with pytest.raises(PeerUnavailable, match="nobody is there"):
            await channels.stub(server)
        assert len(tried) == number
    await channels.close()


async def test_what_comes_next_can_be_computed_while_a_step_travels():
    """The other server reads no further than the first message; the step after next must wait for the first."""
    other = OtherServer(num_taken=9)
    other.answering.clear()
    parts = [bytes(MIB)] * 16  # more than lies between the two
    async with connected(other) as (_server, channels):
        pusher = Pusher(channels, pb.NextHop(), never)
        await ended(asyncio.ensure_future(pusher.send(pb.Step(number=1), parts)))
        second = asyncio.ensure_future(pusher.send(pb.Step(number=2), parts))
        await asyncio.wait_for(other.asked.wait(), TIMEOUT_S)
        assert not (await asyncio.wait([second], timeout=0.2))[0]
        other.answering.set()
        await ended(second)
        assert await pusher.drain()
        assert other.taken == [1, 2]


async def test_sessions_that_share_a_stream_ask_for_one_connection() -> None:
    other = OtherServer(num_taken=9)
    async with connected(other) as (_server, channels):
        tried: list[str] = []

        async def connect(address: str, *_options: object) -> grpc.aio.Channel:
            tried.append(address)
            return grpc.aio.insecure_channel(address)

        pool = ChannelPool(connect)
        server = ServerRecord("peer", (channels.address,), "model", "revision", 1, Span(0, 1))
        streams = PushStreams(lambda _peer_id: pool.stub(server))
        first = await streams.to("peer")
        await pool.stub(server)  # while it connects
        for number in range(1, 4):
            assert await streams.to("peer") is first
            assert await first.send(b"key", pb.Step(number=number))
            await pool.stub(server)
        assert len(tried) == 1
        await pool.close()


@SLOW  # gRPC has no shorter idle time than a second
async def test_connections_are_closed_when_nobody_has_used_them_for_a_while() -> None:
    async with connected(OtherServer(num_taken=9)) as (_server, channels):
        opened: list[grpc.aio.Channel] = []

        async def connect(
            address: str, _fingerprint: bytes, options: list[tuple[str, int]], _timeout_s: float
        ) -> grpc.aio.Channel:
            opened.append(grpc.aio.insecure_channel(address, options=options))
            return opened[-1]

        pool = ChannelPool(connect, idle_s=1.0)
        server = ServerRecord("peer", (channels.address,), "model", "revision", 1, Span(0, 1))
        busy = (await pool.stub(server)).Push()
        await busy.write(pb.PushRequest(step=pb.Step(number=1)))
        await busy.read()
        await pool.stub(server)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(opened[0].wait_for_state_change(grpc.ChannelConnectivity.READY), 1.7)
        busy.cancel()
        await asyncio.wait_for(opened[0].wait_for_state_change(grpc.ChannelConnectivity.READY), TIMEOUT_S)
        assert opened[0].get_state() is grpc.ChannelConnectivity.IDLE
        assert len(opened) == 1
        again = (await pool.stub(server)).Push()
        await again.write(pb.PushRequest(step=pb.Step(number=2)))
        assert (await again.read()).number == 2
        assert len(opened) == 2
        again.cancel()
        await pool.close()
