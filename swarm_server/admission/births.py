"""The times at which sessions were first asked for."""

from __future__ import annotations

_MOST_CLOCK_S = 1e12  # a clock value beyond this, or NaN, is ignored
# The largest difference between a client's clock and the age that it reports, with the request's travel time.
_MOST_OFF_S = 5.0
_MOST_CLIENTS = 1024  # whose clocks are remembered


class Births:
    """The time at which each session was first asked for, by this server's clock, so that clients can be compared.

    A client sends a session's age with the request. Simultaneous requests of one client travel for different times,
    though, so a client's own sessions are ordered by the client's clock. The class is pure: no clock, no I/O.
    """

    def __init__(self) -> None:
        # By peer id: this server's clock minus the client's. The most recently used client is last.
        self._offsets: dict[str, float] = {}

    def born_s(self, client: str, arrived_s: float, age_s: float, asked_s: float) -> float:
        """Return the time at which a client first asked for a session.

        Args:
            arrived_s: the time at which the request reached this server.
            age_s: the age of the session when the request was sent.
            asked_s: the time of the first request, by the client's clock; 0 if the client does not report it.
        """
        born_s = arrived_s - age_s
        if not 0 < abs(asked_s) < _MOST_CLOCK_S:
            return born_s
        offset = self._offsets.pop(client, born_s - asked_s)
        if abs(asked_s + offset - born_s) > _MOST_OFF_S:  # another process of that client, or it was started again
            offset = born_s - asked_s
        self._offsets[client] = offset
        if len(self._offsets) > _MOST_CLIENTS:
            del self._offsets[next(iter(self._offsets))]
        return asked_s + offset
