"""The stream to a server that all sessions share for small steps and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from swarm_client.transport.grpc_calls import GrpcStream
from swarm_protocol.errors import SwarmError
from swarm_protocol.failures import undone_on_error
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.process.routine import end_tasks
from swarm_protocol.wire.bundling import Outbox
from swarm_protocol.wire.session_keys import new_session_key

if TYPE_CHECKING:
    from swarm_client.transport.hops import HopSession


class StepBundle:
    """The shared stream of all sessions on one server.

    Attributes:
        key: the key that sessions give when they open, so that the server answers on this stream.
        ended: nothing can be sent any more.
    """

    def __init__(self, stream: GrpcStream[pb.StepBundle, pb.ReplyBundle], on_end: Callable[[], None]) -> None:
        self.key = new_session_key()
        self.ended = False
        self._stream = stream
        self._members: dict[bytes, HopSession] = {}
        self._outbox = Outbox[pb.KeyedStep](pb.StepBundle, "steps", stream.write)
        self._on_end = on_end
        self._running: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, stream: GrpcStream[pb.StepBundle, pb.ReplyBundle], timeout_s: float, on_end: Callable[[], None]
    ) -> StepBundle:
        """Open the stream; call ``on_end`` when it ends. Raise SwarmError if refused, TimeoutError if unanswered."""
        bundle = cls(stream, on_end)
        with undone_on_error(stream.cancel):
            async with asyncio.timeout(timeout_s):
                await stream.write(pb.StepBundle(key=bundle.key))
                await stream.read()  # the first one is empty: the server knows the key now
        bundle._begin()
        return bundle

    def _begin(self) -> None:
        self._running = asyncio.ensure_future(self._run())

    def join(self, member: HopSession) -> None:
        self._members[member.session_key] = member

    def leave(self, member: HopSession) -> None:
        self._members.pop(member.session_key, None)

    def post(self, member: HopSession, step: pb.Step) -> None:
        """Send a step, together with those that other members post before the event loop goes on."""
        self._outbox.put(pb.KeyedStep(session_key=member.session_key, step=step))

    async def _run(self) -> None:
        tasks = [asyncio.ensure_future(work) for work in (self._outbox.send_all(), self._read())]
        error: SwarmError = self._stream.ended_error()
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.ended = True
            self._on_end()
            self._stream.cancel()
            # Both tasks may fail when the stream ends; either error says more than that it has ended.
            for result in await end_tasks(tasks):
                error = result if isinstance(result, SwarmError) else error
            members, self._members = self._members, {}
            for member in members.values():
                member.bundle_lost(error)

    async def _read(self) -> None:
        while True:
            message = await self._stream.read()
            for entry in message.replies:
                member = self._members.get(entry.session_key)
                if member is not None:
                    member.bundled_reply(entry.reply)
