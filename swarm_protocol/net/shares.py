"""How much of something one caller may have: much while it is alone, less as others come, never all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from swarm_protocol.net.ip_networks import customer_of, parse_host

_OF_A_CLIENT = 3  # times what is left: 3/4 of all if it is alone, 3/7 each if there are two
_NO_ORIGINS: Mapping[tuple[str, int], str] = {}
_OF_AN_ADDRESS = 7  # 7/8 of all for everybody behind one address, if there are no others


@dataclass(frozen=True)
class Caller:
    """Who calls.

    Attributes:
        peer_id: of its key.
        address: IP address or IPv6 network; empty if it says nothing about who calls: identities are free to make,
            addresses are not.
    """

    peer_id: str
    address: str = ""


def address_at(host: str) -> str:
    """Return the ``address`` of a caller at this IP address.

    It is empty for what is no IP address, and for this machine itself: proxies bring everybody by the same address.
    """
    address = parse_host(host)
    return "" if address is None or address.is_loopback else customer_of(address)


def address_of(peer: str, origins: Mapping[tuple[str, int], str] = _NO_ORIGINS) -> str:
    """The ``address`` of a caller, given gRPC's name for the other end, such as ``ipv4:192.0.2.1:5000``.

    See ``address_at``. ``origins``: where those of this machine that are ends of tunnels come from, by address and
    port.
    """
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    host, _, port = unquote(rest).rpartition(":")
    if port.isdecimal():
        host = origins.get((str(parse_host(host)), int(port)), host)
    return address_at(host)


class Shares:
    """Dynamic thresholds: nobody may have more than a few times what is left for the others.

    A fixed share would waste room while one is alone, or leave none to those who come; what is left here is never
    nothing, whoever comes first (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
    switches", 1998). For what cannot be taken back once it was given.
    """

    def __init__(self, capacity: int, minimum: int = 0) -> None:
        """``minimum``: so much everybody may have if there is room, however little is left."""
        self.capacity = capacity
        self.used = 0
        self._minimum = minimum
        self._held: Counter[Hashable] = Counter()  # by caller's peer id, and by address

    def held(self, caller: Caller) -> int:
        return self._held[caller.peer_id]

    def fits(self, caller: Caller, amount: int) -> bool:
        """Whether the caller may have so much more."""
        left = self.capacity - self.used - amount
        if left < 0:
            return False
        return all(
            self._held[holder] + amount <= max(factor * left, self._minimum)
            for holder, factor in _holders(caller).items()
        )

    def most(self) -> int:
        """What one that is alone may have."""
        return max(self.capacity * _OF_A_CLIENT // (_OF_A_CLIENT + 1), self._minimum)

    def add(self, caller: Caller, amount: int) -> None:
        """Counts so much more of the caller's, or less; whether it ``fits`` is known before."""
        self.used += amount
        for holder in _holders(caller):
            self._held[holder] += amount
            if not self._held[holder]:
                del self._held[holder]


def _holders(caller: Caller) -> dict[Hashable, int]:
    """For whom something of the caller's counts, and how many times what is left they may have."""
    holders: dict[Hashable, int] = {caller.peer_id: _OF_A_CLIENT}
    if caller.address:
        holders["address", caller.address] = _OF_AN_ADDRESS
    return holders
