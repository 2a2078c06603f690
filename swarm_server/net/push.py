"""Pushing of a session's outputs directly to a session on another server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from swarm_protocol.dht.records import ServerRecord, short_id
from swarm_protocol.errors import BadReply, PeerUnavailable
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.rpc.channels import Connect, SharedChannels
from swarm_protocol.rpc.shared import has_result
from swarm_protocol.rpc.stubs import BLOCKS, ServiceStub
from swarm_protocol.tunnel.dialing import first_reached
from swarm_protocol.wire.bundling import may_be_bundled
from swarm_protocol.wire.constants import CLIENT_OPTIONS, MAX_UNTAKEN
from swarm_protocol.wire.printable import printable
from swarm_protocol.wire.status import FirstStatus
from swarm_server.net.push_bundle import PushStream

if TYPE_CHECKING:
    from swarm_server.net.neighbours import Neighbours

_logger = logging.getLogger(__name__)
_IDLE_S = 60.0  # longer than the time between two rounds of measurement
_MAX_ADDRESSES = 4  # of one server that are tried
_MAX_SETTLED_BYTES = 64 * 1024  # of a step that is kept until the next one, which may take minutes

Parts = list[bytes]
GiveUp = Callable[[pb.Step, Parts], Awaitable[None]]


class ChannelPool(SharedChannels):
    """The pool of connections to other servers; sessions share them, and unused ones are closed because a relay has
    room for a limited number only.
    """

    def __init__(self, connect: Connect, idle_s: float = _IDLE_S) -> None:
        """Create a pool. For ``connect``, see ``Dialer.connect``; ``idle_s``: close a connection without calls then."""
        super().__init__(connect, [*CLIENT_OPTIONS, ("grpc.client_idle_timeout_ms", round(idle_s * 1000))])

    async def stub(self, server: ServerRecord) -> ServiceStub:
        """Return a stub. Raise PeerUnavailable or BadReply if the pool is closed or the server cannot be reached."""
        addresses, fingerprint = server.addresses[:_MAX_ADDRESSES], server.tls_fingerprint
        self._forget_lost()
        known = (self._channels.get((address, fingerprint)) for address in addresses)
        channel = next((task.result() for task in known if task is not None and has_result(task)), None)
        if channel is None and not self._is_closed:
            _, channel = await first_reached(addresses, partial(self._channel, fingerprint), keeps=True)
        if channel is None or self._is_closed:  # gRPC ends the process that makes a stub of a closed channel
            raise PeerUnavailable("the connections to other servers are closed", server.peer_id)
        return ServiceStub(BLOCKS, channel)


class Pusher:
    """One session's stream to a session on another server: its next hop, or a standby.

    When the stream breaks, ``give_up`` gets the steps that were not acknowledged, in order, and then all later ones. A
    step that arrives twice is harmless. The other server acknowledges each step except a settled one: the next step
    shows that a settled one arrived.
    """

    def __init__(self, neighbours: Neighbours, hop: pb.NextHop, give_up: GiveUp, is_bundled: bool = False) -> None:
        """Start to connect at once. If ``is_bundled``, small steps share a stream with those of other sessions."""
        self._hop = hop
        self._neighbours, self._is_bundled = neighbours, is_bundled
        self._give_up = give_up
        self._untaken: dict[int, tuple[pb.Step, Parts]] = {}
        self._bundled: dict[int, PushStream] = {}  # the shared streams, by the numbers of their steps
        self._taken = asyncio.Condition()
        self._giving_up = asyncio.Lock()  # steps are given up one by one, in order; the client may be slow to take each
        self._broken = False
        self.retired = False
        self._stub: ServiceStub | None = None
        self._call: grpc.aio.StreamStreamCall[Any, Any] | None = None
        self._connecting = asyncio.ensure_future(self._connect())
        self._reading: asyncio.Task[Any] | None = None
        self._writing: asyncio.Task[Any] | None = None

    async def send(self, step: pb.Step, parts: Parts) -> None:
        """Send a step after the earlier ones; wait while the next hop has too many unacknowledged steps."""
        if not self._connecting.done():
            await asyncio.wait([self._connecting])
        if step.settled:
            self._forget_taken()
            if parts or step.hidden.size_bytes > _MAX_SETTLED_BYTES:
                step = _unsettled(step)
        else:
            self._ask_for_settled()
        if self._may_bundle(step, parts):
            await self._send_bundled(step)
            return
        await self._until(lambda: not self._bundled)  # this step must not overtake those on the shared stream either
        if self._call is None and not self._broken:
            await self._attach()
        call = self._call
        await self._until(lambda: len(self._untaken) < MAX_UNTAKEN)
        if self._broken:
            await self._give_up_late(step, parts)
            return
        self._untaken[step.number] = step, parts
        assert call is not None  # otherwise the stream would be broken
        # If the stream breaks, the reader notices too, and gives up the unacknowledged steps. Do not wait: the next
        # step is computed while this one travels.
        await self._write(call, _requests(step, parts), waits=False)

    def send_at_once(self, step: pb.Step) -> bool:
        """Send a small settled step without waiting, if the shared stream is open and nothing is under way on the
        session's own stream. Return whether it was sent."""
        stream = self._neighbours.open_push_stream(self._hop.peer_id) if self._connecting.done() else None
        if stream is None or not step.settled or step.hidden.size_bytes > _MAX_SETTLED_BYTES:
            return False
        self._forget_taken()
        if not self._may_bundle(step, []):
            return False
        self._post_bundled(stream, step)
        return True

    def _may_bundle(self, step: pb.Step, parts: Parts) -> bool:
        """Return whether the shared stream may carry the step: nothing is under way on the other one to overtake."""
        is_idle = not self._untaken and (self._writing is None or self._writing.done())
        return self._is_bundled and is_idle and not parts and not self._broken and may_be_bundled(step)

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds()`` is true or the stream is broken; do not yield to the event loop if one already is."""
        if not (self._broken or holds()):
            async with self._taken:
                await self._taken.wait_for(lambda: self._broken or holds())

    def _forget_taken(self) -> None:
        """Drop all steps, because a settled step follows, which shows that they arrived; no caller waits for that."""
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
        self._post_bundled(stream, step)

    def _post_bundled(self, stream: PushStream, step: pb.Step) -> None:
        self._untaken[step.number] = step, []
        self._bundled[step.number] = stream
        taken = stream.send(self._hop.push_key, step)
        taken.add_done_callback(lambda done: asyncio.ensure_future(self._answered(step.number, done.result())))

    def _ask_for_settled(self) -> None:
        """Send unacknowledged settled steps of the shared stream again, so that the other server acknowledges them."""
        for number, stream in list(self._bundled.items()):
            step, _ = self._untaken.get(number, (None, []))  # None if the stream is broken
            if step is not None and step.settled:
                self._post_bundled(stream, _unsettled(step))

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
        """Wait until all steps are acknowledged; return False if they never will be."""
        await asyncio.wait([self._connecting])
        async with self._taken:
            await self._taken.wait_for(lambda: self._broken or not self._untaken)
        return not self._broken

    async def retire(self) -> None:
        """End the stream, forget unacknowledged steps, and release all callers that wait in ``send``."""
        self.retired = self._broken = True
        self._forget_taken()
        self._connecting.cancel()
        if self._call is not None:
            self._call.cancel()  # the cancellation ends the reader, unless the reader is giving a step up
        self._stop_writing()
        async with self._taken:
            self._taken.notify_all()

    async def _connect(self) -> None:
        try:
            self._stub = await self._neighbours.stub(self._hop.peer_id)
        except (PeerUnavailable, BadReply) as error:
            self._lost(error)

    async def _attach(self) -> None:
        """Open the stream with the first step, because before it, the next hop may not know the session yet."""
        assert self._stub is not None  # otherwise the stream would be broken
        self._call = call = self._stub.Push()
        self._reading = asyncio.ensure_future(self._read(call, FirstStatus(call)))
        await self._write(call, [pb.PushRequest(push_key=self._hop.push_key)])

    async def _write(
        self, call: grpc.aio.StreamStreamCall[Any, Any], requests: Iterable[pb.PushRequest], waits: bool = True
    ) -> None:
        """Write the requests, and wait until they are sent (without ``waits``: only earlier ones) or the stream breaks.

        A separate task writes, so that it can be cancelled: gRPC lets a writer hang whose call ended before it began.
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
                        del self._untaken[number]  # settled steps before this one get no acknowledgement
                    self._taken.notify_all()
        except grpc.RpcError as error:
            await self._break()  # done before the reason is known
            _, details = await first.instead_of(error.code(), error.details())
            details = printable(details or "no details")
            _logger.info("the stream to server %s broke: %s", short_id(self._hop.peer_id), details)
            return
        except asyncio.CancelledError:
            if not self.retired:
                raise
        await self._break()

    async def _break(self) -> None:
        """Break the stream: give up the unacknowledged steps, and all later ones."""
        self._stop_writing()
        self._broken = True
        async with self._giving_up:  # free now, unless the stream was broken before; later steps wait for the lock
            untaken, self._untaken = self._untaken, {}
            async with self._taken:
                self._taken.notify_all()
            for step, parts in untaken.values():
                if not self.retired:
                    await self._give_up(step, parts)

    async def _give_up_late(self, step: pb.Step, parts: Parts) -> None:
        """Give up a step after those that were under way when the stream broke."""
        async with self._giving_up:
            if not self.retired:
                await self._give_up(step, parts)


def _unsettled(step: pb.Step) -> pb.Step:
    """Return the same step as one that the other server acknowledges."""
    unsettled = pb.Step()
    unsettled.CopyFrom(step)
    unsettled.ClearField("settled")
    return unsettled


def _requests(step: pb.Step, parts: Parts) -> Iterator[pb.PushRequest]:
    """Yield the requests one by one, because each copies its part."""
    yield pb.PushRequest(step=step)
    for part in parts:
        yield pb.PushRequest(more=part)


async def _write_all(call: grpc.aio.StreamStreamCall[Any, Any], requests: Iterable[pb.PushRequest]) -> None:
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
        for request in requests:
            await call.write(request)
