"""Which members are asked to relay, when a server counts as unreachable, and which addresses it announces."""

from __future__ import annotations

import pytest

from swarm_protocol.dht.claims import hosts_of
from swarm_protocol.net.shares import address_of
from swarm_server.core.config import ServerConfig
from swarm_server.reach import own_addresses
from swarm_server.reach.choosing import MOST_ASKED, best, candidates, is_unreachable, serves_others
from swarm_server.reach.own_addresses import OwnAddresses
from tests.unit.support import server_record

IDS = [
    "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC",
    "QmWuXJM1v3RHh9tF3Sy7Xrrn2zvhDQQpuBLRU7QLR5PaMd",
]
OWN = "QmSoLPppuBtQSGwKDZT2M73ULpjvfd3aZ6ha4oFGL1KrGM"


def at(host: str, number: int) -> str:
    return f"/ip4/{host}/tcp/31330/p2p/{IDS[number]}"


def test_who_says_that_it_relays_is_asked_first_and_who_failed_last():
    public, private = at("8.8.8.8", 0), at("192.168.1.5", 1)
    assert candidates([private], [public], OWN, (), {}) == [private, public]
    assert candidates([], [private, public], OWN, (), {}) == [public, private]
    assert candidates([private], [public], OWN, (), {IDS[1]: 5.0}) == [public, private]
    failed = {IDS[0]: 7.0, IDS[1]: 5.0}
    assert candidates([], [public, private], OWN, (), failed) == [private, public]


def test_nobody_is_asked_twice_nor_oneself_nor_who_relays_already():
    own = f"/ip4/8.8.8.8/tcp/1/p2p/{OWN}"
    assert candidates([at("8.8.8.8", 0)], [at("192.168.1.5", 0), own, at("8.8.4.4", 1)], OWN, {IDS[1]}, {}) == [
        at("8.8.8.8", 0)
    ]
    assert candidates(["no address", "/p2p/x"], ["/ip4/999.1.1.1/tcp/1/p2p/" + IDS[2]], OWN, (), {}) == []
    many = [f"/ip4/8.8.8.{n}/tcp/1/p2p/{IDS[0][:-1]}{n}" for n in range(1, 9)]
    assert len(candidates(many, [], OWN, (), {})) == MOST_ASKED


def test_the_nearest_are_kept():
    assert best({"far": 0.2, "near": 0.01, "nearer": 0.001}, 2) == ["nearer", "near"]
    assert best({}, 2) == []


def test_one_member_that_does_not_reach_it_makes_a_server_unreachable():
    assert not is_unreachable([], ["a:1"])
    assert not is_unreachable([["a:1"], ["b:1"]], ["a:1", "b:1"])  # one of its addresses is enough
    assert is_unreachable([["a:1"], []], ["a:1", "b:1"])


def test_a_server_goes_on_for_others_until_most_do_not_reach_it():
    yes, no = ["a:1"], []
    for said, goes_on, begins in (
        ([], True, True),
        ([yes, yes], True, True),
        ([yes, yes, no], True, False),
        ([yes, no], True, False),
        ([yes, no, no], False, False),
        ([no], False, False),
    ):
        assert serves_others(said, ["a:1", "b:1"], served=True) is goes_on
        assert serves_others(said, ["a:1", "b:1"], served=False) is begins


def test_addresses_of_both_families_and_how_they_are_written(monkeypatch):
    monkeypatch.setattr(own_addresses, "outside_addresses", lambda: ["192.0.2.7", "2001:db8::7"])
    for host, announce, is_chosen, expected in (
        ("192.0.2.1", None, False, ("192.0.2.1:5",)),
        ("2001:db8::1", None, False, ("[2001:db8::1]:5",)),
        ("::1", None, True, ("[::1]:5",)),
        ("0.0.0.0", None, False, ("192.0.2.7:5",)),
        ("::", None, False, ("192.0.2.7:5", "[2001:db8::7]:5")),
        ("192.0.2.1", "swarm.example.org", False, ("swarm.example.org:5",)),
        ("192.0.2.1", "swarm.example.org:77", False, ("swarm.example.org:77",)),
        ("2001:db8::1", "[2001:db8::2]:77", False, ("[2001:db8::2]:77",)),
        ("2001:db8::1", "[2001:db8::2]", False, ("[2001:db8::2]:5",)),
        ("2001:db8::1", "2001:db8::2", False, ("[2001:db8::2]:5",)),
    ):
        own = OwnAddresses(host, announce, is_chosen, [])
        own.use_port(5)
        assert own.direct() == expected
    monkeypatch.setattr(own_addresses, "every_host", lambda: "::")
    own = OwnAddresses("192.0.2.1", None, True, [])
    own.use_port(5)
    assert own.direct() == ("192.0.2.1:5", "[2001:db8::7]:5")  # of the other family only


def test_a_server_follows_the_address_that_leads_to_the_swarm(monkeypatch):
    ways = {"198.51.100.1": "192.0.2.1"}

    def source(host: str) -> str:
        if host not in ways:
            raise OSError("no route")
        return ways[host]

    monkeypatch.setattr(own_addresses, "source_address", source)
    peers = [at("198.51.100.1", 0)]
    chosen, given = OwnAddresses("192.0.2.1", None, True, peers), OwnAddresses("192.0.2.1", None, False, peers)
    assert chosen.moved() is None
    ways["198.51.100.1"] = "192.0.2.9"
    assert (chosen.moved(), given.moved()) == ("192.0.2.9", None)
    ways.clear()
    assert chosen.moved() is None  # there is no way at present


def test_a_server_stays_at_an_address_by_which_the_swarm_is_reached(monkeypatch):
    ways = {"192.168.1.7": "192.168.1.5", "198.51.100.1": "10.8.0.2", "192.0.2.1": "10.8.0.2"}
    monkeypatch.setattr(own_addresses, "source_address", ways.__getitem__)
    found = OwnAddresses("192.168.1.5", None, True, [at("198.51.100.1", 0), at("192.168.1.7", 1)])
    assert found.moved() is None  # not all of them need be reached from it
    ways["192.168.1.7"] = "192.168.1.9"
    assert found.moved() == "10.8.0.2"


def test_who_knows_nobody_stays_as_long_as_the_address_is_its_own(monkeypatch):
    monkeypatch.setattr(own_addresses, "source_address", lambda _: "10.8.0.2")
    own = OwnAddresses("192.168.1.5", None, True, [])
    for is_there, moved in ((True, None), (False, "10.8.0.2")):
        monkeypatch.setattr(own_addresses, "is_own", lambda _, is_there=is_there: is_there)
        assert own.moved() == moved


def test_which_addresses_are_those_of_this_machine():
    assert own_addresses.is_own("127.0.0.1") and not own_addresses.is_own("192.0.2.1")


def test_callers_through_tunnels_count_by_where_they_come_from():
    origins = {("127.0.0.1", 5000): "198.51.100.1"}
    assert address_of("ipv4:127.0.0.1:5000", origins) == "198.51.100.1"
    assert address_of("ipv6:%5B::ffff:127.0.0.1%5D:5000", origins) == "198.51.100.1"
    assert address_of("ipv4:192.0.2.1:5000", origins) == "192.0.2.1"  # another host's port
    assert address_of("ipv4:127.0.0.1:5001", origins) == ""


def test_servers_behind_one_relay_are_counted_together():
    circuit = f"{at('8.8.8.8', 0)}/p2p-circuit/p2p/{OWN}"
    assert hosts_of(server_record(addresses=("192.168.1.5:1", circuit))) == {"relay 8.8.8.8"}
    assert hosts_of(server_record(addresses=("8.8.8.8:1",))) == {"8.8.8.8"}
    assert hosts_of(server_record(addresses=(circuit.replace("8.8.8.8", "192.168.1.1"), "/"))) == frozenset()


@pytest.mark.parametrize("field", [{"relay": "perhaps"}, {"relay_bytes_per_s": -1}, {"relay_keepalive_s": 0.1}])
def test_wrong_flags_are_refused(field):
    with pytest.raises(ValueError, match="expected"):
        ServerConfig(**field)
