"""Discovery of swarm members on the local network by multicast DNS (service discovery, RFC 6762 and RFC 6763).

Anybody on the network may answer. Therefore answers are only a few addresses to try, all on this network; libp2p
verifies the peer id of the peer that is reached.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from swarm_protocol.dht.addresses import check_peer, multiaddr, tcp_target
from swarm_protocol.errors import NoSwarm
from swarm_protocol.net.ip_networks import Address, parse_host
from swarm_protocol.process.invocation import typed
from swarm_protocol.process.local_registry import DEFAULT_SWARM

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

SERVICE = "_swarm-lm._tcp.local."
FIND_S = 3.0  # wait for answers; the query is sent three times meanwhile
_MORE_S = 0.3  # extra wait for more members after the first answer
_RESOLVE_S = 3.0  # timeout to resolve the addresses of one member
_MAX_TRIES = 3  # to resolve a member: answers come by UDP, and may be lost
_MAX_MEMBERS = 64  # members kept, and members resolved at the same time
_MAX_ADDRESSES = 4  # per member
LOCAL_NETWORKS = [
    ipaddress.ip_network(network)
    for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "fc00::/7")
]


def require_zeroconf() -> None:
    """Raise ValueError if the package that discovery needs is not installed."""
    if importlib.util.find_spec("zeroconf") is None:
        raise ValueError("discover needs one more package: pip install 'swarm-lm[discover]'")


def is_local(address: Address) -> bool:
    """Return whether the address belongs to a local network, and not to this machine alone."""
    return any(address.version == network.version and address in network for network in LOCAL_NETWORKS)


def local_address(preferred: str) -> str:
    """Return a local-network address of this machine, ``preferred`` if it is one; raise NoSwarm if there is none."""
    import ifaddr

    own = [str(ip.ip) for adapter in ifaddr.get_adapters() for ip in adapter.ips if ip.is_IPv4]
    found = [each for each in (preferred, *own) if (ip := parse_host(each)) and is_local(ip)]
    if not found:
        raise NoSwarm("this machine has no address on a local network where others could find it: give --host ADDRESS")
    return found[0]


def member_addresses(
    swarm: str, properties: Mapping[bytes, bytes | None], addresses: Sequence[Address], port: int | None
) -> list[str]:
    """Return the multiaddrs of a swarm member from an mDNS answer; empty if the answer is not from a member."""
    if properties.get(b"swarm") != swarm.encode() or not port:
        return []
    peer = (properties.get(b"peer") or b"").decode("ascii", "replace")
    found = [f"{multiaddr(str(address), port)}/p2p/{peer}" for address in addresses if is_local(address)]
    with suppress(ValueError):
        for each in found[:_MAX_ADDRESSES]:
            check_peer(each)
        return found[:_MAX_ADDRESSES]
    return []


class LanDiscovery:
    """A continuous search for members of one swarm, until it is closed. Used on one event loop."""

    def __init__(self, swarm: str, zeroconf: AsyncZeroconf) -> None:
        from zeroconf.asyncio import AsyncServiceBrowser

        self._swarm = swarm
        self._zeroconf = zeroconf
        self._members: dict[str, list[str]] = {}  # by service name
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._outdated: set[str] = set()  # services that changed while they were being resolved
        self._changed = asyncio.Event()
        self._advertised: ServiceInfo | None = None
        self._browser: AsyncServiceBrowser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[self._on_change])

    @classmethod
    async def start(cls, swarm: str, host: str | None = None) -> LanDiscovery:
        """Start searching from the address ``host`` of this machine; None: from all addresses.

        Raises:
            NoSwarm: this machine has no network. ValueError: see ``require_zeroconf``.
        """
        require_zeroconf()
        from zeroconf import InterfaceChoice, IPVersion
        from zeroconf.asyncio import AsyncZeroconf

        try:
            interfaces = InterfaceChoice.All if host is None else [host]
            return cls(swarm, AsyncZeroconf(interfaces=interfaces, ip_version=IPVersion.V4Only))
        except (OSError, RuntimeError) as error:
            raise NoSwarm(f"the local network cannot be searched for swarm {swarm!r}: {error}") from None

    def members(self) -> list[str]:
        """Return the multiaddrs of the members found so far; a member may have left."""
        return [address for addresses in self._members.values() for address in addresses]

    async def wait_for_members(self, timeout_s: float = FIND_S) -> None:
        """Wait until shortly after the first member has answered, or until the timeout."""
        if await self.wait_until(lambda: bool(self._members), timeout_s):
            await asyncio.sleep(_MORE_S)

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition on the members; return whether it became true in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        return condition()

    async def advertise(self, peer_id: str, addresses: Sequence[str]) -> bool:
        """Answer queries for the swarm with the member's multiaddrs; return False if none of them is local.

        This replaces the previous advertisement.
        """
        from zeroconf import ServiceInfo

        targets = [target for target in map(tcp_target, addresses) if target is not None]
        hosts = {host: port for host, port in targets if (ip := parse_host(host)) is not None and is_local(ip)}
        before, self._advertised = self._advertised, None
        if before is not None:  # peers do not always notice a mere update
            await (await self._zeroconf.async_unregister_service(before))
        if not hosts:
            return False
        port = next(iter(hosts.values()))  # a service has one port, and the addresses that share it
        info = ServiceInfo(
            SERVICE,
            f"{peer_id}.{SERVICE}",
            port=port,
            parsed_addresses=[host for host, other in hosts.items() if other == port],
            properties={"swarm": self._swarm, "peer": peer_id},
            server=f"{peer_id}.local.",
        )
        self._advertised = info
        is_again = before is not None  # then the peer that already answers to this name is this node itself
        await self._zeroconf.async_register_service(info, cooperating_responders=is_again)
        return True

    async def close(self) -> None:
        """Stop the search and withdraw the advertisement."""
        await self._browser.async_cancel()
        resolving, self._resolving = self._resolving, {}  # a task that ends now must not be resolved again
        for each in resolving.values():
            each.cancel()
        await self._zeroconf.async_unregister_all_services()
        await self._zeroconf.async_close()

    def _on_change(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        from zeroconf import ServiceStateChange

        if state_change is ServiceStateChange.Removed:
            if (resolving := self._resolving.pop(name, None)) is not None:
                resolving.cancel()  # otherwise it would add the member again
            self._outdated.discard(name)
            self._members.pop(name, None)
            self._changed.set()
        elif name in self._resolving:
            self._outdated.add(name)
        elif len(self._resolving) < _MAX_MEMBERS:
            self._start_resolving(zeroconf, name)

    def _start_resolving(self, zeroconf: Zeroconf, name: str) -> None:
        self._resolving[name] = resolving = asyncio.ensure_future(self._resolve(zeroconf, name))
        resolving.add_done_callback(partial(self._resolved, zeroconf, name))

    def _resolved(self, zeroconf: Zeroconf, name: str, resolving: asyncio.Task[None]) -> None:
        """Forget the task, and resolve the member again if it has changed its announcement meanwhile."""
        if self._resolving.get(name) is not resolving:
            return
        del self._resolving[name]
        if name in self._outdated and not resolving.cancelled():
            self._outdated.discard(name)
            self._start_resolving(zeroconf, name)

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        for _ in range(_MAX_TRIES):
            info = AsyncServiceInfo(SERVICE, name)
            if not await info.async_request(zeroconf, _RESOLVE_S * 1000):
                continue
            addresses = [ip for each in info.parsed_addresses() if (ip := parse_host(each)) is not None]
            found = member_addresses(self._swarm, info.properties, addresses, info.port)
            if found and (name in self._members or len(self._members) < _MAX_MEMBERS):
                self._members[name] = found
                self._changed.set()
            return


async def find_members(swarm: str) -> list[str]:
    """Return the multiaddrs of swarm members on the local network.

    Raises:
        NoSwarm: no member answered. ValueError: see ``require_zeroconf``.
    """
    discovery = await LanDiscovery.start(swarm)
    try:
        await discovery.wait_for_members()
        found = discovery.members()
    finally:
        await discovery.close()
    if not found:
        flag = "" if swarm == DEFAULT_SWARM else f" --swarm {swarm}"
        raise NoSwarm(
            f"no member of swarm {swarm!r} answered on the local network within {FIND_S:g} s: start a server with "
            f"`{typed('server')} --discover{flag}`, or give initial peers"
        )
    return found
