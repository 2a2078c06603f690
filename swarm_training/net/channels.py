"""Calls of other peers over gRPC. Each is known by the TLS certificate that its signed record promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any, Generic, TypeVar

import grpc

from swarm_protocol.errors import BadReply, PeerUnavailable, SwarmError
from swarm_protocol.net.tls import ClientCredentials, pinned_channel
from swarm_protocol.wire.constants import CLIENT_OPTIONS
from swarm_protocol.wire.status import from_status
from swarm_training.core.network import MeetTalk, ReduceTalk
from swarm_training.core.record import Progress
from swarm_training.pb import training_pb2 as pb
from swarm_training.pb.training_pb2_grpc import TrainingStub

Out = TypeVar("Out")
In = TypeVar("In")
_CONNECT_TIMEOUT_S = 3.0
_PROBE_TIMEOUT_S = 1.0


class _CallTalk(Generic[Out, In]):
    """The caller's side of a stream."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, message: Out) -> None:
        with translated():
            await self._call.write(message)

    async def receive(self) -> In | None:
        with translated():
            message = await self._call.read()
            if message is grpc.aio.EOF:
                code = await self._call.code()
                if code is not grpc.StatusCode.OK:
                    raise from_status(code, await self._call.details())
                return None
            received: In = message
            return received

    async def finish(self) -> None:
        with translated():
            await self._call.done_writing()


class GrpcNetwork:
    """Channels are kept open."""

    def __init__(self, credentials: ClientCredentials) -> None:
        self._credentials = credentials
        self._channels: dict[tuple[str, bytes], asyncio.Task[grpc.aio.Channel]] = {}

    async def exchange(self, peer: Progress, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        stub = await self._stub(peer)
        with translated():
            reply: pb.ExchangeReply = await stub.Exchange(request)
            return reply

    def meet(self, peer: Progress) -> AbstractAsyncContextManager[MeetTalk]:
        return self._stream(peer, lambda stub: stub.Meet())

    def reduce(self, peer: Progress) -> AbstractAsyncContextManager[ReduceTalk]:
        return self._stream(peer, lambda stub: stub.Reduce())

    async def fetch(self, peer: Progress, request: pb.FetchRequest) -> AsyncIterator[pb.Chunk]:
        stub = await self._stub(peer)
        with translated():
            async for chunk in stub.Fetch(request):
                yield chunk

    async def state(self, peer: Progress, request: pb.StateRequest) -> AsyncIterator[pb.StatePart]:
        stub = await self._stub(peer)
        with translated():
            async for part in stub.State(request):
                yield part

    async def rounds(self, peer: Progress, request: pb.RoundsRequest) -> pb.RoundsReply:
        stub = await self._stub(peer)
        with translated():
            reply: pb.RoundsReply = await stub.Rounds(request)
            return reply

    async def is_gone(self, peer: Progress) -> bool:
        host, _, port = peer.address.rpartition(":")
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError, ValueError):
            return False
        writer.close()
        return False

    async def close(self) -> None:
        for connecting in self._channels.values():
            connecting.cancel()
            with suppress(asyncio.CancelledError, SwarmError):
                await (await connecting).close()
        self._channels.clear()

    @asynccontextmanager
    async def _stream(self, peer: Progress, opens: Callable[[TrainingStub], Any]) -> AsyncIterator[_CallTalk[Any, Any]]:
        call = opens(await self._stub(peer))
        try:
            yield _CallTalk(call)
        finally:
            call.cancel()

    async def channel(self, peer: Progress) -> grpc.aio.Channel:
        """Raises PeerUnavailable if the peer cannot be reached."""
        key = peer.address, peer.tls_fingerprint
        if key not in self._channels:
            self._channels[key] = asyncio.ensure_future(self._connect(peer))
        connecting = self._channels[key]
        try:
            return await asyncio.shield(connecting)
        except (PeerUnavailable, BadReply) as error:
            if self._channels.get(key) is connecting:
                del self._channels[key]
            raise PeerUnavailable(str(error), peer.peer_id) from None

    async def _stub(self, peer: Progress) -> TrainingStub:
        return TrainingStub(await self.channel(peer))  # type: ignore[no-untyped-call]

    def _connect(self, peer: Progress) -> Awaitable[grpc.aio.Channel]:
        return pinned_channel(self._credentials, peer.address, peer.tls_fingerprint, CLIENT_OPTIONS, _CONNECT_TIMEOUT_S)


@contextmanager
def translated() -> Iterator[None]:
    """gRPC's errors as ours."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_status(error.code(), error.details() or "") from None
    except grpc.aio.BaseError as error:
        raise PeerUnavailable(str(error)) from None
    except asyncio.InvalidStateError:  # the stream has ended
        raise PeerUnavailable("the stream has ended") from None
