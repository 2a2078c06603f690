"""Channels to peers, each verified by the TLS certificate in the peer's signed record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc

from swarm_protocol.errors import BadReply, PeerUnavailable, SwarmError
from swarm_protocol.net.tls import ClientCredentials, pinned_channel
from swarm_protocol.rpc.shared import num_cancellations, result_of
from swarm_protocol.wire.constants import CLIENT_OPTIONS
from swarm_protocol.wire.status import CUT_OFF, FirstStatus, from_status

_CONNECT_TIMEOUT_S = 3.0


class PinnedChannels:
    """A pool of channels that stay open; concurrent callers share one connection attempt. Used on one event loop."""

    def __init__(self, credentials: ClientCredentials) -> None:
        self._credentials = credentials
        self._channels: dict[tuple[str, bytes], asyncio.Task[grpc.aio.Channel]] = {}
        self._is_closed = False

    async def to(self, address: str, tls_fingerprint: bytes, peer_id: str) -> grpc.aio.Channel:
        """Return the channel to ``HOST:PORT``; raise PeerUnavailable if the peer is not reached, or the pool is closed.

        Create a stub for the channel without awaiting in between: with a closed channel, gRPC ends the process.
        """
        if self._is_closed:
            raise _closed(peer_id)
        key = address, tls_fingerprint
        if key not in self._channels:
            opening = pinned_channel(self._credentials, address, tls_fingerprint, CLIENT_OPTIONS, _CONNECT_TIMEOUT_S)
            self._channels[key] = asyncio.ensure_future(opening)
        connecting = self._channels[key]
        try:
            channel = await result_of(connecting, peer_id)
        except (PeerUnavailable, BadReply) as error:
            if self._channels.get(key) is connecting:
                del self._channels[key]
            raise PeerUnavailable(str(error), peer_id) from None
        if self._is_closed:
            raise _closed(peer_id)
        return channel

    async def close(self) -> None:
        self._is_closed = True
        while self._channels:
            _, connecting = self._channels.popitem()
            connecting.cancel()
            with suppress(asyncio.CancelledError, SwarmError):
                await (await connecting).close()


def _closed(peer_id: str) -> PeerUnavailable:
    return PeerUnavailable("the connections to other peers are closed", peer_id)


@asynccontextmanager
async def translated(peer_id: str = "", first: FirstStatus | None = None) -> AsyncIterator[None]:
    """Raise gRPC's errors as SwarmErrors of this peer; ``first``: the first status of a call that is written to.

    If the task is cancelled while the call fails, CancelledError is raised: who cancels a task waits for its end.
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
