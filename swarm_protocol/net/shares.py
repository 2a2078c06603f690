"""The share of a resource that one caller may have: much while it is alone, less as others come, never all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import unquote

from swarm_protocol.net.ip_networks import customer_of, parse_host

_OF_A_CLIENT = 3  # times what is left: 3/4 of all for one client, 3/7 each for two
_OF_AN_ADDRESS = 7  # 7/8 of all for all callers behind one address, if there are no others
_NO_ORIGINS: Mapping[tuple[str, int], str] = {}


@dataclass(frozen=True)
class Caller:
    """The identity of a caller.

    Attributes:
        peer_id: the peer id of the caller's key.
        address: the IPv4 address or IPv6 network; empty if it does not identify the caller. It counts beside the peer
            id, because identities are free to make and addresses are not.
    """

    peer_id: str
    address: str = ""

    @cached_property
    def holders(self) -> tuple[tuple[Hashable, int], ...]:
        """Return the keys under which the caller's share is counted, each with its multiple of what is left."""
        own: tuple[Hashable, int] = self.peer_id, _OF_A_CLIENT
        return (own, (("address", self.address), _OF_AN_ADDRESS)) if self.address else (own,)


def address_at(host: str) -> str:
    """Return the ``address`` of a caller at this IP address.

    It is empty if the host is no IP address. It is empty for this machine too, because all callers of a proxy on this
    machine come from the same address.
    """
    address = parse_host(host)
    return "" if address is None or address.is_loopback else customer_of(address)


def address_of(peer: str, origins: Mapping[tuple[str, int], str] = _NO_ORIGINS) -> str:
    """Return the ``address`` of a caller from gRPC's name for the remote end, such as ``ipv4:192.0.2.1:5000``.

    See ``address_at``. ``origins``: the true remote host of each local tunnel end, by the address and port of that
    tunnel end.
    """
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    host, _, port = unquote(rest).rpartition(":")
    if port.isdecimal():
        host = origins.get((str(parse_host(host)), int(port)), host)
    return address_at(host)


class Shares:
    """Dynamic thresholds for one resource: no caller may hold more than a few times what is left for the others.

    A fixed share would waste room while one caller is alone, or leave none for later callers. Here some room is always
    left, whoever comes first (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
    switches", 1998). This suits resources that cannot be revoked once they are granted.
    """

    def __init__(self, capacity: int, minimum: int = 0) -> None:
        """Set the capacity; each caller may hold ``minimum`` if there is room, however little is left."""
        self.capacity = capacity
        self.used = 0
        self._minimum = minimum
        self._held: dict[Hashable, int] = {}  # by the caller's peer id, and by its address

    def held(self, caller: Caller) -> int:
        return self._held.get(caller.peer_id, 0)

    def fits(self, caller: Caller, amount: int) -> bool:
        """Return whether the caller may hold this much more."""
        left = self.capacity - self.used - amount
        if left < 0:
            return False
        for holder, factor in caller.holders:
            if self._held.get(holder, 0) + amount > max(factor * left, self._minimum):
                return False
        return True

    def most(self) -> int:
        """Return how much a caller may hold if it is alone."""
        return max(self.capacity * _OF_A_CLIENT // (_OF_A_CLIENT + 1), self._minimum)

    def add(self, caller: Caller, amount: int) -> None:
        """Add an amount, which may be negative, to the caller's share; check ``fits`` before a positive one."""
        self.used += amount
        for holder, _factor in caller.holders:
            if held := self._held.get(holder, 0) + amount:
                self._held[holder] = held
            else:  # identities come and go: a holder of nothing takes no memory
                self._held.pop(holder, None)


class HalfShares:
    """The shares of a resource of which each caller may hold half, so that a broken one does not keep the others out.

    Two callers together may hold all of it. This suits resources that are soon free again, among known callers.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: Counter[str] = Counter()

    @property
    def used(self) -> int:
        return self._held.total()

    def held(self, caller: str) -> int:
        return self._held[caller]

    def fits(self, caller: str, amount: int) -> bool:
        """Return whether the caller may hold this much more."""
        own = self._held[caller] + amount
        return self.used + amount <= self.capacity and own <= max(1, self.capacity // 2)

    def add(self, caller: str, amount: int) -> None:
        """Add an amount, which may be negative, to the caller's share; check ``fits`` before a positive one."""
        self._held[caller] += amount
        self._held += Counter()  # removes callers without a share
