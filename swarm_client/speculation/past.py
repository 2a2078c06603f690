"""What sliding windows keep for guesses that may be wrong: nothing before there are any, and little that is settled."""

from __future__ import annotations

from swarm_client.sessions.session import RemoteSession

_MOST_PASSES = 32  # without guesses, whose positions windows keep in vain


class Past:
    """Of one session. To be told of all its passes from the prompt on."""

    def __init__(self, session: RemoteSession) -> None:
        self._session = session
        self._num_plain = -1  # passes since guesses were verified; the first one may be that of a long prompt

    def keep(self) -> None:
        """Before a pass with guesses: what comes from now on may be cropped."""
        if not self._session.records_past:
            self._session.record_past()

    def settle(self, num_guesses: int, num_right: int) -> None:
        """After a pass: wrong guesses are cropped, and windows may forget what is right."""
        self._num_plain = 0 if num_guesses else self._num_plain + 1
        if num_guesses or (self._session.records_past and self._num_plain % _MOST_PASSES == 0):
            self._session.crop(num_guesses - num_right)
