"""Members of a swarm on the local network, found by multicast DNS: service discovery as of RFC 6762 and RFC 6763.

Anybody on the network may answer. So answers are only addresses to try, of this network, and few of them; libp2p makes
sure that who is reached has the peer id.
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
FIND_S = 3.0  # for answers; the question is asked three times meanwhile
_MORE_S = 0.3  # for others, once somebody has answered
_RESOLVE_S = 3.0  # for the addresses of one member
_MAX_TRIES = 3
_MAX_MEMBERS = 64  # that are kept; and that are resolved at a time
_MAX_ADDRESSES = 4  # of one member
_LOCAL = [
    ipaddress.ip_network(network)
    for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "fc00::/7")
]


def require_zeroconf() -> None:
    """Raises ValueError if the package that discovery takes is not there."""
    if importlib.util.find_spec("zeroconf") is None:
        raise ValueError("discover needs one more package: pip install 'swarm-lm[discover]'")


def is_local(address: Address) -> bool:
    """Whether it is of a local network, and not of this machine alone."""
    return any(address.version == network.version and address in network for network in _LOCAL)


def local_address(preferred: str) -> str:
    """An address of this machine on a local network: the preferred one if it is. Raises NoSwarm if there is none."""
    import ifaddr

    own = [str(ip.ip) for adapter in ifaddr.get_adapters() for ip in adapter.ips if ip.is_IPv4]
    found = [each for each in (preferred, *own) if (ip := parse_host(each)) and is_local(ip)]
    if not found:
        raise NoSwarm("this machine has no address on a local network where others could find it: give --host ADDRESS")
    return found[0]


def member_addresses(
    swarm: str, properties: Mapping[bytes, bytes | None], addresses: Sequence[Address], port: int | None
) -> list[str]:
    """Multiaddrs of a member of the swarm, from what somebody has answered; none if that is not one."""
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
    """Looks for members of one swarm until it is closed. Used on one event loop."""

    def __init__(self, swarm: str, zeroconf: AsyncZeroconf) -> None:
        from zeroconf.asyncio import AsyncServiceBrowser

        self._swarm = swarm
        self._zeroconf = zeroconf
        self._members: dict[str, list[str]] = {}  # by the name of the service
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._outdated: set[str] = set()  # changed while they were being resolved
        self._changed = asyncio.Event()
        self._advertised: ServiceInfo | None = None
        self._browser: AsyncServiceBrowser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[self._on_change])

    @classmethod
    async def start(cls, swarm: str, host: str | None = None) -> LanDiscovery:
        """``host``: the address of this machine by which others are asked; None: all.

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
        """Multiaddrs of those found so far, who may be gone."""
        return [address for addresses in self._members.values() for address in addresses]

    async def wait_for_members(self, timeout_s: float = FIND_S) -> None:
        """Until shortly after the first has answered, if anybody does in time."""
        if await self.wait_until(lambda: bool(self._members), timeout_s):
            await asyncio.sleep(_MORE_S)

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether the condition, on the members, has become true in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        return condition()

    async def advertise(self, peer_id: str, addresses: Sequence[str]) -> bool:
        """Answers others who look for the swarm. ``addresses``: multiaddrs of the member; False if none is local.

        What was advertised before is taken back.
        """
        from zeroconf import ServiceInfo

        targets = [target for target in map(tcp_target, addresses) if target is not None]
        hosts = {host: port for host, port in targets if (ip := parse_host(host)) is not None and is_local(ip)}
        before, self._advertised = self._advertised, None
        if before is not None:  # an update alone is not always noticed
            await (await self._zeroconf.async_unregister_service(before))
        if not hosts:
            return False
        port = next(iter(hosts.values()))
        info = ServiceInfo(
            SERVICE,
            f"{peer_id}.{SERVICE}",
            port=port,
            parsed_addresses=[host for host, other in hosts.items() if other == port],
            properties={"swarm": self._swarm, "peer": peer_id},
            server=f"{peer_id}.local.",
        )
        self._advertised = info
        is_again = before is not None  # then, whoever still answers to its name is no other
        await self._zeroconf.async_register_service(info, cooperating_responders=is_again)
        return True

    async def close(self) -> None:
        """Takes back what was advertised."""
        await self._browser.async_cancel()
        resolving, self._resolving = self._resolving, {}  # what ends now is not resolved again
        for each in resolving.values():
            each.cancel()
        await self._zeroconf.async_unregister_all_services()
        await self._zeroconf.async_close()

    def _on_change(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        from zeroconf import ServiceStateChange

        if state_change is ServiceStateChange.Removed:
            if (resolving := self._resolving.pop(name, None)) is not None:
                resolving.cancel()  # or it would be a member again
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
        """Forget the task, and resolve again if the member has announced something else meanwhile."""
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
    """Multiaddrs of members of the swarm on the local network.

    Raises:
        NoSwarm: nobody has answered. ValueError: see ``require_zeroconf``.
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
            f"nobody of swarm {swarm!r} has answered on the local network within {FIND_S:g} s: start a server with "
            f"`{typed('server')} --discover{flag}`, or give initial peers"
        )
    return found
