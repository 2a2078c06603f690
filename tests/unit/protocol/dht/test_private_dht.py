"""The DHT of a private swarm between real nodes: what is no member's is neither stored nor believed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import Grant, Revocation, Role
from swarm_protocol.dht import claims
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.node import Listening
from swarm_protocol.dht.notices.revocations import Revocations
from swarm_protocol.dht.records import ServerRecord, models_key, revocations_key, servers_key
from swarm_protocol.dht.stored_records import Validator, is_admitted, limit_records, subkey_of
from swarm_protocol.net.hivemind_parts import DHTID, DHTLocalStorage, DHTRecord, MSGPackSerializer, get_dht_time
from swarm_protocol.net.identity import Identity
from tests.quick_keys import new_identity
from tests.unit.protocol.dht.test_dht import Run, packed, run  # noqa: F401  (run is a fixture)
from tests.unit.support import server_record, until

SWARM, MODEL = "private", "model"
KEY = OrganiserKey.generate()
END = time.time() + 3600


def token_for(identity: Identity, role: Role = Role.SERVER, key: OrganiserKey = KEY) -> tuple[Grant, bytes]:
    grant = Grant.new(key.public, role, "name", identity.peer_id, time.time() - 10, END)
    return grant, grant.signed(key)


def record_of(identity: Identity, token: bytes) -> ServerRecord:
    return server_record(identity.peer_id, model=MODEL, token=token)


class TestWhatIsStored:
    """By a node of a private swarm, for others, as it travels."""

    MEMBER, OTHER = new_identity(), new_identity()
    GRANT, TOKEN = token_for(MEMBER)

    def signed(self, data: object, owner: Identity = MEMBER, subkey: object = None) -> tuple[object, bytes]:
        subkey = subkey or subkey_of(owner)
        value = MSGPackSerializer.dumps(data)
        packed_subkey = MSGPackSerializer.dumps(subkey)
        record = DHTRecord(DHTID.generate("key").to_bytes(), packed_subkey, value, get_dht_time() + 60)
        return subkey, Validator(owner.private_key).sign_value(record)

    def is_admitted(self, *arguments: object) -> bool:
        return is_admitted(AccessControl(KEY.public), *self.signed(*arguments))

    def test_the_record_of_a_member_is(self) -> None:
        assert self.is_admitted(packed(record_of(self.MEMBER, self.TOKEN)))

    def test_nothing_else_is_from_when_a_node_is_limited_and_what_it_has_stays(self) -> None:
        storage, validator = DHTLocalStorage(), Validator(self.MEMBER.private_key)
        key, (subkey, value) = DHTID.generate("key"), self.signed(b"no member's", self.OTHER)
        assert storage.store_subkey(key, subkey, value, get_dht_time() + 60)
        protocol = SimpleNamespace(storage=storage, record_validator=validator)
        limit_records(SimpleNamespace(protocol=protocol), AccessControl(KEY.public))
        assert list(protocol.storage.get(key).value.data) == [subkey] and validator.takes_revocations
        assert not protocol.storage.store_subkey(key, subkey, value, get_dht_time() + 90)

    def test_others_are_not(self) -> None:
        another_organiser = token_for(self.MEMBER, key=OrganiserKey.generate())[1]
        for token in (b"", b"token", another_organiser, token_for(self.MEMBER, Role.TRAINER)[1]):
            assert not self.is_admitted(packed(record_of(self.MEMBER, token)))
        copied = record_of(self.OTHER, self.TOKEN)
        assert not self.is_admitted(packed(copied), self.OTHER)

    @pytest.mark.parametrize("data", [8, "text", None, b"", b"\xff\xff", [1], {}])
    @pytest.mark.parametrize("subkey", [None, MODEL, 7, "00" * 16])
    def test_nothing_else_is(self, data: object, subkey: object) -> None:
        assert not self.is_admitted(data, self.MEMBER, subkey)

    def test_a_revocation_is_and_is_noted(self) -> None:
        access = AccessControl(KEY.public)
        revocation = Revocation(KEY.public, self.GRANT.id, END).signed(KEY)
        record = self.signed(packed(record_of(self.MEMBER, self.TOKEN)))
        assert is_admitted(access, *record)
        assert not is_admitted(access, *self.signed(revocation, self.MEMBER, "11" * 16))
        assert is_admitted(access, *self.signed(revocation, self.OTHER, self.GRANT.id.hex()))
        assert not is_admitted(access, *record)


@pytest.fixture(scope="module")
def swarm(run: Run) -> Iterator[tuple[list[Dht], list[Grant], Dht, Dht]]:  # noqa: F811
    """Two servers that are members, with their grants and records, a reader, and a server that is no member."""

    async def start() -> tuple[list[Dht], list[Grant], Dht, Dht]:
        servers: list[Dht] = []
        grants = []
        peers: list[str] = []
        for _ in range(2):
            identity = new_identity()
            grant, token = token_for(identity)
            access = AccessControl(KEY.public)
            servers.append(await Dht.join(SWARM, peers, identity, Listening("127.0.0.1"), access=access))
            grants.append(grant)
            peers = await servers[0].addresses()
            await servers[-1].publish(record_of(identity, token))
        reader = await Dht.join(SWARM, peers, new_identity(), access=AccessControl(KEY.public))
        stranger = await Dht.join(SWARM, peers, new_identity(), Listening("127.0.0.1"))
        return servers, grants, reader, stranger

    started = run(start())
    yield started
    for dht in (started[2], started[3], *started[0]):
        run(dht.shutdown())


def peers_of(run: Run, dht: Dht) -> set[str]:  # noqa: F811
    return {record.peer_id for record in run(dht.view(MODEL, 8)).servers}


def test_members_see_each_other_and_their_model(run: Run, swarm) -> None:  # noqa: F811
    servers, _, reader, _ = swarm
    members = {server.peer_id for server in servers}
    assert [peers_of(run, dht) for dht in (reader, *servers)] == [members] * 3
    assert run(reader.models()) == {MODEL: 8}


def test_who_is_no_member_is_not_seen_and_writes_nothing(run: Run, swarm) -> None:  # noqa: F811
    servers, _, reader, stranger = swarm
    run(stranger.publish(server_record(stranger.peer_id, model=MODEL)))  # stands on its own node, if anywhere
    run(stranger.publish(server_record(stranger.peer_id, model="lure", num_blocks=9)))
    members = {server.peer_id for server in servers}
    assert [peers_of(run, dht) for dht in (reader, *servers)] == [members] * 3
    assert "lure" not in run(reader.models())
    for server in servers:
        for key in (servers_key(SWARM, MODEL), *(models_key(SWARM, shard) for shard in claims.shards_of("lure"))):
            stored = server._node.protocol.storage.get(DHTID.generate(key))
            subkeys = [] if stored is None else [subkey for subkey, _ in stored.value.items()]
            assert not [subkey for subkey in subkeys if stranger.peer_id in subkey or subkey == "lure"]


def test_a_revoked_server_is_not_seen_any_more_and_what_was_said_lasts(run: Run, swarm) -> None:  # noqa: F811
    servers, grants, reader, stranger = swarm
    revocation = Revocation(KEY.public, grants[1].id, END).signed(KEY)

    async def publish() -> None:
        teller = await Dht.join(SWARM, await servers[0].addresses(), new_identity(), access=AccessControl(KEY.public))
        assert await teller.revocations.publish(grants[1].id, revocation)
        await teller.shutdown()

    run(publish())
    assert peers_of(run, reader) == peers_of(run, servers[0]) == {servers[0].peer_id}
    assert reader._access.revocations() == servers[0]._access.revocations() == {grants[1].id: revocation}

    async def lapse_and_keep() -> dict[str, float]:
        """As if everybody had forgotten it but one server, which publishes it again when it looks."""
        key = DHTID.generate(revocations_key(SWARM))
        for dht in (*servers, reader, stranger):
            for storage in (dht._node.protocol.storage, dht._node.protocol.cache):
                storage.data.pop(key, None)
        assert await Revocations(reader._node, SWARM, AccessControl(KEY.public)).read() == {}
        await servers[0].revocations.keep()
        fresh = AccessControl(KEY.public)

        async def is_known() -> bool:
            await Revocations(reader._node, SWARM, fresh).read()
            return fresh.revocations() == {grants[1].id: revocation}

        await until(is_known)
        return await Revocations(reader._node, SWARM, fresh).read()

    expirations = run(lapse_and_keep())
    assert list(expirations) == [grants[1].id.hex()]
    assert expirations[grants[1].id.hex()] > get_dht_time() + 60


def test_readers_without_the_swarm_key_see_members_too(run: Run, swarm) -> None:  # noqa: F811
    """So that servers can tell them that the swarm is not for them."""
    servers, *_ = swarm

    async def view() -> set[str]:
        public = await Dht.join(SWARM, await servers[0].addresses(), new_identity())
        try:
            return {record.peer_id for record in (await asyncio.wait_for(public.view(MODEL, 8), 20)).servers}
        finally:
            await public.shutdown()

    assert servers[0].peer_id in run(view())
