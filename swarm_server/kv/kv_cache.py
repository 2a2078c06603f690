"""The budget of the KV cache in bytes, which the server hands out in leases and shares fairly between clients."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

from swarm_protocol.errors import PeerBusy
from swarm_protocol.failures import call_after

_NEWCOMERS = 4  # a client with its fair share leaves one part in this many to clients with less


class NoRoom(PeerBusy):
    """The error that the KV cache has no room.

    Attributes:
        missing_bytes: how many more bytes would have to be free.
        has_its_share: whether there is room, but only for clients that hold less than this client.
    """

    def __init__(self, message: str, missing_bytes: int, has_its_share: bool = False) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.has_its_share = has_its_share


class CacheBudget:
    """The bytes of keys and values that the server may hold.

    Room is promised before it is used, so that memory never runs out in the middle of a step. Memory without a lease
    that a session may still reuse (see ``prefix_cache``) is kept until the room is needed. Thread-safe.

    Attributes:
        reclaim: gives up a little of the kept memory, the oldest first; returns False if nothing is kept.
        lock: the lock that guards the budget and its leases; it is held while ``reclaim`` runs.
    """

    def __init__(self, capacity_bytes: int, token_bytes: int) -> None:
        """Start empty. ``token_bytes``: bytes of one position in all hosted blocks, only for log lines and records."""
        self.capacity_bytes = capacity_bytes
        self._token_bytes = max(1, token_bytes)
        self._charged = 0
        self._promised = 0  # the charged bytes that reclaiming cannot free
        self._by_client: dict[str, int] = {}
        self._released: deque[Charge] = deque()  # charges whose owners have died
        self.lock = threading.RLock()
        self._kept = Lease(self, "")
        self.reclaim: Callable[[], bool] = lambda: False

    def reclaim_by(self, reclaim: Callable[[], bool]) -> None:
        """Make room by ``reclaim`` from now on."""
        self.reclaim = reclaim

    @property
    def tokens_left(self) -> int:
        """Return how many positions a new session over all hosted blocks could still get."""
        return self.bytes_left // self._token_bytes

    @property
    def bytes_left(self) -> int:
        """Return the bytes that no session holds, whether they are kept for reuse or unused."""
        with self.lock:
            self._settle()
            return max(0, self.capacity_bytes - self._charged + self._kept._counted)

    @property
    def capacity_tokens(self) -> int:
        """Return how many positions over all hosted blocks fit into the whole budget."""
        return self.capacity_bytes // self._token_bytes

    def lease(self, client: str, promised_bytes: int = 0) -> Lease:
        """Return a lease for ``client``; raise NoRoom if there is no room for ``promised_bytes``."""
        lease = Lease(self, client)
        lease.promise(promised_bytes)
        return lease

    def keep(self, size_bytes: int, owner: object, evict: Callable[[], bool]) -> Charge:
        """Charge memory that ``owner`` holds while it lives, and that ``reclaim`` gives up when room is needed.

        ``evict``: gives up a little memory to make room for the new memory, like ``reclaim``.

        Raises:
            NoRoom: there is no room even after evicting.
        """
        with self.lock:
            self._make_room("", lambda: size_bytes, self._promised + size_bytes, evict)
            return self._kept.take(size_bytes, owner)

    def _settle(self) -> None:
        """Subtract memory whose owners have died. The caller holds the lock."""
        while self._released:
            self._released.popleft().shrink(0)

    def _charge(self, amount: int, client: str, promised: int = 0) -> None:
        """Count charged and promised bytes of a client, which may be negative."""
        self._charged += amount
        self._promised += promised
        held = self._by_client.get(client, 0) + amount
        if held:
            self._by_client[client] = held
        else:
            self._by_client.pop(client, None)

    def _make_room(
        self, client: str | None, needed: Callable[[], int], least: int, reclaim: Callable[[], bool]
    ) -> None:
        """Call ``reclaim`` until ``needed()`` more bytes fit; raise NoRoom if reclaiming cannot help.

        Args:
            client: the client that must leave room for other clients; None if it need not.
            least: the bytes that would still be charged if all kept memory were given up.
        """
        while True:
            self._settle()
            amount = needed()
            limit = self.capacity_bytes if client is None else self._limit(amount, client)
            if amount <= 0 or self._charged + amount <= limit:
                return
            if least > self.capacity_bytes or not reclaim():
                has_its_share = limit < self.capacity_bytes
                whose = " for a client that has its share already" if has_its_share else ""
                missing = self._charged - self._kept._counted + amount - limit
                raise NoRoom(self.described(amount, limit) + whose, max(1, missing), has_its_share)

    def described(self, size_bytes: int, limit: int | None = None) -> str:
        """Return a message that ``size_bytes`` more do not fit, with the room that is left up to ``limit``."""
        limit = self.capacity_bytes if limit is None else limit
        left = max(0, limit - self._charged + self._kept._counted) // self._token_bytes
        return (
            f"no room for {-(-size_bytes // self._token_bytes)} more tokens in the KV cache: "
            f"{left} of {self.capacity_tokens} are left"
        )

    def never(self, size_bytes: int) -> NoRoom:
        """Return the error for a request that is larger than the whole budget."""
        num_tokens = -(-size_bytes // self._token_bytes)
        return NoRoom(
            f"no room for {num_tokens} tokens in the KV cache, which has {self.capacity_tokens} in all",
            size_bytes - self.capacity_bytes,
        )

    def _limit(self, amount: int, client: str) -> int:
        num_clients, held = len({*self._by_client, client} - {""}), self._by_client.get(client, 0)
        is_newcomer = client and not held  # the others leave room for it
        if num_clients > 1 and not is_newcomer and held + amount > self.capacity_bytes // num_clients:
            return self.capacity_bytes - self.capacity_bytes // _NEWCOMERS
        return self.capacity_bytes


class Lease:
    """One session's room: the promised bytes, or the held bytes if these are more.

    Attributes:
        is_let_in: whether the lease may grow into all free room, so that an admitted session can finish; only new
            sessions must respect fair shares.
    """

    def __init__(self, budget: CacheBudget, client: str) -> None:
        self.is_let_in = False
        self._budget = budget
        self._client = client
        self._promised = 0
        self._held = 0
        self._charges: weakref.WeakSet[Charge] = weakref.WeakSet()

    def let_in(self) -> None:
        """Let the lease grow into all free room from now on, because its session is admitted."""
        self.is_let_in = True

    @property
    def charged(self) -> int:
        """Return the bytes that count against the budget."""
        with self._budget.lock:
            self._budget._settle()
        return self._counted

    @property
    def _counted(self) -> int:
        return max(self._promised, self._held)

    def promise(self, size_bytes: int) -> None:
        """Promise room for ``size_bytes`` in total; raise NoRoom and change nothing if there is none."""
        self._grow(size_bytes, 0)

    def take(self, size_bytes: int, owner: object) -> Charge:
        """Charge memory that ``owner`` holds for as long as it lives; raise NoRoom if there is no room."""
        with self._budget.lock:
            self._grow(0, size_bytes)
            charge = Charge(self, size_bytes)
            self._charges.add(charge)
            call_after(owner, charge.release)
            return charge

    @property
    def held(self) -> int:
        """Return the bytes of memory that the session holds."""
        with self._budget.lock:
            self._budget._settle()
            return self._held

    def release_unused(self) -> None:
        """Give back the promised bytes that are not held."""
        with self._budget.lock:
            self._set(0, self._held)

    def close(self) -> None:
        """Give the promise back. Memory that other sessions use, or that is kept for reuse, stays charged."""
        with self._budget.lock:
            self._budget._settle()
            kept = self._budget._kept
            for charge in list(self._charges):
                if charge.size_bytes:
                    charge.move_to(kept)
            self._set(0, 0)
            self._charges.clear()

    def _grow(self, promised: int, more: int) -> None:
        budget = self._budget
        with budget.lock:
            budget._settle()
            if self._client:  # ``keep`` makes room itself for memory that belongs to no client
                # Reclaiming may free this lease's own memory, so the need is computed again each time.
                budget._make_room(
                    None if self.is_let_in else self._client,
                    lambda: max(promised, self._promised, self._held + more) - self._counted,
                    budget._promised - self._promised + max(promised, self._promised, more),
                    budget.reclaim,
                )
            self._set(max(promised, self._promised), self._held + more)

    def _receive(self, charge: Charge) -> None:
        """Count a charge that was another lease's. The caller holds the lock."""
        self._charges.add(charge)
        self._held += charge.size_bytes
        self._budget._charge(charge.size_bytes, self._client)

    def _set(self, promised: int, held: int) -> None:
        self._budget._charge(max(promised, held) - self._counted, self._client, promised - self._promised)
        self._promised, self._held = promised, held


class Charge:
    """An amount of memory that counts against a lease."""

    def __init__(self, lease: Lease, size_bytes: int) -> None:
        self.lease = lease
        self.size_bytes = size_bytes

    def release(self) -> None:
        """Mark the memory as freed. Idempotent. Takes no lock: garbage collection may run while a lock is held."""
        self.lease._budget._released.append(self)

    def move_to(self, lease: Lease) -> None:
        """Count the memory against another lease from now on. The caller holds the lock."""
        self.lease = lease
        lease._receive(self)

    def shrink(self, size_bytes: int) -> None:
        """Reduce the charge to ``size_bytes``."""
        with self.lease._budget.lock:
            self.lease._set(self.lease._promised, self.lease._held - self.size_bytes + size_bytes)
            self.size_bytes = size_bytes


def default_cache_bytes(token_bytes: int, free_bytes: int) -> int:
    """Return a fifth of the free memory, but room for at least 1024 tokens of ``token_bytes`` each."""
    return max(1024 * token_bytes, free_bytes // 5)
