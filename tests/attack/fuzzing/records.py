"""Records in the DHT, as strangers may write them: dropped, or good for everything that is made of them."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

from swarm_client.routing.routing import Costs, Wanted, fastest_chain, no_route, spread, usable
from swarm_protocol.dht.claims import NUM_SHARDS
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.node import Listening
from swarm_protocol.dht.records import MAX_BLOCKS, ROOT_SHARD, ServerRecord, SwarmView, models_key, servers_key
from swarm_protocol.dht.stored_records import Validator, subkey_of
from swarm_protocol.errors import NoRoute
from swarm_protocol.net.hivemind_parts import DHTID, DHTLocalStorage, DHTRecord, MSGPackSerializer, get_dht_time
from swarm_protocol.net.identity import Identity
from swarm_protocol.span import Span
from tests.attack.fuzzing.mutations import EVIL_TEXTS, mutated, mutated_bytes
from tests.quick_keys import new_identity

_SWARM, _MODEL, _NUM_BLOCKS = "swarm", "model", 8
_LIFETIME_S = 100.0


class WrongRecord(Exception):
    """What must not come out of the DHT."""


def parse_record(chance: Random) -> str:
    """A record of another peer's making: refused by ValueError, or what it says can be shown and used."""
    message = _record("peer", chance).to_proto()
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        message = mutated(message, chance)
    data = message.SerializeToString()
    if chance.random() < 0.3:
        data = mutated_bytes(data, chance)
    try:
        record = ServerRecord.parse(data)
    except ValueError as error:
        if not str(error).isprintable():
            raise WrongRecord(f"refused by {str(error)!r}") from None
        return "refused"
    if ServerRecord.parse(record.to_proto().SerializeToString()) != record:
        raise WrongRecord(f"{record} is another once it is written and read again")
    _use(SwarmView.of([record, _record("another", chance)]), chance)
    return "accepted"


def signed_record(chance: Random) -> str:
    """A signed record that somebody changes on its way: nobody reads anything but what its owner signed."""
    owner, validator = _peer()
    record = _record(owner.peer_id, chance)
    subkey = subkey_of(owner)
    plain = DHTRecord(
        DHTID.generate(servers_key(_SWARM, _MODEL)).to_bytes(),
        MSGPackSerializer.dumps(subkey),
        MSGPackSerializer.dumps(record.to_proto().SerializeToString()),
        get_dht_time() + _LIFETIME_S,
    )
    stored = dataclasses.replace(plain, value=validator.sign_value(plain))
    changes = chance.choice((0, 1, 1, 1, 2))
    for _ in range(changes):
        stored = _changed(stored, chance)
    if not Validator(owner.private_key).validate(stored):
        if not changes:
            raise WrongRecord("a record is refused that nobody has changed")
        return "refused"
    try:
        key = MSGPackSerializer.loads(stored.subkey)
        hash(key)
    except Exception:  # hivemind answers the request that brought it with an error
        return "refused"
    value = MSGPackSerializer.loads(validator.strip_value(stored))
    view = _read({servers_key(_SWARM, _MODEL, ROOT_SHARD): {key: (value, stored.expiration_time)}}, "view")
    if any(read != record for read in view.servers):
        raise WrongRecord(f"{view} is read instead of {record}")
    if not changes and not view.servers:
        raise WrongRecord("a record is dropped that nobody has changed")
    return "accepted" if view.servers else "dropped"


def models_list(chance: Random) -> str:
    """The models of a swarm, of whatever anybody writes there; a record counts only under its owner's name."""
    owner, _ = _peer()
    values = (_NUM_BLOCKS, 0, -1, 2**32 - 1, 10**30, 0.5, float("nan"), True, None, b"", "8", [8], {8: 8})
    names = (_MODEL, *EVIL_TEXTS, 7, None, b"model", (1, 2), float("nan"))
    items = {chance.choice(names): (chance.choice(values), get_dht_time() + 1e9) for _ in range(chance.randrange(6))}
    for peer_id in (owner.peer_id, "another"):
        data = _record(peer_id, chance).to_proto().SerializeToString()
        data = mutated_bytes(data, chance) if chance.random() < 0.5 else data
        items[subkey_of(owner) if chance.random() < 0.5 else "another"] = data, get_dht_time() + _LIFETIME_S
    models = _read({models_key(_SWARM, shard): items for shard in range(NUM_SHARDS)}, "models")
    for name, num_blocks in models.items():
        if not (isinstance(name, str) and name.isprintable() and 0 < num_blocks <= MAX_BLOCKS):
            raise WrongRecord(f"the list of models has {name!r} with {num_blocks!r} blocks")
    if models and items.keys().isdisjoint([subkey_of(owner)]):
        raise WrongRecord(f"{models} is in the list, and no owner of a record says so")
    return "accepted" if models else "dropped"


def _record(peer_id: str, chance: Random) -> ServerRecord:
    start = chance.randrange(_NUM_BLOCKS)
    return ServerRecord(
        peer_id=peer_id,
        addresses=("127.0.0.1:1",),
        model=_MODEL,
        revision="revision",
        num_blocks=_NUM_BLOCKS,
        span=Span(start, chance.randint(start + 1, _NUM_BLOCKS)),
        tokens_per_s=chance.choice((0.0, 1.0, 100.0)),
        cache_tokens_left=chance.choice((0, 1, 2**64 - 1)),
        next_hop_rtts_s={"another": 0.25},
        tls_fingerprint=chance.randbytes(32),
    )


def _changed(record: DHTRecord, chance: Random) -> DHTRecord:
    field = chance.choice(("key", "subkey", "value", "value", "value", "expiration_time"))
    if field == "expiration_time":
        value: Any = chance.choice((record.expiration_time + 1e9, 0.0, -1.0, float("inf"), float("nan"), 2.0**63))
    else:
        value = mutated_bytes(getattr(record, field), chance)
    return dataclasses.replace(record, **{field: value})


def _use(view: SwarmView, chance: Random) -> None:
    """As clients do with what they have read."""
    servers, _ = usable(view, Wanted("revision", _NUM_BLOCKS, blocked=("nobody",)))
    blocks, costs = Span(0, _NUM_BLOCKS), Costs({}, need_tokens=chance.choice((0, 9)))
    try:
        fastest_chain(servers, blocks, costs)
        spread(servers, blocks, [1, 9], costs)
    except NoRoute as error:
        no_route(view, blocks)
        if not str(error).isprintable():
            raise WrongRecord(f"there is no route: {str(error)!r}") from None


@cache
def _peer() -> tuple[Identity, Validator]:
    identity = new_identity()
    return identity, Validator(identity.private_key)


@dataclass
class _Node:
    """Stands for a node of hivemind's DHT that has found these items, by key and subkey, with their expiration."""

    items: dict[str, dict[Any, tuple[Any, float]]]
    protocol: Any = dataclasses.field(
        default_factory=lambda: SimpleNamespace(storage=DHTLocalStorage(), record_validator=_peer()[1])
    )

    async def get(self, key: str, latest: bool = True) -> Any:
        found = self.items.get(key, {})
        items = {subkey: SimpleNamespace(value=value, expiration_time=time) for subkey, (value, time) in found.items()}
        return SimpleNamespace(value=items) if items else None


def _read(items: dict[str, dict[Any, tuple[Any, float]]], what: str) -> Any:
    async def read() -> Any:
        dht = Dht(_Node(items), _SWARM, _peer()[0], Listening())
        return await (dht.models() if what == "models" else dht.view(_MODEL, _NUM_BLOCKS))

    return asyncio.run(read())


RECORDS = {"record": parse_record, "signed record": signed_record, "list of models": models_list}
