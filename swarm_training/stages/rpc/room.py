"""The room for trainers' requests at a stage peer. Requests beyond it are refused: trainers ask another peer then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swarm_protocol.errors import PeerBusy
from swarm_protocol.net.shares import HalfShares
from swarm_protocol.wire.constants import MIB


@dataclass(frozen=True)
class StageLimits:
    """The limits of one stage peer."""

    max_requests: int = 16  # the most requests that arrive, wait or are computed
    max_bytes: int = 1024 * MIB  # the most bytes of their tensors, as they travel
    max_tokens: int = 1 << 20  # the most tokens of one micro-batch, rows × positions
    read_s: float = 60.0  # the time in which a request must have arrived
    # The time after which a silent trainer counts as gone, and what it has not committed is dropped.
    silence_s: float = 120.0


class RequestReservation:
    """The bytes that are reserved for one request."""

    def __init__(self, shares: HalfShares, trainer: str) -> None:
        """Reserve nothing yet. ``shares`` counts the bytes of all requests."""
        self._shares = shares
        self._trainer = trainer
        self.size_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Reserve so many bytes more, as they are announced. Raises PeerBusy if there is no room for them."""
        shares = self._shares
        if not shares.fits(self._trainer, size_bytes):
            raise PeerBusy(
                f"no room for {size_bytes} bytes more of requests: {shares.used} of {shares.capacity} bytes are in "
                f"use, {shares.held(self._trainer)} of them by this trainer"
            )
        shares.add(self._trainer, size_bytes)
        self.size_bytes += size_bytes

    def release(self) -> None:
        """Give all bytes back."""
        self._shares.add(self._trainer, -self.size_bytes)


class RequestRoom:
    """The room for requests, and for the bytes of their tensors. No trainer has more than half of either."""

    def __init__(self, limits: StageLimits) -> None:
        self.requests = HalfShares(limits.max_requests)
        self.bytes = HalfShares(limits.max_bytes)

    @contextmanager
    def request(self, trainer: str) -> Iterator[RequestReservation]:
        """Yield the reservation of one more request. Raises PeerBusy if there are too many requests."""
        shares = self.requests
        if not shares.fits(trainer, 1):
            raise PeerBusy(
                f"this peer has {shares.used} requests, {shares.held(trainer)} of them from this trainer: "
                f"it takes {shares.capacity}, half of them from one"
            )
        shares.add(trainer, 1)
        reservation = RequestReservation(self.bytes, trainer)
        try:
            yield reservation
        finally:
            shares.add(trainer, -1)
            reservation.release()
