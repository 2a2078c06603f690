"""Calls to other peers over gRPC. A peer is identified by the TLS certificate whose fingerprint is in its record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.rpc.channels import PinnedChannels, translated
from swarm_protocol.rpc.stubs import ServiceStub
from swarm_protocol.wire.status import FirstStatus, from_status
from swarm_training.core.network import MeetStream, ReduceStream
from swarm_training.core.record import Progress
from swarm_training.pb import training_pb2 as pb

Out = TypeVar("Out")
In = TypeVar("In")
_PROBE_TIMEOUT_S = 1.0  # for a TCP connection to a peer that does not answer calls
_TRAINING = pb.DESCRIPTOR.services_by_name["Training"]


class _CallStream(Generic[Out, In]):
    """The caller's side of a stream."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._first = FirstStatus(call)

    async def send(self, message: Out) -> None:
        async with translated(first=self._first):
            await self._call.write(message)

    async def receive(self) -> In | None:
        async with translated(first=self._first):
            message = await self._call.read()
            if message is grpc.aio.EOF:
                code, details = await self._first.instead_of(await self._call.code(), await self._call.details())
                if code is not grpc.StatusCode.OK:
                    raise from_status(code, details)
                return None
            received: In = message
            return received

    async def finish(self) -> None:
        async with translated(first=self._first):
            await self._call.done_writing()


class GrpcNetwork:
    """The calls to other peers (a ``Network``) over gRPC channels that are kept open."""

    def __init__(self, credentials: ClientCredentials) -> None:
        self._channels = PinnedChannels(credentials)

    async def exchange(self, peer: Progress, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        stub = await self.stub(_TRAINING, peer)
        async with translated():
            reply: pb.ExchangeReply = await stub.Exchange(request)
            return reply

    def meet(self, peer: Progress) -> AbstractAsyncContextManager[MeetStream]:
        return self._stream(peer, lambda stub: stub.Meet())

    def reduce(self, peer: Progress) -> AbstractAsyncContextManager[ReduceStream]:
        return self._stream(peer, lambda stub: stub.Reduce())

    async def fetch(self, peer: Progress, request: pb.FetchRequest) -> AsyncIterator[pb.Chunk]:
        stub = await self.stub(_TRAINING, peer)
        async with translated():
            async for chunk in stub.Fetch(request):
                yield chunk

    async def state(self, peer: Progress, request: pb.StateRequest) -> AsyncIterator[pb.StatePart]:
        stub = await self.stub(_TRAINING, peer)
        async with translated():
            async for part in stub.State(request):
                yield part

    async def rounds(self, peer: Progress, request: pb.RoundsRequest) -> pb.RoundsReply:
        stub = await self.stub(_TRAINING, peer)
        async with translated():
            reply: pb.RoundsReply = await stub.Rounds(request)
            return reply

    async def is_gone(self, peer: Progress) -> bool:
        host, _, port = peer.address.rpartition(":")
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError, ValueError, OverflowError):  # the address comes from a stranger's record
            return False
        writer.close()
        return False

    async def close(self) -> None:
        await self._channels.close()

    @asynccontextmanager
    async def _stream(
        self, peer: Progress, opens: Callable[[ServiceStub], Any]
    ) -> AsyncIterator[_CallStream[Any, Any]]:
        stub = await self.stub(_TRAINING, peer)  # kept until the end, because the pool may forget its channel
        call = opens(stub)
        try:
            yield _CallStream(call)
        finally:
            call.cancel()

    async def stub(self, service: ServiceDescriptor, peer: Progress) -> ServiceStub:
        """Return a stub of one of the peer's services. Raise PeerUnavailable if the peer cannot be reached."""
        return ServiceStub(service, await self.channel(peer))

    async def channel(self, peer: Progress) -> grpc.aio.Channel:
        """Return the channel to a peer. Raise PeerUnavailable if the peer cannot be reached."""
        return await self._channels.to(peer.address, peer.tls_fingerprint, peer.peer_id)
