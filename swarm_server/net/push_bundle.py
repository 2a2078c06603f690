"""One stream to another server for the small steps of all sessions that continue there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.process.routine import end_tasks
from swarm_protocol.rpc.stubs import ServiceStub
from swarm_protocol.wire.bundling import Outbox
from swarm_protocol.wire.constants import MIB
from swarm_protocol.wire.printable import printable
from swarm_protocol.wire.status import FirstStatus

_logger = logging.getLogger(__name__)
_MAX_UNSENT_BYTES = 4 * MIB  # for a server that does not read
Taken = asyncio.Future[bool]


class PushStream:
    """A stream to another server that many sessions share.

    Attributes:
        ended: whether nothing can be sent any more.
    """

    def __init__(self, stub: ServiceStub) -> None:
        self.ended = False
        self._waiting: dict[tuple[bytes, int], Taken] = {}
        self._call: grpc.aio.StreamStreamCall[Any, Any] = stub.PushSteps()
        self._first = FirstStatus(self._call)
        self._outbox = Outbox[pb.PushedStep](pb.PushBundle, "steps", self._call.write)
        self._running = asyncio.ensure_future(self._run())

    def send(self, push_key: bytes, step: pb.Step) -> Taken:
        """Return a future: True if the session took the step, False if it is gone, or the stream is broken or full."""
        taken = asyncio.get_running_loop().create_future()
        if self.ended or self._outbox.size_bytes > _MAX_UNSENT_BYTES:
            taken.set_result(False)
            return taken
        self._waiting[push_key, step.number] = taken
        self._outbox.put(pb.PushedStep(push_key=push_key, step=step))
        return taken

    def forget(self, push_key: bytes, number: int) -> None:
        """Stop waiting for the answer to this step."""
        self._waiting.pop((push_key, number), None)

    async def _run(self) -> None:
        tasks = [asyncio.ensure_future(work) for work in (self._outbox.send_all(), self._read())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.ended = True
            self._call.cancel()
            waiting, self._waiting = self._waiting, {}
            for taken in waiting.values():
                _set(taken, False)
            for error in await end_tasks(tasks):
                if isinstance(error, grpc.RpcError):
                    _, details = await self._first.instead_of(error.code(), error.details())
                    _logger.info("a stream to another server broke: %s", printable(details or "no details"))

    async def _read(self) -> None:
        async for message in self._call:
            for step in message.steps if message is not None else ():  # gRPC gives None for bytes that are no message
                taken = self._waiting.pop((step.push_key, step.number), None)
                if taken is not None:
                    _set(taken, not step.lost)


def _set(taken: Taken, value: bool) -> None:
    if not taken.done():
        taken.set_result(value)


class PushStreams:
    """The shared streams to all other servers; a stream that has ended is replaced."""

    def __init__(self, stub: Callable[[str], Awaitable[ServiceStub]]) -> None:
        """Create the table; ``stub`` connects to the server with a peer id."""
        self._stub = stub
        self._streams: dict[str, PushStream] = {}

    async def to(self, peer_id: str) -> PushStream:
        """Return the stream to a server. Raise PeerUnavailable or BadReply if the server cannot be reached."""
        if (stream := self.living(peer_id)) is not None:
            return stream
        stub = await self._stub(peer_id)
        stream = self.living(peer_id)  # another caller may have been faster
        if stream is None:
            self._streams[peer_id] = stream = PushStream(stub)
        return stream

    def living(self, peer_id: str) -> PushStream | None:
        """Return the stream to a server, or None if there is none that has not ended."""
        stream = self._streams.get(peer_id)
        return None if stream is None or stream.ended else stream
