"""What tunnels are made of, without a network: addresses, limits, proofs of membership, the race of addresses."""

from __future__ import annotations

import asyncio
import time

import pytest

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import Grant, Role
from swarm_protocol.errors import AccessDenied, BadReply, PeerBusy, PeerUnavailable
from swarm_protocol.net.shares import Caller
from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.pb import tunnel_pb2 as pb
from swarm_protocol.streams.frames import MAX_RUN_BYTES, framed, read_message, read_run
from swarm_protocol.streams.limits import BandwidthBudget, Places
from swarm_protocol.tunnel import dialing
from swarm_protocol.tunnel.circuit import Circuit, relay_of
from swarm_protocol.tunnel.dialing import Dialer, first_reached
from swarm_protocol.tunnel.members import RelayCredentials, require_member
from tests.quick_keys import new_identity
from tests.unit.support import run, until
from tests.worlds.identities import identity
from tests.worlds.virtual_time import run_virtually

RELAY_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
TARGET_ID = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
RELAY = f"/ip4/192.0.2.1/tcp/31330/p2p/{RELAY_ID}"


@pytest.mark.parametrize("host", ["ip4/192.0.2.1", "ip6/2001:db8::1", "dns4/relay.example.org"])
def test_a_circuit_is_written_as_libp2p_does(host):
    text = f"/{host}/tcp/31330/p2p/{RELAY_ID}/p2p-circuit/p2p/{TARGET_ID}"
    circuit = Circuit.parse(text)
    assert (str(circuit), circuit.relay_id, circuit.target, circuit.is_direct) == (text, RELAY_ID, TARGET_ID, False)
    assert relay_of(text) == RELAY_ID


@pytest.mark.parametrize(
    "address",
    ["192.0.2.1:80", RELAY, f"{RELAY}/p2p-circuit/p2p/someone", f"/p2p/{RELAY_ID}/p2p-circuit/p2p/{TARGET_ID}", "/"],
)
def test_what_is_no_circuit(address):
    with pytest.raises(ValueError):
        Circuit.parse(address)
    assert relay_of(address) == ""


def test_a_server_whose_own_daemon_takes_tunnels_has_no_relay():
    circuit = Circuit(RELAY, RELAY_ID)
    assert circuit.is_direct
    assert relay_of(str(circuit)) == ""


def test_places_end_for_one_peer_before_they_end_for_all():
    places, anna, bert = Places("tunnels", most=3, most_of_one=2), Caller("anna"), Caller("bert")
    with places.taken(anna), places.taken(anna):
        assert not places.has_room(anna) and places.has_room(bert)
        with pytest.raises(PeerBusy, match="this peer has 2 tunnels already"), places.taken(anna):
            pass
        with places.taken(bert), pytest.raises(PeerBusy, match="there are 3 tunnels already"), places.taken(anna):
            pass
    assert places.num_taken == 0


@pytest.mark.run_by(function=run_virtually)
async def test_a_budget_is_kept_over_time():
    budget = BandwidthBudget(lambda: 1000.0)
    await asyncio.gather(*(budget.take(500) for _ in range(10)))
    assert budget.num_bytes == 5000
    assert 4.5 <= asyncio.get_running_loop().time() < 5.5  # of 5000 bytes, half a second's may pass at once


@pytest.mark.run_by(function=run_virtually)
async def test_calls_that_are_cancelled_give_back_what_they_have_reserved():
    budget, clock = BandwidthBudget(lambda: 1000.0), asyncio.get_running_loop().time
    await budget.take(500)  # half a second's may pass at once
    waiting = [asyncio.ensure_future(budget.take(1000)) for _ in range(5)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    start_s = clock()
    await budget.take(500)
    assert budget.num_bytes == 1000
    assert (clock() - start_s) == pytest.approx(0.5)


def test_a_budget_without_end_does_not_wait():
    run(BandwidthBudget().take(1 << 40))


async def test_messages_that_are_none_are_refused():
    for data, error in (
        (framed(b"\xff\xff"), BadReply),  # no message
        (framed(pb.Opened(refusal="no").SerializeToString())[:-1], BadReply),  # cut off
        ((MAX_RUN_BYTES + 1).to_bytes(4) + bytes(MAX_RUN_BYTES + 1), BadReply),
    ):
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        with pytest.raises(error):
            await read_message(reader, pb.Opened, 1.0)
    reader = asyncio.StreamReader()
    with pytest.raises(BadReply):
        await read_message(reader, pb.Opened, 0.01)  # nothing comes
    reader.feed_data(framed(b"abc") + framed(b""))
    assert [await read_run(reader), await read_run(reader)] == [b"abc", b""]


def test_only_members_open_streams_to_a_relay_of_a_private_swarm():
    organiser = OrganiserKey.generate()
    identity, thief = new_identity(), new_identity()
    now = time.time()
    token = Grant(organiser.public, b"0" * 16, Role.CLIENT, "anna", identity.peer_id, now, now + 1000).signed(organiser)
    access = AccessControl(organiser.public)
    shown = RelayCredentials(identity, token).shown("caller", "relay")
    require_member(access, Role.CLIENT, shown, "caller", "relay")
    require_member(None, Role.CLIENT, pb.Member(), "caller", "relay")  # a swarm that is open to all
    for member, caller, relay, role in (
        (shown, "caller", "another relay", Role.CLIENT),  # what a relay has seen is of no use to it elsewhere
        (shown, "another caller", "relay", Role.CLIENT),
        (shown, "caller", "relay", Role.SERVER),
        (pb.Member(), "caller", "relay", Role.CLIENT),
        (RelayCredentials(thief, token).shown("caller", "relay"), "caller", "relay", Role.CLIENT),
        (pb.Member(token=token, public_key=b"none", signature=b""), "caller", "relay", Role.CLIENT),
    ):
        with pytest.raises(AccessDenied):
            require_member(access, role, member, caller, relay)


class _Channel:
    def __init__(self, address: str) -> None:
        self.address, self.is_closed = address, False

    async def close(self) -> None:
        self.is_closed = True


def test_the_first_address_that_answers_is_taken_and_direct_ones_come_first():
    circuit = str(Circuit(RELAY, TARGET_ID))
    tried: list[str] = []

    async def connect(address: str) -> _Channel:
        tried.append(address)
        if address == "silent:1":
            await asyncio.Event().wait()
        if address == "refuses:1":
            raise PeerUnavailable("it refuses")
        if address == "other:1":
            raise BadReply("somebody else")
        return _Channel(address)

    def reached(*addresses: str) -> str:
        tried.clear()
        address, channel = run(first_reached(addresses, connect))
        assert channel.address == address
        return address

    assert reached(circuit, "good:1") == "good:1"
    assert tried == ["good:1"]
    for bad in ("silent:1", "refuses:1", "other:1"):
        assert reached(circuit, bad) == circuit
    with pytest.raises(PeerUnavailable, match="it refuses"):
        reached("refuses:1", "other:1")
    with pytest.raises(PeerUnavailable, match="announces no address"):
        reached()


class NoStreams:
    """A libp2p daemon that reaches nobody."""

    peer_id = "own"

    async def open(self, *_: object) -> None:
        raise PeerUnavailable("nobody answers at the relay")


async def test_nothing_is_left_of_tunnels_that_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    dialer = Dialer(ClientCredentials(identity(0)), NoStreams())  # type: ignore[arg-type]
    address = str(Circuit(RELAY, TARGET_ID))
    for _ in range(2):
        with pytest.raises(PeerUnavailable, match=r"no way through relay .*: nobody answers at the relay"):
            await dialer.connect(address, bytes(32), [], 1.0)
        assert not dialer._ports
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "start_server", no_more_files)
        with pytest.raises(PeerUnavailable, match=r"no tunnel can be opened: .*Too many open files"):
            await dialer.connect(address, bytes(32), [], 1.0)
    assert not dialer._ports  # the next one tries again
    with pytest.raises(PeerUnavailable, match="no way through relay"):
        await dialer.connect(address, bytes(32), [], 1.0)


class SlowStreams(NoStreams):
    """One that finds that out later than anybody waits."""

    def __init__(self) -> None:
        self.num_asked, self.answers = 0, asyncio.Event()

    async def open(self, *_: object) -> None:
        self.num_asked += 1
        await self.answers.wait()
        await super().open()


@pytest.mark.parametrize("ends", ["is late", "is cancelled", "is cancelled at once"])
def test_nothing_is_left_of_tunnels_that_open_after_who_wanted_them_is_gone(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    streams = SlowStreams()

    async def channel(_: object, address: str, *_options: object) -> None:
        _, writer = await asyncio.open_connection(*address.split(":"))
        try:
            await until(lambda: streams.num_asked)
            if ends != "is late":
                connecting.cancel()
                await asyncio.Event().wait()
            raise PeerUnavailable("it does not answer in time")
        finally:
            writer.close()

    async def scenario() -> None:
        nonlocal connecting
        dialer = Dialer(ClientCredentials(identity(0)), streams)  # type: ignore[arg-type]
        connecting = asyncio.ensure_future(dialer.connect(str(Circuit(RELAY, TARGET_ID)), bytes(32), [], 1.0))
        await asyncio.sleep(0)
        (opening,) = dialer._ports.values()
        if ends == "is cancelled at once":
            connecting.cancel()
        with pytest.raises(PeerUnavailable if ends == "is late" else asyncio.CancelledError):
            await connecting
        streams.answers.set()
        await until(lambda: not dialer._ports)
        assert not (await opening)._server.is_serving()
        await dialer.close()

    connecting: asyncio.Task[object]
    monkeypatch.setattr(dialing, "pinned_channel", channel)
    run(scenario())


async def no_more_files(*_: object) -> None:
    raise OSError(24, "Too many open files")
