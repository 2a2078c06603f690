"""When sessions were asked for."""

from __future__ import annotations

_MOST_CLOCK_S = 1e12  # beyond, and for what is no number, a clock means nothing
_MOST_OFF_S = (
    5.0  # of what a client says of its clock from what it says of a session's age: a request travels meanwhile
)
_MOST_CLIENTS = 1024


class Births:
    """When each session was first asked for, by this server's clock, so that clients can be compared.

    A client says how old a session is when it sends the request. Many requests of one client at once travel for
    different times, though, so the order of its own sessions is that of its clock. Pure.
    """

    def __init__(self) -> None:
        self._offsets: dict[str, float] = {}  # of clients' clocks, by peer id; the latest last

    def born_s(self, client: str, arrived_s: float, age_s: float, asked_s: float) -> float:
        """Return when a session of a client was first asked for.

        Args:
            arrived_s: when its request came here.
            age_s: how old the session was when the request was sent.
            asked_s: when it was first asked for, by the client's clock; 0: the client does not say.
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
