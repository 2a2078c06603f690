"""The choice of sessions that give room back: those that promised much, are idle, use little, or exceed their share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from swarm_protocol.net.shares import Caller

UNUSED_S = 1.5  # how long a session may keep a promise that it does not use while others wait
IDLE_S = 5.0  # how long a session may hold more room than it uses
TURN_S = 10.0  # how long others wait before a client that exceeds its fair share is preempted


def _location(caller: Caller) -> str:
    """Return the caller's address, or its own name if its address does not identify it."""
    return caller.address or caller.peer_id


class Held:
    """The numbers of bytes that sessions hold, by client and by address."""

    def __init__(self) -> None:
        self.by_client: Counter[str] = Counter()
        self.by_address: Counter[str] = Counter()

    def add(self, caller: Caller, size_bytes: int) -> None:
        self.by_client[caller.peer_id] += size_bytes
        self.by_address[_location(caller)] += size_bytes


class FairShares:
    """The fair share of a resource that each caller may have while others want it.

    Each caller gets an equal part of the whole, or an equal part of its address's part if that is more. Many identities
    at one address therefore do not shrink the parts of others. Together, they may not have more than half of the whole.
    """

    def __init__(self, capacity: int, callers: Iterable[Caller]) -> None:
        self._capacity = capacity
        different = {caller.peer_id: caller for caller in callers}
        self._num_callers = len(different)
        self._at = Counter(map(_location, different.values()))

    def of(self, caller: Caller) -> float:
        """Return the share of one of the callers."""
        return max(self._capacity / self._num_callers, self._capacity / len(self._at) / self._at[_location(caller)])

    def exceeds(self, caller: Caller, held: Held) -> bool:
        """Return whether the caller exceeds its share, or all callers at its address exceed half of the whole."""
        if held.by_client[caller.peer_id] > self.of(caller):
            return True
        return len(self._at) > 1 and held.by_address[_location(caller)] > self._capacity / 2


@dataclass(frozen=True)
class Tenant:
    """A snapshot of the room that one session has, and of how it uses that room.

    Attributes:
        seniority: the sort key of the session's age; a lower one means an older session.
        charged_bytes: the bytes charged to the session; ``held_bytes`` of them are memory, ``used_bytes`` have content.
        idle_s: the time since the session was admitted, or since its last step; 0 while a step is computed.
        has_begun: whether the session has had a step.
        can_park: whether the session's keys and values may leave the cache until its next step.
    """

    client: Caller
    seniority: tuple[float, int]
    charged_bytes: int
    held_bytes: int
    used_bytes: int
    idle_s: float
    has_begun: bool
    can_park: bool = False

    @property
    def keeps_unused(self) -> bool:
        """Return whether the session has been idle for ``IDLE_S`` and uses less than half of its memory."""
        return self.idle_s >= IDLE_S and self.used_bytes < self.held_bytes / 2


@dataclass(frozen=True)
class Need:
    """The unmet need of the session that is first in the queue.

    Attributes:
        size_bytes: the bytes it asks for; ``missing_bytes`` of them are not free (0: it needs only a place).
        waited_s: the time that it has waited on this server.
    """

    client: Caller
    size_bytes: int
    missing_bytes: int
    waited_s: float


@dataclass(frozen=True)
class Relief:
    """The sessions whose promises shrink to what they hold, those that are parked, and those that are preempted."""

    shrunk: list[Tenant] = field(default_factory=list)
    parked: list[Tenant] = field(default_factory=list)
    preempted: list[Tenant] = field(default_factory=list)


def relief(need: Need, tenants: Sequence[Tenant], shares: FairShares) -> Relief:
    """Return what sessions must give back for the session that waits.

    Unused promises of other clients are always given back. Idle sessions are parked, and others preempted, only if that
    frees enough. A client beyond its share gets room from its own idle sessions alone. Sessions of the same client are
    never preempted: the client itself can end them.
    """
    others = [tenant for tenant in tenants if tenant.client.peer_id != need.client.peer_id]
    if not need.missing_bytes:
        return Relief(preempted=_place(need, others))
    shrunk, missing = _unused_promises(need.missing_bytes, others)
    if missing <= 0:
        return Relief(shrunk)
    held = Held()
    for tenant in tenants:
        held.add(tenant.client, tenant.charged_bytes)
    held.add(need.client, need.size_bytes)
    is_over = shares.exceeds(need.client, held)
    parked, missing = parkable(missing, [tenant for tenant in tenants if not (is_over and tenant in others)], shrunk)
    if missing <= 0 or is_over:
        return Relief(shrunk, parked) if missing <= 0 else Relief(shrunk)
    others = [tenant for tenant in others if tenant not in parked]
    preempted, missing = _wasteful(missing, others)
    if missing > 0 and need.waited_s >= TURN_S:
        left = [tenant for tenant in others if tenant not in preempted]
        more = _those_with_more(missing, left, held, shares)
        preempted += more
        missing -= sum(tenant.held_bytes for tenant in more)
    return Relief(shrunk, parked, preempted) if missing <= 0 else Relief(shrunk)


def parkable(missing: int, tenants: Iterable[Tenant], shrunk: Sequence[Tenant] = ()) -> tuple[list[Tenant], int]:
    """Return the sessions that have been idle for longest and may leave the cache, and how many bytes are missing then.

    ``shrunk``: the sessions that give their unused promises back anyway. Parking them frees only what they hold.
    """
    chosen = []
    for tenant in sorted(tenants, key=lambda tenant: tenant.idle_s, reverse=True):
        size_bytes = tenant.held_bytes if tenant in shrunk else tenant.charged_bytes
        if missing > 0 and tenant.can_park and size_bytes and tenant.idle_s >= IDLE_S:
            chosen.append(tenant)
            missing -= size_bytes
    return chosen, missing


def _unused_promises(missing: int, others: Sequence[Tenant]) -> tuple[list[Tenant], int]:
    """Return the sessions whose unused promises are given back, and how many bytes are missing after that."""
    chosen = []
    for tenant in sorted(others, key=lambda tenant: tenant.has_begun):
        if missing > 0 and tenant.idle_s >= UNUSED_S and tenant.charged_bytes > tenant.held_bytes:
            chosen.append(tenant)
            missing -= tenant.charged_bytes - tenant.held_bytes
    return chosen, missing


def _wasteful(missing: int, others: Sequence[Tenant]) -> tuple[list[Tenant], int]:
    """Return the sessions that keep much unused memory, worst first, and how many bytes are missing without them."""
    chosen = []
    for tenant in sorted(others, key=lambda tenant: tenant.held_bytes - tenant.used_bytes, reverse=True):
        if missing > 0 and tenant.keeps_unused:
            chosen.append(tenant)
            missing -= tenant.held_bytes
    return chosen, missing


def _place(need: Need, others: Sequence[Tenant]) -> list[Tenant]:
    """Return the one session that gives its place up: it never began, and its client has most such sessions.

    If there is none, return an idle session, once the other has waited for ``TURN_S``; else return an empty list.
    """
    unused = [tenant for tenant in others if not tenant.has_begun and tenant.idle_s >= UNUSED_S]
    if not unused and need.waited_s >= TURN_S:
        unused = [tenant for tenant in others if tenant.idle_s >= IDLE_S]
    counts = Counter(tenant.client.peer_id for tenant in unused)
    worst = max(unused, key=lambda tenant: (counts[tenant.client.peer_id], tenant.idle_s), default=None)
    return [] if worst is None else [worst]


def _those_with_more(missing: int, others: Sequence[Tenant], held: Held, shares: FairShares) -> list[Tenant]:
    """Return the youngest sessions of clients that exceed their share, or an empty list if those do not suffice."""
    chosen = []
    for tenant in sorted(others, key=lambda tenant: tenant.seniority, reverse=True):
        if missing > 0 and tenant.held_bytes and shares.exceeds(tenant.client, held):
            chosen.append(tenant)
            held.add(tenant.client, -tenant.charged_bytes)
            missing -= tenant.held_bytes
    return chosen if missing <= 0 else []


def juniors_last(
    shares: FairShares, held: Held, client: Caller, more_bytes: int
) -> Callable[[Caller, tuple[float, int]], tuple[bool, float, int]]:
    """Return a seniority in which sessions of clients above their share count as younger than all others.

    ``client``, whose session grows by ``more_bytes``, is judged by what it will hold then.
    """
    held.add(client, more_bytes)
    is_over = {client.peer_id: shares.exceeds(client, held)}
    held.add(client, -more_bytes)

    def seniority(other: Caller, age: tuple[float, int]) -> tuple[bool, float, int]:
        if other.peer_id not in is_over:
            is_over[other.peer_id] = shares.exceeds(other, held)
        return (is_over[other.peer_id], *age)

    return seniority
