"""The DHT between real nodes on loopback: everybody reads all records, nobody writes another's."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import get_dht_time

from swarm_protocol.dht import bootstrap, claims
from swarm_protocol.dht.addresses import multiaddr
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.node import Listening
from swarm_protocol.dht.records import MAX_LIFETIME_S, ServerRecord, ServerState, models_key, servers_key
from swarm_protocol.dht.stored_records import subkey_of
from swarm_protocol.errors import NoSwarm
from swarm_protocol.net.hosts import host_port, split_address
from swarm_protocol.net.identity import Identity
from tests.marks import SLOW
from tests.quick_keys import new_identity
from tests.unit.support import TIMEOUT_S, server_record, until

SWARM = "test"
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@dataclasses.dataclass(frozen=True)
class Nodes:
    """A swarm of two servers and a client; every test stores under a model of its own."""

    founder: Dht
    member: Dht
    client: Dht
    peers: list[str]
    identities: tuple[Identity, Identity]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, TIMEOUT_S))
    loop.close()


@pytest.fixture(scope="module")
def nodes(run: Run) -> Iterator[Nodes]:
    async def start() -> Nodes:
        identities = new_identity(), new_identity()
        founder = await Dht.join(SWARM, [], identities[0], Listening("127.0.0.1"))
        peers = await founder.addresses()
        member = await Dht.join(SWARM, peers, identities[1], Listening("127.0.0.1"))
        return Nodes(founder, member, await Dht.join(SWARM, peers, new_identity()), peers, identities)

    started = run(start())
    yield started
    for node in (started.client, started.member, started.founder):
        run(node.shutdown())


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    return request.node.name


@asynccontextmanager
async def stranger(nodes: Nodes, identity: Identity | None = None) -> AsyncIterator[DHTNode]:
    """A node of somebody who does not keep to our rules; with an identity it signs what it owns."""
    validator = RSASignatureValidator(identity.private_key) if identity else None
    node = await DHTNode.create(
        initial_peers=nodes.peers,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        record_validator=validator,
        wait_timeout=TIMEOUT_S,
        startup_timeout=TIMEOUT_S,
    )
    try:
        yield node
    finally:
        await node.shutdown()


async def force(
    node: DHTNode, nodes: Nodes, key: str, data: bytes, subkey: object, expires_at: float | None = None
) -> None:
    """Asks the servers of the swarm, without regard to what the stranger's own node thinks of it."""
    for server in nodes.identities:
        await node.protocol.call_store(
            PeerID.from_base58(server.peer_id),
            [DHTID.generate(key)],
            [data],
            [expires_at or get_dht_time() + 100],
            subkeys=[subkey],
        )


def packed(record: ServerRecord) -> bytes:
    return record.to_proto().SerializeToString()


class TestRecords:
    def test_everybody_sees_what_servers_publish(self, run: Run, nodes: Nodes, model: str) -> None:
        first = server_record(nodes.founder.peer_id, "0:4", model=model, tls_fingerprint=b"f" * 32)
        second = server_record(nodes.member.peer_id, "4:8", model=model, state=ServerState.JOINING)

        async def views() -> list:
            assert await nodes.founder.publish(first)
            assert await nodes.member.publish(second)
            return [await node.view(model, 8) for node in (nodes.founder, nodes.member, nodes.client)]

        assert [view.servers for view in run(views())] == [(first, second)] * 3

    def test_a_later_record_replaces_the_earlier_one(self, run: Run, nodes: Nodes, model: str) -> None:
        async def replace() -> None:
            for speed, lifetime_s in ((1.0, 100), (2.0, 50), (3.0, 50)):
                record = server_record(nodes.member.peer_id, model=model, tokens_per_s=speed)
                await nodes.member.publish(record, lifetime_s)
                view = await nodes.client.view(model, 8)
                assert [server.tokens_per_s for server in view.servers] == [speed]

        run(replace())

    def test_a_withdrawn_server_is_gone_at_once(self, run: Run, nodes: Nodes, model: str) -> None:
        record = server_record(nodes.member.peer_id, model=model)

        async def withdraw() -> None:
            await nodes.member.publish(record)
            assert (await nodes.client.view(model, 8)).servers == (record,)
            await nodes.member.publish(dataclasses.replace(record, state=ServerState.OFFLINE))
            assert (await nodes.client.view(model, 8)).servers == ()
            await nodes.member.publish(record)  # and may come back
            assert (await nodes.client.view(model, 8)).servers == (record,)

        run(withdraw())

    def test_a_record_that_is_not_renewed_expires(self, run: Run, nodes: Nodes, model: str) -> None:
        async def expire() -> None:
            node = await Dht.join(SWARM, nodes.peers, new_identity())
            lasting, fleeting = (server_record(owner.peer_id, model=model) for owner in (nodes.founder, node))
            await nodes.founder.publish(lasting)

            async def seen() -> bool:
                await node.publish(fleeting, lifetime_s=1.5)
                return len((await nodes.client.view(model, 8)).servers) == 2

            await until(seen)
            await node.shutdown()

            async def expired() -> bool:
                return (await nodes.client.view(model, 8)).servers == (lasting,)

            await until(expired)

        run(expire())


class TestStrangers:
    """What others store, with keys of their own and software of their own, changes nothing."""

    def seen_after(
        self,
        run: Run,
        nodes: Nodes,
        model: str,
        attack: Callable[[DHTNode, ServerRecord], Coroutine],
        signs: Any = None,
    ) -> None:
        victim = server_record(nodes.founder.peer_id, "0:4", model=model)

        async def check() -> None:
            await nodes.founder.publish(victim)
            async with stranger(nodes, signs) as node:
                await attack(node, dataclasses.replace(victim, addresses=("192.0.2.1:1",)))
                for reader in (nodes.founder, nodes.member, nodes.client):
                    assert (await reader.view(model, 8)).servers == (victim,)
            late = server_record(nodes.member.peer_id, "4:8", model=model)
            await nodes.member.publish(late)
            assert (await nodes.client.view(model, 8)).servers == (victim, late)

        run(check())

    @pytest.mark.parametrize("signed", [False, True])
    def test_cannot_overwrite_a_record(self, signed: bool, run: Run, nodes: Nodes, model: str) -> None:
        own = new_identity()
        subkey = subkey_of(nodes.identities[0])

        async def overwrite(node: DHTNode, forged: ServerRecord) -> None:
            await node.store(servers_key(SWARM, model), packed(forged), get_dht_time() + 100, subkey=subkey)
            await force(node, nodes, servers_key(SWARM, model), MSGPackSerializer.dumps(packed(forged)), subkey)

        self.seen_after(run, nodes, model, overwrite, own if signed else None)

    def test_cannot_speak_of_another_under_their_own_key(self, run: Run, nodes: Nodes, model: str) -> None:
        own = new_identity()

        async def impersonate(node: DHTNode, forged: ServerRecord) -> None:
            for peer_id in (own.peer_id, forged.peer_id):
                subkey = subkey_of(own).replace(own.peer_id, peer_id)
                key = servers_key(SWARM, model)
                await node.store(key, packed(forged), get_dht_time() + 100, subkey=subkey)

        self.seen_after(run, nodes, model, impersonate, own)

    def test_cannot_hide_the_owner_from_the_signature_check(self, run: Run, nodes: Nodes, model: str) -> None:
        victim_key = nodes.identities[0].public_key

        async def hide(node: DHTNode, forged: ServerRecord) -> None:
            # hivemind's pattern for owners does not reach over a line break, and a key may have a comment.
            for subkey in (b"[owner:" + victim_key + b" \n]", ("[owner:" + victim_key.decode(), "]"), forged.peer_id):
                await node.store(servers_key(SWARM, model), packed(forged), get_dht_time() + 100, subkey=subkey)

        self.seen_after(run, nodes, model, hide)

    def test_cannot_name_two_owners(self, run: Run, nodes: Nodes, model: str) -> None:
        own = new_identity()
        own_key, victim_key = (identity.public_key.decode() for identity in (own, nodes.identities[0]))
        # The packed length of the subkey, 0x5b, is "[": hivemind reads "[owner:OWN KEY COMMENT]", people the rest.
        start, end = f"owner:{own_key} ", f"[owner:{victim_key}]"
        length = next(size for size in range(0x5B, 0x10000, 0x100) if size >= len(start + end))
        subkey = start + "x" * (length - len(start + end)) + end

        async def name_two(node: DHTNode, forged: ServerRecord) -> None:
            validator = RSASignatureValidator(own.private_key)
            validator._local_public_key = own_key.encode()  # so that it signs what it does not recognise as its own
            node.protocol.record_validator = validator
            await node.store(servers_key(SWARM, model), packed(forged), get_dht_time() + 100, subkey=subkey)

        self.seen_after(run, nodes, model, name_two)

    def test_cannot_replace_all_records_by_one_value(self, run: Run, nodes: Nodes, model: str) -> None:
        async def replace(node: DHTNode, forged: ServerRecord) -> None:
            await force(node, nodes, servers_key(SWARM, model), MSGPackSerializer.dumps(packed(forged)), None)

        self.seen_after(run, nodes, model, replace)

    def test_cannot_stop_readers_with_what_cannot_be_read(self, run: Run, nodes: Nodes, model: str) -> None:
        async def spoil(node: DHTNode, forged: ServerRecord) -> None:
            for index, data in enumerate(
                (b"", b"\xc1", b"\xc1\xc1", b"\xda\xff\xff", b"\xa2\xff\xff", b"\xc7\x01\x50x")
            ):
                await force(node, nodes, servers_key(SWARM, model), data, f"junk {index}")
            key = servers_key(SWARM, model)
            for index, value in enumerate((b"no record", "text", 5, None, [1], {"a": 1}, b"")):
                await node.store(key, value, get_dht_time() + 100, subkey=f"odd {index}")
            for subkey in (7, 1.5, b"\xff", (1, 2), "[owner:ssh-foo AAAA]", "[owner:]", ""):
                await node.store(key, packed(forged), get_dht_time() + 100, subkey=subkey)

        self.seen_after(run, nodes, model, spoil)

    def test_cannot_hide_or_forge_a_model_of_the_list(self, run: Run, nodes: Nodes, model: str) -> None:
        own = new_identity()
        for_ever = 10**7  # 115 days

        async def listed() -> dict[str, int]:
            servers = [await Dht.join(SWARM, nodes.peers, new_identity()) for _ in range(2)]
            for server in servers:
                await server.publish(server_record(server.peer_id, model=model))
            wrong = server_record(own.peer_id, model=model, num_blocks=12)
            junk: list[tuple[Any, Any, float]] = [
                *((subkey, 3, 100) for subkey in (5, b"bytes", model, "text", (1, 2))),
                *((subkey_of(own), value, 100) for value in (3, "text", packed(server_record(model="theirs")))),
                (servers[0]._subkey, packed(wrong), 110),
                (subkey_of(own), packed(server_record(own.peer_id, model="for ever")), for_ever),
                (subkey_of(own), packed(wrong), 110),  # is one voice
            ]
            async with stranger(nodes, own) as node:
                for shard in range(claims.NUM_SHARDS):
                    key = models_key(SWARM, shard)
                    for subkey, value, lifetime_s in junk:
                        await node.store(key, value, get_dht_time() + lifetime_s, subkey=subkey)
                        await force(node, nodes, key, MSGPackSerializer.dumps(value), subkey)
                models = await nodes.client.models()
            for server in servers:
                await server.shutdown()
            return models

        models = run(listed())
        assert models[model] == 8
        assert not {5, b"bytes", "5", "text", "theirs", "for ever"} & set(models)

    @pytest.mark.parametrize("own_key", [False, True])
    def test_cannot_store_what_lasts_for_ever(self, own_key: bool, run: Run, nodes: Nodes, model: str) -> None:
        """Nothing newer could take its place: a server was hidden for 115 days."""
        own = new_identity() if own_key else nodes.identities[0]

        async def store(node: DHTNode, forged: ServerRecord) -> None:
            forged = dataclasses.replace(forged, peer_id=own.peer_id)
            for lifetime_s in (MAX_LIFETIME_S + 5, 10**7, 1e300, math.inf, math.nan):
                expires_at = get_dht_time() + lifetime_s
                await force(node, nodes, servers_key(SWARM, model), packed(forged), subkey_of(own), expires_at)
                with suppress(Exception):
                    key = servers_key(SWARM, model)
                    await node.store(key, packed(forged), expires_at, subkey=subkey_of(own))

        self.seen_after(run, nodes, model, store, own)

    def test_cannot_own_records_by_a_short_key(self, run: Run, nodes: Nodes, model: str) -> None:
        key = RSAPrivateKey.__new__(RSAPrivateKey)
        key._private_key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
        own = Identity(key)

        async def store(node: DHTNode, forged: ServerRecord) -> None:
            forged = dataclasses.replace(forged, peer_id=own.peer_id)
            assert (
                await node.store(servers_key(SWARM, model), packed(forged), get_dht_time() + 100, subkey=subkey_of(own))
                is False
            )

        self.seen_after(run, nodes, model, store, own)

    def test_cannot_have_claims_that_contradict_the_model_believed(self, run: Run, nodes: Nodes, model: str) -> None:
        own = new_identity()

        async def store(node: DHTNode, forged: ServerRecord) -> None:
            forged = dataclasses.replace(forged, peer_id=own.peer_id)
            wrong: list[dict[str, Any]] = [{"num_blocks": 2**32 - 1}, {"num_blocks": 9}, {"model": model + "-other"}]
            for number, fields in enumerate(wrong):
                claim = dataclasses.replace(forged, **fields)
                expires_at = get_dht_time() + 100 + number
                assert await node.store(servers_key(SWARM, model), packed(claim), expires_at, subkey=subkey_of(own))

        self.seen_after(run, nodes, model, store, own)


class TestJoining:
    def test_one_living_initial_peer_is_enough(self, run: Run, nodes: Nodes, unused_peer: str) -> None:
        async def join() -> None:
            node = await Dht.join(SWARM, [unused_peer, *nodes.peers], new_identity())
            await node.shutdown()

        run(join())

    def test_a_dead_initial_peer_is_reported(self, run: Run, unused_peer: str) -> None:
        with pytest.raises(NoSwarm, match=f"no initial peer answered: {unused_peer}"):
            run(Dht.join(SWARM, [unused_peer], new_identity()))

    def test_a_peer_that_accepts_connections_and_says_nothing_is_given_up(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bootstrap, "_BACKOFF_S", 0.0)
        monkeypatch.setattr(bootstrap, "CONNECT_TIMEOUT_S", 0.3)

        async def join() -> None:
            async with await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0) as silent:
                port = silent.sockets[0].getsockname()[1]
                await Dht.join(SWARM, [f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"], new_identity())

        identity = new_identity()
        with pytest.raises(NoSwarm, match="no initial peer answered"):
            run(join())

    def test_somebody_else_at_the_address_is_not_the_peer(self, run: Run, nodes: Nodes) -> None:
        other = new_identity().peer_id
        with pytest.raises(NoSwarm, match="no initial peer answered"):
            run(Dht.join(SWARM, [nodes.peers[0].replace(nodes.founder.peer_id, other)], new_identity()))

    @pytest.mark.parametrize(
        "peer",
        [
            "127.0.0.1:31337",
            "/ip4/127.0.0.1/tcp/31337",
            "/ip4/127.0.0.1/tcp/99999/p2p/PEER",
            "/ip4/127.0.0.1/tcp/1/p2p/" + "z" * 46,
            "/ip4/127.0.0.1/tcp/1/p2p/PEER/tcp/2",
            "peer=/ip4/127.0.0.1/tcp/1/p2p/PEER",
        ],
    )
    def test_what_is_no_multiaddr_of_a_peer_is_a_users_mistake(self, peer: str, run: Run, nodes: Nodes) -> None:
        peer = peer.replace("PEER", nodes.founder.peer_id)
        with pytest.raises(ValueError, match="is no multiaddr of a peer: expected /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"):
            run(Dht.join(SWARM, [*nodes.peers, peer], nodes.identities[0]))

    @SLOW
    def test_a_wrong_clock_is_said_with_its_offset(self, run: Run, nodes: Nodes) -> None:
        """In a process of its own, whose time is changed before anything reads it."""
        script = """
import asyncio, sys, time
right, offset_s = time.time, 0.0
time.time = lambda: right() + offset_s
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.node import Listening
from swarm_protocol.errors import NoSwarm
from swarm_protocol.net.identity import Identity, peer_id_of_key
for offset_s, host in ((600.0, None), (-600.0, None), (-20.0, "127.0.0.1")):
    try:
        asyncio.run(Dht.join("test", sys.argv[1:], Identity.generate(), Listening(host)))
    except NoSwarm as error:
        print(error)
"""
        command = [sys.executable, "-c", script, *nodes.peers]
        ended = run(asyncio.to_thread(subprocess.run, command, capture_output=True, text=True))
        assert "Traceback" not in ended.stderr
        ahead, behind, of_server = ended.stdout.splitlines()
        assert ahead == (
            "the clock of this machine is 10 min ahead of that of the swarm, and at most 3 s are allowed: set it, or "
            "that of the initial peer"
        )
        assert behind == ahead.replace("ahead of", "behind")
        took_long = r"2\d s"  # the time that the answer takes is in it
        assert re.fullmatch(re.escape(behind).replace(re.escape("10 min"), took_long), of_server)

    @pytest.mark.parametrize(
        ("host", "expected"),
        [
            ("127.0.0.1", "/ip4/127.0.0.1/tcp/5"),
            ("::1", "/ip6/::1/tcp/5"),
            ("[fe80::1]", "/ip6/fe80::1/tcp/5"),
            ("host.example.org", "/dns4/host.example.org/tcp/5"),
        ],
    )
    def test_multiaddr(self, host: str, expected: str) -> None:
        assert multiaddr(host, 5) == expected


@pytest.fixture(scope="module")
def unused_peer(run: Run) -> str:
    """A peer that has been there."""

    async def start_and_stop() -> str:
        node = await Dht.join(SWARM, [], new_identity(), Listening("127.0.0.1"))
        (address,) = await node.addresses()
        await node.shutdown()
        return address

    return run(start_and_stop())


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("swarm.example.org", ("swarm.example.org", 5)),
        ("192.0.2.1:77", ("192.0.2.1", 77)),
        ("2001:db8::1", ("2001:db8::1", 5)),
        ("[2001:db8::1]", ("2001:db8::1", 5)),
        ("[2001:db8::1]:77", ("2001:db8::1", 77)),
    ],
)
def test_an_address_is_a_host_and_perhaps_a_port(address, expected):
    assert split_address(address, 5) == expected
    assert split_address(host_port(*expected), 9) == expected
    assert host_port(f"[{expected[0]}]", 5) == f"[{expected[0]}]:5" or ":" not in expected[0]


@pytest.mark.parametrize("address", ["host:name", "host:0", "host:65536", "2001:db8::x:77", "[2001:db8::1]:0"])
def test_what_is_no_address(address):
    with pytest.raises(ValueError, match="expected HOST or HOST:PORT"):
        split_address(address, 5)
