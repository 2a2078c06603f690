"""The limits of data that arrive or wait to be computed: a bound on their memory, and a lowest rate."""

from __future__ import annotations

import torch

from swarm_protocol.errors import PeerBusy, RequestRejected
from swarm_protocol.failures import Closing
from swarm_protocol.net.shares import Caller, Shares
from swarm_protocol.wire.codec import Assembler
from swarm_protocol.wire.constants import MIB, PART_BYTES

CAPACITY_BYTES = 768 * MIB  # a client's share holds the two tensors of the largest backward pass
STALL_TIMEOUT_S = 20.0
MIN_BYTES_PER_S = 16 * 1024.0  # several streams share a line of 1 Mbit/s
_NOBODY = Caller("")
_FEW_PARTS = 16  # allowed for a tensor of any size
_LEAST_PART_BYTES = PART_BYTES // 16  # on average; peers cut tensors at PART_BYTES


class Arrivals:
    """The memory of all requests that are still arriving or wait to be computed. Used on one event loop only.

    Each stream uses the view that ``of`` returns for its client, which may not take all the room.
    """

    def __init__(
        self,
        capacity_bytes: int = CAPACITY_BYTES,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        min_bytes_per_s: float = MIN_BYTES_PER_S,
        shares: Shares | None = None,
        client: Caller | None = None,
    ) -> None:
        """Create an empty memory, or the view of a ``client`` on the ``shares`` of all."""
        self.capacity_bytes = capacity_bytes
        self.stall_timeout_s = stall_timeout_s
        self.min_bytes_per_s = min_bytes_per_s
        self._shares = shares or Shares(capacity_bytes)
        self._client = client

    @property
    def used_bytes(self) -> int:
        return self._shares.used

    def of(self, caller: Caller) -> Arrivals:
        """Return the view for one client."""
        return Arrivals(self.capacity_bytes, self.stall_timeout_s, self.min_bytes_per_s, self._shares, caller)

    def take(self, size_bytes: int) -> None:
        """Reserve bytes. Raise PeerBusy if there is no room."""
        fits, of_client = self.used_bytes + size_bytes <= self.capacity_bytes, ""
        if self._client is not None:
            fits = self._shares.fits(self._client, size_bytes)
            of_client = f", {self._shares.held(self._client)} of them by this client"
        if not fits:
            raise PeerBusy(
                f"no room for {size_bytes} bytes more of requests that are arriving: {self.used_bytes} of "
                f"{self.capacity_bytes} bytes are in use{of_client}"
            )
        self._shares.add(self._client or _NOBODY, size_bytes)

    def give_back(self, size_bytes: int) -> None:
        self._shares.add(self._client or _NOBODY, -size_bytes)

    def pace(self) -> TransferDeadline:
        """Return the pace of one request."""
        return TransferDeadline(self.stall_timeout_s, self.min_bytes_per_s)


class TransferDeadline:
    """The time that the rest of a request may take.

    A sender may be silent for ``stall_timeout_s`` plus the time of one part at the lowest rate. Data that come at
    that rate or faster may continue for ever.

    Attributes:
        left_s: the time to wait for the next message.
    """

    def __init__(self, stall_timeout_s: float, min_bytes_per_s: float) -> None:
        self._most_s = self.left_s = stall_timeout_s + PART_BYTES / min_bytes_per_s
        self._min_bytes_per_s = min_bytes_per_s

    def received(self, size_bytes: int, waited_s: float) -> None:
        self.left_s = min(self._most_s, self.left_s - waited_s + size_bytes / self._min_bytes_per_s)


class ByteReservation(Closing):
    """Bytes that count as used until the reservation is closed; also a context manager."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._size_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Reserve more bytes. Raise PeerBusy if there is no room."""
        self._arrivals.take(size_bytes)
        self._size_bytes += size_bytes

    def close(self) -> None:
        self._arrivals.give_back(self._size_bytes)
        self._size_bytes = 0


class ArrivingTensor(Closing):
    """A tensor whose parts count as used memory while they arrive, until it is closed; also a context manager.

    Raises:
        PeerBusy: at construction and in ``add``, if there is no room.
    """

    def __init__(self, arrivals: Arrivals, assembler: Assembler) -> None:
        """Create the tensor. It counts even if it came in one part, since it waits to be computed."""
        self._assembler = assembler
        self._reservation = ByteReservation(arrivals)
        self._reservation.take(assembler.received_bytes)
        self._parts_left = _FEW_PARTS + assembler.size_bytes // _LEAST_PART_BYTES

    @property
    def complete(self) -> bool:
        return self._assembler.complete

    def add(self, part: bytes) -> None:
        """Add a part. Raise RequestRejected if it is empty, there are too many, or more comes than was announced."""
        self._parts_left -= 1
        if not part:
            raise RequestRejected("a part of a tensor is empty")
        if self._parts_left < 0:
            raise RequestRejected(f"a tensor comes in very many parts: expected parts of {PART_BYTES} bytes")
        self._reservation.take(len(part))
        self._assembler.add(part)

    def tensor(self) -> torch.Tensor:
        return self._assembler.tensor()

    def close(self) -> None:
        self._reservation.close()
