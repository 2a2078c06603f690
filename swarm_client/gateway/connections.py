"""Connections whose next request has not come whole: how many there may be at a time, and for how long.

Whoever opens many and sends nothing, or little by little, would otherwise hold all file descriptors of the process. So
would those who have been answered, by a refusal for instance, and stay.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_REQUEST_S = 60.0  # that a request may take to come
_MOST = 1024  # requests that come at a time
_SHARE = 4  # of the file descriptors, one in so many is for them


class IncomingRequests:
    """Closes connections whose request takes too long to come, and the oldest of them if there are too many."""

    def __init__(self, most: int, timeout_s: float = _REQUEST_S) -> None:
        self._most = most
        self._timeout_s = timeout_s
        self._timers: dict[asyncio.Transport, asyncio.TimerHandle] = {}  # the oldest first

    @classmethod
    def of_this_process(cls) -> IncomingRequests:
        """As many as it has file descriptors for."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(_MOST if soft == resource.RLIM_INFINITY else max(1, min(_MOST, soft // _SHARE)))

    def begins(self, transport: asyncio.Transport) -> None:
        """A request is expected there. Called once more before it is whole, this changes nothing."""
        if transport in self._timers:
            return
        if len(self._timers) >= self._most:
            self._close(next(iter(self._timers)))
        self._timers[transport] = asyncio.get_running_loop().call_later(self._timeout_s, self._close, transport)

    def ends(self, transport: asyncio.Transport) -> None:
        """The request is whole, or the connection is closed."""
        if (timer := self._timers.pop(transport, None)) is not None:
            timer.cancel()

    def _close(self, transport: asyncio.Transport) -> None:
        self.ends(transport)
        transport.close()


def protocol_of(requests: IncomingRequests) -> type[asyncio.Protocol]:
    """What uvicorn makes of each connection, for ``uvicorn.Config(http=...)``."""

    class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        transport: asyncio.Transport
        cycle: Any  # of the last request whose headers are there; None: of none

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
            if self.cycle.response_complete and not self.transport.is_closing():  # else the next request is there
                requests.begins(self.transport)

        def connection_lost(self, error: Exception | None) -> None:
            requests.ends(self.transport)
            super().connection_lost(error)

    return Protocol
