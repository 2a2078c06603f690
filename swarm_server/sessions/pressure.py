"""Who must give something back when others wait: those who promised themselves much, use little, or have too much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from swarm_protocol.net.shares import Caller

UNUSED_S = 1.5  # for which a session may keep a promise that it does not use, while others wait
IDLE_S = 5.0  # for which it may keep more room than it uses
TURN_S = 10.0  # for which others wait before somebody who has more than a fair share must stop


class Held:
    """Bytes by client, and by address."""

    def __init__(self) -> None:
        self.by_client: Counter[str] = Counter()
        self.by_address: Counter[str] = Counter()

    def add(self, caller: Caller, size_bytes: int) -> None:
        self.by_client[caller.peer_id] += size_bytes
        self.by_address[caller.address] += size_bytes


class FairShares:
    """How much of something each of some callers may have while others want it.

    Everybody has an equal part of the whole, or of an equal part of its address if that is more: many identities at
    one address do not make the parts of others small. Nor may they have more than half of the whole together.
    """

    def __init__(self, capacity: int, callers: Iterable[Caller]) -> None:
        self._capacity = capacity
        different = {caller.peer_id: caller for caller in callers}
        self._num_callers = len(different)
        self._at = Counter(caller.address for caller in different.values())

    def of(self, caller: Caller) -> float:
        """For one of the callers."""
        return max(self._capacity / self._num_callers, self._capacity / len(self._at) / self._at[caller.address])

    def exceeds(self, caller: Caller, held: Held) -> bool:
        """Whether it, or everybody at its address, has more than that."""
        if held.by_client[caller.peer_id] > self.of(caller):
            return True
        return len(self._at) > 1 and held.by_address[caller.address] > self._capacity / 2


@dataclass(frozen=True)
class Tenant:
    """What one session has, and what it makes of it.

    Attributes:
        seniority: the lower, the older.
        charged_bytes: that count for it. Of those ``held_bytes`` are memory, and ``used_bytes`` have something in them.
        idle_s: since it was let in, or its last step; 0 while one is computed.
        has_begun: it has had a step.
    """

    client: Caller
    seniority: tuple[float, int]
    charged_bytes: int
    held_bytes: int
    used_bytes: int
    idle_s: float
    has_begun: bool

    @property
    def keeps_unused(self) -> bool:
        """For some seconds, it has had far more memory than it uses."""
        return self.idle_s >= IDLE_S and self.used_bytes < self.held_bytes / 2


@dataclass(frozen=True)
class Need:
    """What whoever waits first cannot get.

    Attributes:
        size_bytes: what it asks for; ``missing_bytes``: how many of them are not free. 0: it needs a place only.
        waited_s: on this server.
    """

    client: Caller
    size_bytes: int
    missing_bytes: int
    waited_s: float


@dataclass
class Relief:
    """What must happen: sessions whose promises are shrunk to what they hold, and sessions that are preempted."""

    shrunk: list[Tenant] = field(default_factory=list)
    preempted: list[Tenant] = field(default_factory=list)


def relief(need: Need, tenants: Sequence[Tenant], shares: FairShares) -> Relief:
    """What the sessions of others must give back for one that waits.

    Promises that nobody uses are given back to anybody. Nobody is preempted unless that is enough, and the one that
    waits stays within its share. Its own client's sessions give nothing: that client knows what it has.
    """
    others = [tenant for tenant in tenants if tenant.client.peer_id != need.client.peer_id]
    found = Relief()
    if not need.missing_bytes:
        found.preempted = _place(need, others)
        return found
    missing = need.missing_bytes
    for tenant in sorted(others, key=lambda tenant: tenant.has_begun):
        if missing > 0 and tenant.idle_s >= UNUSED_S and tenant.charged_bytes > tenant.held_bytes:
            found.shrunk.append(tenant)
            missing -= tenant.charged_bytes - tenant.held_bytes
    held = Held()
    for tenant in tenants:
        held.add(tenant.client, tenant.charged_bytes)
    held.add(need.client, need.size_bytes)
    if missing <= 0 or shares.exceeds(need.client, held):
        return found
    by_waste = sorted(others, key=lambda tenant: tenant.held_bytes - tenant.used_bytes, reverse=True)
    for tenant in by_waste:
        if missing > 0 and tenant.keeps_unused:
            found.preempted.append(tenant)
            missing -= tenant.held_bytes
    if missing > 0 and need.waited_s >= TURN_S:
        left = [tenant for tenant in others if tenant not in found.preempted]
        more = _those_with_more(missing, left, held, shares)
        found.preempted += more
        missing -= sum(tenant.held_bytes for tenant in more)
    return found if missing <= 0 else Relief(found.shrunk)


def _place(need: Need, others: Sequence[Tenant]) -> list[Tenant]:
    """One session that has never begun, of the client that has most of them; else, after a while, an idle one."""
    unused = [tenant for tenant in others if not tenant.has_begun and tenant.idle_s >= UNUSED_S]
    if not unused and need.waited_s >= TURN_S:
        unused = [tenant for tenant in others if tenant.idle_s >= IDLE_S]
    counts = Counter(tenant.client.peer_id for tenant in unused)
    worst = max(unused, key=lambda tenant: (counts[tenant.client.peer_id], tenant.idle_s), default=None)
    return [] if worst is None else [worst]


def _those_with_more(missing: int, others: Sequence[Tenant], held: Held, shares: FairShares) -> list[Tenant]:
    """The youngest sessions of clients that have more than their share; none if that would not do."""
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
    """Seniority for a session of ``client`` that wants ``more_bytes``: who has more than a share counts as younger."""
    held.add(client, more_bytes)
    is_over = {client.peer_id: shares.exceeds(client, held)}
    held.add(client, -more_bytes)

    def seniority(other: Caller, age: tuple[float, int]) -> tuple[bool, float, int]:
        if other.peer_id not in is_over:
            is_over[other.peer_id] = shares.exceeds(other, held)
        return (is_over[other.peer_id], *age)

    return seniority
