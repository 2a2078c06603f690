"""Limits on the number and the duration of connections whose next request is incomplete.

Without limits, connections that send nothing, or send slowly, could hold all file descriptors of the process. The same
is true of connections that stay open after an answer, such as a refusal.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_REQUEST_S = 60.0  # the longest that a request may take to arrive
_MOST = 1024  # incomplete requests at the same time
_SHARE = 4  # one in so many file descriptors is for incomplete requests


class IncomingRequests:
    """The incomplete requests of a process. Connections that take too long are closed, and the oldest one if there are
    too many."""

    def __init__(self, most: int, timeout_s: float = _REQUEST_S) -> None:
        self._most = most
        self._timeout_s = timeout_s
        self._timers: dict[asyncio.Transport, asyncio.TimerHandle] = {}  # the oldest first

    @classmethod
    def of_this_process(cls) -> IncomingRequests:
        """Return a limit that fits the file descriptors of this process."""
        try:
            import resource
        except ImportError:  # on Windows, which has no such limit
            return cls(_MOST)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(_MOST if soft == resource.RLIM_INFINITY else max(1, min(_MOST, soft // _SHARE)))

    def begins(self, transport: asyncio.Transport) -> None:
        """Start the time limit for the next request. A second call before that request is complete does nothing."""
        if transport in self._timers:
            return
        if len(self._timers) >= self._most:
            self._close(next(iter(self._timers)))
        self._timers[transport] = asyncio.get_running_loop().call_later(self._timeout_s, self._close, transport)

    def ends(self, transport: asyncio.Transport) -> None:
        """Stop the time limit, because the request is complete or the connection is closed."""
        if (timer := self._timers.pop(transport, None)) is not None:
            timer.cancel()

    def _close(self, transport: asyncio.Transport) -> None:
        self.ends(transport)
        transport.close()


def protocol_of(requests: IncomingRequests) -> type[asyncio.Protocol]:
    """Return the protocol class that uvicorn uses for each connection, for ``uvicorn.Config(http=...)``."""

    class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        transport: asyncio.Transport
        cycle: Any  # the last request whose headers have arrived; None before

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            requests.begins(transport)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
                if not self.transport.is_closing():
                    requests.begins(self.transport)
            else:
                requests.ends(self.transport)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete and not self.transport.is_closing():  # else the next one has begun
                requests.begins(self.transport)

        def connection_lost(self, error: Exception | None) -> None:
            requests.ends(self.transport)
            super().connection_lost(error)

    return Protocol
