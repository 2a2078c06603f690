"""What many identities of one stranger can claim: few of an address count, and they do not make the list of models."""

from __future__ import annotations

import itertools
import random

import pytest

from swarm_protocol.dht.claims import (
    MAX_MODELS,
    MAX_PER_ADDRESS,
    NUM_SHARDS,
    WRITERS,
    models_of,
    shards_of,
    should_write,
    within_addresses,
)
from swarm_protocol.dht.records import ServerRecord, ServerState
from tests.unit.support import server_record


def servers(count: int, name: str = "honest", **fields: object) -> list[ServerRecord]:
    return [server_record(f"{name}{number}", **fields) for number in range(count)]


def settled(crowd: list[ServerRecord], others: list[ServerRecord], chance: random.Random) -> list[ServerRecord]:
    """Who of a crowd is on the list once nobody changes it any more; at first everybody is."""
    listed = {server.peer_id: server for server in crowd}
    while True:
        before = set(listed)
        for server in chance.sample(crowd, len(crowd)):
            if should_write(server, [*listed.values(), *others]):
                listed[server.peer_id] = server
            else:
                listed.pop(server.peer_id, None)
        if set(listed) == before:
            return list(listed.values())


def test_few_of_many_servers_write_the_list_and_always_the_same() -> None:
    crowd = servers(300)
    results = [settled(crowd, [], random.Random(seed)) for seed in range(3)]
    assert len(results[0]) == WRITERS
    assert len({frozenset(server.peer_id for server in listed) for listed in results}) == 1
    assert settled(servers(3), [], random.Random(0)) == servers(3)


def test_others_write_when_those_are_gone_who_did() -> None:
    crowd = servers(300)
    first = settled(crowd, [], random.Random(0))
    second = settled([server for server in crowd if server not in first], [], random.Random(0))
    assert len(second) == WRITERS and not {s.peer_id for s in first} & {s.peer_id for s in second}


def test_all_write_when_somebody_contradicts() -> None:
    crowd, liars = servers(300), servers(20, "liar", num_blocks=12)
    listed = settled(crowd, liars, random.Random(0))
    assert len(listed) == 300
    assert models_of([*listed, *liars]) == {"model": 8}


def test_who_has_more_identities_than_the_model_has_servers_is_believed() -> None:
    assert models_of([*servers(3), *servers(4, "liar", num_blocks=12)]) == {"model": 12}


def test_one_identity_is_one_voice_and_none_once_it_is_withdrawn() -> None:
    again = [server_record("liar", model=f"model {number}", num_blocks=9) for number in range(50)]
    assert len(models_of([*again, *servers(1)])) == 2
    assert models_of(servers(2, state=ServerState.OFFLINE)) == {}


def test_invented_models_do_not_crowd_out_one_of_several_servers() -> None:
    invented = [server_record(f"liar{number}", model=f"a{number}") for number in range(1000)]
    models = models_of([*invented, *servers(2)])
    assert len(models) == MAX_MODELS and models["model"] == 8 and list(models) == sorted(models)


def test_a_model_has_two_places() -> None:
    places = [shards_of(f"model {number}") for number in range(1000)]
    assert all(len(set(place)) == 2 and set(place) <= set(range(NUM_SHARDS)) for place in places)
    assert {shard for place in places for shard in place} == set(range(NUM_SHARDS))


def at(count: int, *addresses: str, name: str = "sybil") -> list[ServerRecord]:
    return servers(count, name, addresses=addresses)


@pytest.mark.parametrize(
    "addresses",
    [
        ("8.8.8.8:1",),
        ("192.168.0.1:1", "8.8.8.8:2"),
        ("[2a00:1450::1]:1",),
        ("example.org:1",),
        ("[::ffff:8.8.8.8]:1",),
    ],
)
def test_few_servers_of_a_public_address_count(addresses: tuple[str, ...]) -> None:
    others = at(3, "9.9.9.9:1", name="honest")
    counted = within_addresses([*at(200, *addresses), *others])
    assert len(counted) == MAX_PER_ADDRESS + 3 and all(other in counted for other in others)


def test_addresses_of_one_network_of_ipv6_are_one() -> None:
    spread = [server for number in range(200) for server in at(1, f"[2a00:1450::{number + 1:x}]:1", name=f"s{number}-")]
    assert len(within_addresses(spread)) == MAX_PER_ADDRESS


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "192.168.0.1", "[::1]", "[fe80::1%eth0]", "localhost"])
def test_addresses_that_are_not_public_are_not_counted(host: str) -> None:
    crowd = at(200, f"{host}:1")
    assert within_addresses(crowd) == tuple(crowd)


def test_a_false_address_beside_the_true_one_does_not_help() -> None:
    crowd = [server for n in range(200) for server in at(1, f"11.0.0.{n}:1", "8.8.8.8:1", name=f"s{n}-")]
    assert len(within_addresses(crowd)) == MAX_PER_ADDRESS


def test_those_that_were_used_count_first_and_strangers_cannot_choose_who_is_next() -> None:
    honest, crowd = at(1, "8.8.8.8:1", name="honest"), at(200, "8.8.8.8:1")
    for salt in map(str.encode, "abcdefgh"):
        assert honest[0] in within_addresses([*crowd, *honest], {"honest0"}, salt)
    chosen = [within_addresses(crowd, salt=salt) for salt in map(str.encode, "abcdefgh")]
    assert all(one != other for one, other in itertools.combinations(chosen, 2))
