"""The speed of a peer, however often it is asked: what the peer announces, and what trainers make of it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median

FORWARD, BACKWARD = "forward", "backward"
SHARES = {FORWARD: 0.25, BACKWARD: 0.75}  # of a micro-batch's time: backward repeats forward, then takes twice as long
_MOST = 100.0  # the most that is believed, as a multiple of the median speed
_MEMORY = 0.9  # the weight of all passes before the newest


class ComputeSpeed:
    """The micro-batches per second that a peer could compute: from the time of its passes, not from their number.

    If the number counted, a peer that is asked less would announce less, and be asked less still.
    """

    def __init__(self) -> None:
        self._micro_batches = 0.0
        self._seconds = 0.0

    def note(self, share: float, took_s: float) -> None:
        """Record that a pass of this share of a micro-batch has been computed."""
        self._micro_batches = _MEMORY * self._micro_batches + share
        self._seconds = _MEMORY * self._seconds + took_s

    @property
    def per_s(self) -> float:
        """Return the speed; 0: nothing has been computed yet."""
        return self._micro_batches / self._seconds if self._seconds > 0 else 0.0


def believed(announced: Mapping[str, float], candidates: Collection[str]) -> dict[str, float]:
    """Return the candidates' speeds: the median for candidates that have announced none, and 1 if none has.

    No peer is believed to be more than 100 times as fast as the median, or as slow: an announcement may be anything.
    """
    known = {peer: announced[peer] for peer in candidates if announced.get(peer, 0.0) > 0}
    usual = median(known.values()) if known else 1.0
    return {peer: min(max(known.get(peer, usual), usual / _MOST), usual * _MOST) for peer in candidates}
