"""Sends what a session has computed straight to a session on another server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import grpc

from swarm_protocol.dht.records import ServerRecord, short_id
from swarm_protocol.errors import BadReply, PeerUnavailable
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.pb.swarm_pb2_grpc import BlocksStub
from swarm_protocol.rpc.shared import result_of
from swarm_protocol.tunnel.dialing import first_reached
from swarm_protocol.wire.bundling import may_be_bundled
from swarm_protocol.wire.constants import CLIENT_OPTIONS, MAX_UNTAKEN
from swarm_protocol.wire.printable import printable
from swarm_protocol.wire.status import FirstStatus
from swarm_server.net.push_bundle import PushStream

_logger = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 3.0
_IDLE_S = 60.0  # longer than from one round of measuring to the next
_MAX_ADDRESSES = 4  # of one server, which are tried
_LOST = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
_MAX_SETTLED_BYTES = 64 * 1024  # hidden states of a step that are kept until the next, which may take minutes

Connect = Callable[[str, bytes, list[tuple[str, int]], float], Awaitable[grpc.aio.Channel]]
Parts = list[bytes]
GiveUp = Callable[[pb.Step, Parts], Awaitable[None]]


class Reachable(Protocol):
    """Servers by peer id, see ``Neighbours``."""

    async def stub(self, peer_id: str) -> BlocksStub: ...

    async def push_stream(self, peer_id: str) -> PushStream: ...


class ChannelPool:
    """Connections to other servers, kept open for all sessions while they are used: a relay has room for a limited
    number.
    """

    def __init__(self, connect: Connect, idle_s: float = _IDLE_S) -> None:
        """``connect`` stands for the network, see ``Dialer.connect``; ``idle_s``: until one without calls is closed."""
        self._connect = connect
        self._options = [*CLIENT_OPTIONS, ("grpc.client_idle_timeout_ms", round(idle_s * 1000))]
        self._channels: dict[tuple[str, bytes], asyncio.Task[grpc.aio.Channel]] = {}
        self._seen_ready: set[asyncio.Task[grpc.aio.Channel]] = set()
        self._is_closed = False

    async def stub(self, server: ServerRecord) -> BlocksStub:
        """Raises PeerUnavailable or BadReply if the server cannot be reached or is another one, or all are closed."""
        addresses, fingerprint = server.addresses[:_MAX_ADDRESSES], server.tls_fingerprint
        self._forget_lost()
        known = (self._channels.get((address, fingerprint)) for address in addresses)
        channel = next((task.result() for task in known if task is not None and _is_open(task)), None)
        if channel is None and not self._is_closed:
            _, channel = await first_reached(addresses, partial(self._channel, fingerprint), keeps=True)
        if channel is None or self._is_closed:  # gRPC ends the process of who makes a stub for a channel that is closed
            raise PeerUnavailable("the connections to other servers are closed", server.peer_id)
        return BlocksStub(channel)  # type: ignore[no-untyped-call]

    async def _channel(self, fingerprint: bytes, address: str) -> grpc.aio.Channel:
        """Whoever wants it meanwhile waits for the same; it goes on if nobody waits any more."""
        key = address, fingerprint
        if key not in self._channels:
            self._channels[key] = connecting = asyncio.ensure_future(
                self._connect(address, fingerprint, self._options, _CONNECT_TIMEOUT_S)
            )
            connecting.add_done_callback(partial(self._forget_failure, key))
        return await result_of(self._channels[key])

    def _forget_lost(self) -> None:
        """Idle ones, and those whose server is gone or at another address. Whoever has a stub keeps its channel.

        A channel connects with its first call.
        """
        for key, connecting in list(self._channels.items()):
            state = connecting.result().get_state() if _is_open(connecting) else None
            if state is grpc.ChannelConnectivity.READY:
                self._seen_ready.add(connecting)
            elif state in _LOST or connecting in self._seen_ready:
                del self._channels[key]
        self._seen_ready.intersection_update(self._channels.values())

    def _forget_failure(self, key: tuple[str, bytes], connecting: asyncio.Task[grpc.aio.Channel]) -> None:
        """Even if nobody waits for the connection any more: the next who wants it tries again."""
        if (connecting.cancelled() or connecting.exception() is not None) and self._channels.get(key) is connecting:
            del self._channels[key]

    async def close(self) -> None:
        self._is_closed = True
        while self._channels:
            _, connecting = self._channels.popitem()
            connecting.cancel()
            if _is_open(connecting):
                await connecting.result().close()


def _is_open(connecting: asyncio.Task[grpc.aio.Channel]) -> bool:
    return connecting.done() and not connecting.cancelled() and connecting.exception() is None


class Pusher:
    """One session's stream to another server's session: that of its next hop, or one that stands by for it.

    Steps that were not taken when the stream breaks are handed to ``give_up``, in order, as are all that come later. A
    step that arrives twice is harmless. The other server says that it has taken a step, unless it is settled: then the
    next one says so.
    """

    def __init__(self, neighbours: Reachable, hop: pb.NextHop, give_up: GiveUp, is_bundled: bool = False) -> None:
        """Starts to connect at once. ``is_bundled``: small steps share a stream with those of other sessions."""
        self._hop = hop
        self._neighbours, self._is_bundled = neighbours, is_bundled
        self._give_up = give_up
        self._untaken: dict[int, tuple[pb.Step, Parts]] = {}
        self._bundled: dict[int, PushStream] = {}  # the streams of those that share one
        self._taken = asyncio.Condition()
        self._giving_up = asyncio.Lock()  # one by one, in order; the client of each may be slow to take it
        self._broken = False
        self.retired = False
        self._stub: BlocksStub | None = None
        self._call: grpc.aio.StreamStreamCall[Any, Any] | None = None
        self._connecting = asyncio.ensure_future(self._connect(neighbours))
        self._reading: asyncio.Task[Any] | None = None
        self._writing: asyncio.Task[Any] | None = None

    async def send(self, step: pb.Step, parts: Parts) -> None:
        """Returns once those before are on their way; waits while the next hop has too many to take."""
        if not self._connecting.done():
            await asyncio.wait([self._connecting])
        if step.settled:
            self._forget_taken()
            step.settled = not parts and step.hidden.size_bytes <= _MAX_SETTLED_BYTES
        else:
            self._ask_for_settled()
        # Nothing may be under way on the other stream, which this step could overtake.
        is_idle = not self._untaken and (self._writing is None or self._writing.done())
        if self._is_bundled and is_idle and not parts and not self._broken and may_be_bundled(step):
            await self._send_bundled(step)
            return
        await self._until(lambda: not self._bundled)  # nor may this one overtake what shares a stream
        if self._call is None and not self._broken:
            await self._attach()
        call = self._call
        await self._until(lambda: len(self._untaken) < MAX_UNTAKEN)
        if self._broken:
            await self._give_up_late(step, parts)
            return
        self._untaken[step.number] = step, parts
        assert call is not None  # or the stream would be broken
        # If it breaks, the reader notices as well, and gives up what was not taken. What comes after this step is
        # computed while it travels.
        await self._write(call, _requests(step, parts), waits=False)

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Waits until it holds, or the stream is broken; takes no turn of the event loop if it does already."""
        if not (self._broken or holds()):
            async with self._taken:
                await self._taken.wait_for(lambda: self._broken or holds())

    def _forget_taken(self) -> None:
        """All that was sent has been taken; nobody waits for that, since one step at a time is sent."""
        self._untaken.clear()
        for number, stream in self._bundled.items():
            stream.forget(self._hop.push_key, number)
        self._bundled.clear()

    async def _send_bundled(self, step: pb.Step) -> None:
        try:
            stream = await self._neighbours.push_stream(self._hop.peer_id)
        except (PeerUnavailable, BadReply) as error:
            self._lost(error)
            await self._give_up_late(step, [])
            return
        self._untaken[step.number] = step, []
        self._post_bundled(stream, step)

    def _post_bundled(self, stream: PushStream, step: pb.Step) -> None:
        self._bundled[step.number] = stream
        taken = stream.send(self._hop.push_key, step)
        taken.add_done_callback(lambda done: asyncio.ensure_future(self._answered(step.number, done.result())))

    def _ask_for_settled(self) -> None:
        """Whether those that share a stream are taken, of which nothing is said: by sending them again."""
        for number, stream in list(self._bundled.items()):
            step, _ = self._untaken.get(number, (None, []))  # none if the stream is broken
            if step is not None and step.settled:
                step.settled = False
                self._post_bundled(stream, step)

    async def _answered(self, number: int, taken: bool) -> None:
        if taken:
            async with self._taken:
                self._untaken.pop(number, None)
                self._bundled.pop(number, None)
                self._taken.notify_all()
        else:
            _logger.info("a session of server %s is not there any more", short_id(self._hop.peer_id))
            await self._break()

    async def drain(self) -> bool:
        """Waits until everything is taken; False if it never will be."""
        await asyncio.wait([self._connecting])
        async with self._taken:
            await self._taken.wait_for(lambda: self._broken or not self._untaken)
        return not self._broken

    async def retire(self) -> None:
        """Ends the stream; what was not taken is forgotten. Whoever waits in ``send`` is let go."""
        self.retired = self._broken = True
        self._forget_taken()
        self._connecting.cancel()
        if self._call is not None:
            self._call.cancel()  # which ends the reader, unless it is in the middle of giving something up
        self._stop_writing()
        async with self._taken:
            self._taken.notify_all()

    async def _connect(self, neighbours: Reachable) -> None:
        try:
            self._stub = await neighbours.stub(self._hop.peer_id)
        except (PeerUnavailable, BadReply) as error:
            self._lost(error)

    async def _attach(self) -> None:
        """Only with the first step: before, the next hop may not have heard of the session yet."""
        assert self._stub is not None  # or the stream would be broken
        self._call = call = self._stub.Push()
        self._reading = asyncio.ensure_future(self._read(call, FirstStatus(call)))
        await self._write(call, [pb.PushRequest(push_key=self._hop.push_key)])

    async def _write(
        self, call: grpc.aio.StreamStreamCall[Any, Any], requests: Iterable[pb.PushRequest], waits: bool = True
    ) -> None:
        """Returns once they are on their way, or the stream is broken; not ``waits``: once those before are.

        In a task of its own, which can be cancelled: gRPC lets a writer wait for ever whose call ends before it began.
        """
        if self._writing is not None and not self._writing.done():
            await asyncio.wait([self._writing])
        self._writing = asyncio.ensure_future(_write_all(call, requests))
        if not waits:
            return
        try:
            await asyncio.wait([self._writing])
        except asyncio.CancelledError:
            self._stop_writing()
            raise

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()

    def _lost(self, error: Exception) -> None:
        self._broken = True
        _logger.info("steps cannot be pushed to server %s: %s", short_id(self._hop.peer_id), printable(str(error)))

    async def _read(self, call: grpc.aio.StreamStreamCall[Any, Any], first: FirstStatus) -> None:
        try:
            async for reply in call:
                async with self._taken:
                    for number in [number for number in self._untaken if number <= reply.number]:
                        del self._untaken[number]  # of settled ones before it nothing is said
                    self._taken.notify_all()
        except grpc.RpcError as error:
            await self._break()  # before it is known why
            _, details = await first.instead_of(error.code(), error.details())
            details = printable(details or "no details")
            _logger.info("the stream to server %s broke: %s", short_id(self._hop.peer_id), details)
            return
        except asyncio.CancelledError:
            if not self.retired:
                raise
        await self._break()

    async def _break(self) -> None:
        """Gives up what was not taken, and all that comes later."""
        self._stop_writing()
        self._broken = True
        async with self._giving_up:  # free now, unless it was broken before: what comes later waits for it
            untaken, self._untaken = self._untaken, {}
            async with self._taken:
                self._taken.notify_all()
            for step, parts in untaken.values():
                if not self.retired:
                    await self._give_up(step, parts)

    async def _give_up_late(self, step: pb.Step, parts: Parts) -> None:
        """After those that were under way when the stream broke."""
        async with self._giving_up:
            if not self.retired:
                await self._give_up(step, parts)


def _requests(step: pb.Step, parts: Parts) -> Iterator[pb.PushRequest]:
    """One by one: each copies its part."""
    yield pb.PushRequest(step=step)
    for part in parts:
        yield pb.PushRequest(more=part)


async def _write_all(call: grpc.aio.StreamStreamCall[Any, Any], requests: Iterable[pb.PushRequest]) -> None:
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
        for request in requests:
            await call.write(request)
