"""Who is found on the local network: members of the swarm that is looked for, at addresses of that network."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from zeroconf import ServiceInfo, ServiceStateChange
from zeroconf import _core as zeroconf_core
from zeroconf.asyncio import AsyncServiceInfo

from swarm_protocol.dht import lan_discovery
from swarm_protocol.dht.lan_discovery import LanDiscovery, member_addresses, require_zeroconf
from swarm_protocol.errors import NoSwarm
from tests.quick_keys import new_identity
from tests.unit.support import until

SERVICE = f"_swarm-{os.getpid()}._tcp.local."  # so that others who run these tests on this machine are not found
PEER = new_identity().peer_id
GOOD = {b"swarm": b"mine", b"peer": PEER.encode()}
ANY_PORT = 31337


def found(*addresses: str, properties: dict[bytes, bytes | None] = GOOD, port: int | None = ANY_PORT) -> list[str]:
    return member_addresses("mine", properties, [ipaddress.ip_address(each) for each in addresses], port)


@pytest.mark.parametrize("address", ["10.1.2.3", "172.16.0.1", "192.168.1.10", "169.254.7.7"])
def test_addresses_of_local_networks(address: str) -> None:
    assert found(address) == [f"/ip4/{address}/tcp/{ANY_PORT}/p2p/{PEER}"]


def test_local_addresses_of_ipv6() -> None:
    assert found("fd00::7") == [f"/ip6/fd00::7/tcp/{ANY_PORT}/p2p/{PEER}"]


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "::1", "0.0.0.0", "8.8.8.8", "224.0.0.1", "255.255.255.255", "172.32.0.1", "100.64.0.1"),
        *("2001:4860:4860::8888", "fe80::1"),
    ],
)
def test_no_others_are_tried(address: str) -> None:
    assert found(address) == []
    assert found(address, "10.0.0.1") == found("10.0.0.1")


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {**GOOD, b"swarm": b"other"},
        {**GOOD, b"swarm": b"mine\0"},
        {**GOOD, b"peer": None},
        {**GOOD, b"peer": b"nobody"},
        {**GOOD, b"peer": PEER.encode() + b"/p2p-circuit"},
        {**GOOD, b"peer": b"\xff" + PEER.encode()},
        {**GOOD, b"peer": PEER.encode() * 3},
        {**GOOD, b"peer": PEER.encode() + b"\n"},
    ],
)
def test_answers_of_no_member(properties: dict[bytes, bytes | None]) -> None:
    assert found("10.0.0.1", properties=properties) == []


@pytest.mark.parametrize("port", [None, 0, 70_000])
def test_ports_that_are_none(port: int | None) -> None:
    assert found("10.0.0.1", port=port) == []


def test_few_addresses_of_one_member() -> None:
    assert found(*(f"10.0.0.{number}" for number in range(200))) == found(*(f"10.0.0.{n}" for n in range(4)))


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=r"discover needs one more package: pip install 'swarm-lm\[discover\]'"):
        require_zeroconf()


@pytest.fixture
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback is the local network, where nobody who has a name already is far."""
    monkeypatch.setattr(lan_discovery, "SERVICE", SERVICE)
    monkeypatch.setattr(lan_discovery, "LOCAL_NETWORKS", [ipaddress.ip_network("127.0.0.0/8")])
    monkeypatch.setattr(lan_discovery, "_MORE_S", 0.03)
    monkeypatch.setattr(zeroconf_core, "_CHECK_TIME", 50)


@asynccontextmanager
async def discovering(*swarms: str) -> AsyncIterator[list[LanDiscovery]]:
    async with AsyncExitStack() as cleanup:
        started = []
        for swarm in swarms:
            started.append(await LanDiscovery.start(swarm, "127.0.0.1"))
            cleanup.push_async_callback(started[-1].close)
        yield started


def address_of(number: int) -> str:
    return f"/ip4/127.0.0.{number}/tcp/{ANY_PORT}/p2p/{new_identity().peer_id}"


async def advertise(discovery: LanDiscovery, address: str) -> bool:
    return await discovery.advertise(address.rpartition("/p2p/")[2], [address])


async def test_members_of_the_same_swarm_find_each_other(on_loopback: None) -> None:
    async with discovering("mine", "other", "mine") as (server, other, client):
        assert await advertise(server, one := address_of(1))
        assert await advertise(other, address_of(2))
        await client.wait_for_members(timeout_s=60.0)
        assert client.members() == [one]


async def test_who_moves_is_found_at_the_new_address_alone(on_loopback: None) -> None:
    async with discovering("mine", "mine") as (server, client):
        one = address_of(1)
        assert await advertise(server, one)
        await client.wait_for_members(timeout_s=60.0)
        moved = one.replace("127.0.0.1", "127.0.0.2")
        assert await advertise(server, moved)
        assert await client.wait_until(lambda: client.members() == [moved], timeout_s=60.0)
        assert not await advertise(server, one.replace("127.0.0.1", "192.0.2.1"))  # where nobody would find it
        assert await client.wait_until(lambda: not client.members(), timeout_s=60.0)
        assert await advertise(server, one)
        assert await client.wait_until(lambda: client.members() == [one], timeout_s=60.0)


async def test_who_has_left_is_no_member(on_loopback: None) -> None:
    async with discovering("mine") as (client,):
        async with discovering("mine") as (server,):
            await advertise(server, address_of(1))
            await client.wait_for_members(timeout_s=60.0)
            assert client.members()
        await client.wait_until(lambda: not client.members(), timeout_s=60.0)
        assert client.members() == []


async def test_who_does_not_answer_at_once_is_asked_again(on_loopback: None, monkeypatch: pytest.MonkeyPatch) -> None:
    request, times = AsyncServiceInfo.async_request, []

    async def busy(info: AsyncServiceInfo, *arguments: object) -> bool:
        times.append(info)
        return len(times) > 1 and await request(info, *arguments)

    monkeypatch.setattr(AsyncServiceInfo, "async_request", busy)
    async with discovering("mine", "mine") as (server, client):
        await advertise(server, one := address_of(1))
        await client.wait_for_members(timeout_s=60.0)
        assert client.members() == [one] and len(times) > 1


async def test_who_leaves_while_it_is_asked_is_no_member(on_loopback: None, monkeypatch: pytest.MonkeyPatch) -> None:
    request, asked, goes_on = AsyncServiceInfo.async_request, asyncio.Event(), asyncio.Event()

    async def slow(info: AsyncServiceInfo, *arguments: object) -> bool:
        found = await request(info, *arguments)
        asked.set()
        await goes_on.wait()
        return found

    monkeypatch.setattr(AsyncServiceInfo, "async_request", slow)
    async with discovering("mine") as (client,):
        async with discovering("mine") as (server,):
            await advertise(server, address_of(1))
            await asked.wait()
        await until(lambda: not client._resolving)
        goes_on.set()
        assert client.members() == []


async def test_a_change_while_a_member_is_asked_is_seen(on_loopback: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its old address would be kept for as long as it does not announce itself again."""
    addresses, goes_on = [["127.0.0.1"], ["127.0.0.2"]], asyncio.Event()

    async def answer(info: AsyncServiceInfo, *_arguments: object) -> bool:
        known = addresses.pop(0)
        await goes_on.wait()
        info.port, info.text = ANY_PORT, b""
        info.addresses = [ipaddress.ip_address(each).packed for each in known]
        monkeypatch.setattr(AsyncServiceInfo, "properties", GOOD)
        return True

    monkeypatch.setattr(AsyncServiceInfo, "async_request", answer)
    async with discovering("mine") as (client,):
        for change in (ServiceStateChange.Added, ServiceStateChange.Updated):
            client._on_change(client._zeroconf.zeroconf, SERVICE, f"{PEER}.{SERVICE}", change)
            await asyncio.sleep(0)
        goes_on.set()
        await until(lambda: not client._resolving)
        assert client.members() == [f"/ip4/127.0.0.2/tcp/{ANY_PORT}/p2p/{PEER}"]


async def test_a_change_at_the_moment_of_closing_asks_nobody_again(
    on_loopback: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that has just been asked, and has changed meanwhile, was asked through what is closed."""
    goes_on, times = asyncio.Event(), []

    async def answer(info: AsyncServiceInfo, *_arguments: object) -> bool:
        times.append(info)
        await goes_on.wait()
        info.port, info.addresses = ANY_PORT, []
        return True

    monkeypatch.setattr(AsyncServiceInfo, "async_request", answer)
    client = await LanDiscovery.start("mine", "127.0.0.1")
    for change in (ServiceStateChange.Added, ServiceStateChange.Updated):
        client._on_change(client._zeroconf.zeroconf, SERVICE, f"{PEER}.{SERVICE}", change)
        await asyncio.sleep(0)
    goes_on.set()
    await asyncio.sleep(0)  # the answer is there, and what follows from it is still to come
    await client.close()
    assert len(times) == 1 and not client._resolving


async def test_strangers_cannot_send_it_elsewhere(on_loopback: None) -> None:
    async with discovering("mine", "mine") as (client, stranger):
        info = ServiceInfo(
            SERVICE,
            f"stranger.{SERVICE}",
            port=22,
            parsed_addresses=["8.8.8.8"],
            properties={"swarm": "mine", "peer": PEER},
            server="stranger.local.",
        )
        await stranger._zeroconf.async_register_service(info)
        await advertise(stranger, one := address_of(1))
        await client.wait_for_members(timeout_s=60.0)
        assert client.members() == [one]


async def test_addresses_elsewhere_are_not_advertised() -> None:
    async with discovering("mine") as (server,):
        assert not await advertise(server, address_of(1))
        assert not await server.advertise(PEER, [f"/dns4/example.org/tcp/1/p2p/{PEER}"])


async def test_that_nobody_has_answered_is_said_in_one_sentence(
    on_loopback: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, wait = LanDiscovery.start, LanDiscovery.wait_for_members
    monkeypatch.setattr(LanDiscovery, "start", lambda swarm: start(swarm, "127.0.0.1"))
    monkeypatch.setattr(LanDiscovery, "wait_for_members", lambda discovery: wait(discovery, timeout_s=0.0))
    with pytest.raises(NoSwarm, match=r"no member of swarm 'nowhere' answered .* --discover --swarm nowhere`, or"):
        await lan_discovery.find_members("nowhere")
