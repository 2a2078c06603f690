"""The past positions that sliding windows keep so that wrong guesses can be cropped.

Windows keep nothing until the first guess, and later only a few positions that no crop needs any more.
"""

from __future__ import annotations

from swarm_client.sessions.session import RemoteSession

_MOST_PASSES = 32  # passes without guesses whose positions windows keep needlessly


class Past:
    """The kept past of one session. Its owner reports all passes from the prompt on."""

    def __init__(self, session: RemoteSession) -> None:
        self._session = session
        self._num_plain = -1  # passes since guesses were verified; the first one may be that of a long prompt

    def keep(self) -> None:
        """Prepare for a pass with guesses: later positions may be cropped."""
        if not self._session.records_past:
            self._session.record_past()

    def settle(self, num_guesses: int, num_right: int) -> None:
        """Crop wrong guesses after a pass. Windows may then forget the past that no crop needs any more."""
        self._num_plain = 0 if num_guesses else self._num_plain + 1
        # A crop of 0 positions changes nothing but the past: the windows forget what lies before them.
        if num_guesses or (self._session.records_past and self._num_plain % _MOST_PASSES == 0):
            self._session.crop(num_guesses - num_right)
