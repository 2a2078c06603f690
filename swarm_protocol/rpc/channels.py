"""Channels to peers, each verified by the TLS certificate in the peer's signed record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import grpc

from swarm_protocol.errors import BadReply, PeerUnavailable, SwarmError
from swarm_protocol.net.tls import ClientCredentials, pinned_channel
from swarm_protocol.rpc.shared import has_result, num_cancellations, result_of
from swarm_protocol.wire.constants import CLIENT_OPTIONS
from swarm_protocol.wire.status import CUT_OFF, FirstStatus, from_status

_CONNECT_TIMEOUT_S = 3.0
_LOST = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
Connect = Callable[[str, bytes, list[tuple[str, int]], float], Awaitable[grpc.aio.Channel]]


class SharedChannels:
    """A pool of channels that stay open while they are connected. Used on one event loop."""

    def __init__(self, connect: Connect, options: list[tuple[str, int]]) -> None:
        """Create a pool; ``connect`` is ``pinned_channel`` with credentials, or ``Dialer.connect``."""
        self._connect, self._options = connect, options
        self._channels: dict[tuple[str, bytes], asyncio.Task[grpc.aio.Channel]] = {}
        self._seen_ready: set[asyncio.Task[grpc.aio.Channel]] = set()
        self._is_closed = False

    async def _channel(self, fingerprint: bytes, address: str, peer_id: str = "") -> grpc.aio.Channel:
        """Return a channel; callers share one attempt to connect, which continues even if no caller waits any more."""
        key = address, fingerprint
        if key not in self._channels:
            self._channels[key] = connecting = asyncio.ensure_future(
                self._connect(address, fingerprint, self._options, _CONNECT_TIMEOUT_S)
            )
            connecting.add_done_callback(partial(self._forget_failure, key))
        return await result_of(self._channels[key], peer_id)

    def _forget_failure(self, key: tuple[str, bytes], connecting: asyncio.Task[grpc.aio.Channel]) -> None:
        """Remove a connection that failed, even if nobody waits for it any more, so that the next call tries again."""
        if not has_result(connecting) and self._channels.get(key) is connecting:
            del self._channels[key]

    def _forget_lost(self) -> None:
        """Remove channels that are idle, or whose peer is gone or has moved. A stub keeps its own channel alive.

        A channel connects with its first call.
        """
        for key, connecting in list(self._channels.items()):
            state = connecting.result().get_state() if has_result(connecting) else None
            if state is grpc.ChannelConnectivity.READY:
                self._seen_ready.add(connecting)
            elif state in _LOST or connecting in self._seen_ready:
                del self._channels[key]
        self._seen_ready.intersection_update(self._channels.values())

    async def close(self) -> None:
        self._is_closed = True
        while self._channels:  # more may be added while one is closed
            _, connecting = self._channels.popitem()
            connecting.cancel()
            await asyncio.wait([connecting])
            if has_result(connecting):
                await connecting.result().close()


class PinnedChannels(SharedChannels):
    """A pool of channels to peers at known addresses."""

    def __init__(self, credentials: ClientCredentials) -> None:
        super().__init__(partial(pinned_channel, credentials), CLIENT_OPTIONS)

    async def to(self, address: str, tls_fingerprint: bytes, peer_id: str) -> grpc.aio.Channel:
        """Return the channel to ``HOST:PORT``; raise PeerUnavailable if the peer is not reached, or the pool is closed.

        Create a stub for the channel without awaiting in between: with a closed channel, gRPC ends the process. Keep
        the stub while a call lasts: the pool forgets the channels of peers that end.
        """
        if not self._is_closed:
            self._forget_lost()
            try:
                channel = await self._channel(tls_fingerprint, address, peer_id)
            except (PeerUnavailable, BadReply) as error:
                raise PeerUnavailable(str(error), peer_id) from None
            if not self._is_closed:
                return channel
        raise PeerUnavailable("the connections to other peers are closed", peer_id)


@asynccontextmanager
async def translated(peer_id: str = "", first: FirstStatus | None = None) -> AsyncIterator[None]:
    """Raise gRPC's errors as SwarmErrors of this peer; ``first``: the first status of a call that is written to.

    If the task is cancelled while the call fails, CancelledError is raised, because the canceller waits for the end.
    """
    num_before = num_cancellations()
    try:
        yield
    except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        if num_cancellations() > num_before:
            raise asyncio.CancelledError from None
        if isinstance(error, grpc.aio.AioRpcError):
            raise await _error_of(error.code(), error.details() or "", peer_id, first) from None
        if isinstance(error, asyncio.InvalidStateError | grpc.aio.InternalError):  # the stream has ended
            raise await _error_of(*CUT_OFF, peer_id, first) from None
        raise PeerUnavailable(str(error), peer_id) from None


async def _error_of(code: grpc.StatusCode, details: str, peer_id: str, first: FirstStatus | None) -> SwarmError:
    if first is not None:
        code, details = await first.instead_of(code, details)
    return from_status(code, details, peer_id)
