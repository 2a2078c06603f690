"""Shares: much for one that is alone, room for whoever comes, however many come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.net.shares import Caller, HalfShares, Shares, address_of

ANNA, BERT = Caller("anna"), Caller("bert")


def fill(shares: Shares, caller: Caller, amount: int = 1) -> int:
    """Takes as much as there is for the caller; returns how much it has then."""
    while shares.fits(caller, amount):
        shares.add(caller, amount)
    return shares.held(caller)


def test_one_that_is_alone_has_much_but_not_all() -> None:
    assert fill(Shares(512), ANNA) == 384 == Shares(512).most()


def test_what_is_left_is_shared_with_those_who_come() -> None:
    shares = Shares(700)
    first, second = fill(shares, ANNA), fill(shares, BERT)
    assert (first, second) == (525, 131)
    shares.add(ANNA, -first)  # in the long run, both have the same
    for _ in range(200):
        for caller in (ANNA, BERT):
            fill(shares, caller)
            shares.add(caller, -min(20, shares.held(caller)))
    assert abs(shares.held(ANNA) - shares.held(BERT)) <= 40


def test_everybody_may_have_the_least_while_there_is_room() -> None:
    shares = Shares(5, minimum=1)
    for caller, most in ((ANNA, 3), (BERT, 1), (Caller("carl"), 1), (Caller("dora"), 0)):
        assert fill(shares, caller) == most
    assert fill(Shares(1, minimum=1), ANNA) == 1


def test_many_identities_at_one_address_do_not_have_all() -> None:
    shares = Shares(512, minimum=1)
    for number in range(2000):
        fill(shares, Caller(f"sybil {number}", "192.0.2.1"))
    assert shares.used == 448  # 7/8
    assert fill(shares, Caller("honest", "192.0.2.2")) == 48


def test_nobody_knows_where_those_without_an_address_are() -> None:
    shares = Shares(512)
    for number in range(2000):
        fill(shares, Caller(f"local {number}"))
    assert shares.used > 500


def test_each_caller_may_have_half_and_two_may_have_all() -> None:
    shares = HalfShares(5)
    for caller, most in (("anna", 2), ("bert", 2), ("carl", 1), ("dora", 0)):
        while shares.fits(caller, 1):
            shares.add(caller, 1)
        assert shares.held(caller) == most
    shares.add("anna", -2)
    assert (shares.used, shares.held("anna")) == (3, 0) and shares.fits("dora", 2) and not shares.fits("bert", 1)
    assert HalfShares(1).fits("anna", 1)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 99)), max_size=60))
def test_something_is_left_for_one_more(wishes: list[tuple[str, int]]) -> None:
    shares = Shares(1000)
    for name, amount in wishes:
        caller = Caller(name)
        if shares.fits(caller, amount):
            shares.add(caller, amount)
            assert shares.held(caller) <= 3 * (shares.capacity - shares.used)
    assert shares.used == sum(shares.held(Caller(name)) for name in "abcdef") < shares.capacity


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.7:51432", "192.0.2.7"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:51432", "2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2::9%5D:51432", "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:192.0.2.7%5D:51432", "192.0.2.7"),
        ("ipv4:127.0.0.1:51432", ""),
        ("ipv6:%5B::1%5D:51432", ""),
        ("ipv6:[::ffff:127.0.0.1]:1", ""),
        ("unix:", ""),
        ("ipv4:nonsense", ""),
        ("", ""),
    ],
)
def test_addresses(peer: str, address: str) -> None:
    assert address_of(peer) == address
