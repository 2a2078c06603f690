"""The room for trainers' requests at a stage peer: what is beyond that goes to another peer at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swarm_protocol.errors import PeerBusy
from swarm_protocol.wire.constants import MIB


@dataclass(frozen=True)
class StageLimits:
    """The limits of one stage peer.

    Attributes:
        max_requests: the most requests that arrive, wait or are computed.
        max_bytes: the most bytes of their tensors, as they travel.
        max_tokens: the most tokens of one micro-batch, rows × positions.
        read_s: the time in which a request must have arrived.
        silence_s: the time after which a silent trainer counts as gone, and what it has not committed is dropped.
    """

    max_requests: int = 16
    max_bytes: int = 1024 * MIB
    max_tokens: int = 1 << 20
    read_s: float = 60.0
    silence_s: float = 120.0


class RequestReservation:
    """The bytes that are reserved for one request."""

    def __init__(self, room: RequestRoom, trainer: str) -> None:
        self._room = room
        self._trainer = trainer
        self.size_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Reserve so many bytes more, as they are announced. Raises PeerBusy if there is no room for them."""
        self._room._take(self._trainer, size_bytes)
        self.size_bytes += size_bytes


class RequestRoom:
    """The room for requests. No trainer has more than half of it, so that a broken one does not keep the others out."""

    def __init__(self, limits: StageLimits) -> None:
        self._limits = limits
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @property
    def num_requests(self) -> int:
        return self._requests.total()

    @property
    def used_bytes(self) -> int:
        return self._bytes.total()

    @contextmanager
    def request(self, trainer: str) -> Iterator[RequestReservation]:
        """Yield the reservation of one more request. Raises PeerBusy if there are too many requests."""
        most = self._limits.max_requests
        if self.num_requests >= most or self._requests[trainer] >= max(1, most // 2):
            raise PeerBusy(
                f"this peer has {self.num_requests} requests, {self._requests[trainer]} of them from this trainer: "
                f"it takes {most}, half of them from one"
            )
        self._requests[trainer] += 1
        reservation = RequestReservation(self, trainer)
        try:
            yield reservation
        finally:
            self._requests -= Counter({trainer: 1})  # removes a trainer without requests
            self._bytes -= Counter({trainer: reservation.size_bytes})

    def _take(self, trainer: str, size_bytes: int) -> None:
        most = self._limits.max_bytes
        if self.used_bytes + size_bytes > most or self._bytes[trainer] + size_bytes > max(1, most // 2):
            raise PeerBusy(
                f"no room for {size_bytes} bytes more of requests: {self.used_bytes} of {most} bytes are in use, "
                f"{self._bytes[trainer]} of them by this trainer"
            )
        self._bytes[trainer] += size_bytes
