"""Who gives back what to those who wait: promises that nobody uses first, and nobody has less than a share for it."""

from __future__ import annotations

import pytest

from swarm_protocol.net.shares import Caller
from swarm_server.admission.pressure import IDLE_S, TURN_S, UNUSED_S, FairShares, Held, Need, Tenant, relief

ANNA, BERT, CARL = map(Caller, ("anna", "bert", "carl"))
LONG_S = 100.0


def tenant(client: Caller = ANNA, charged: int = 10, held: int = 0, used: int = 0, **fields: object) -> Tenant:
    known = dict(seniority=(0.0, 0), idle_s=LONG_S, has_begun=bool(held))
    return Tenant(client, charged_bytes=charged, held_bytes=held, used_bytes=used, **(known | fields))


def shares(*callers: Caller) -> FairShares:
    return FairShares(100, callers)


def need(size: int, missing: int | None = None, client: Caller = BERT, waited_s: float = 0.0) -> Need:
    return Need(client, size, size if missing is None else missing, waited_s)


class TestShares:
    def test_are_equal(self) -> None:
        assert {shares(ANNA, BERT, CARL, ANNA).of(client) for client in (ANNA, BERT, CARL)} == {100 / 3}
        assert shares(ANNA).of(ANNA) == 100

    def test_many_identities_at_one_address_do_not_make_others_small(self) -> None:
        sybils = [Caller(f"sybil {number}", "192.0.2.1") for number in range(999)]
        honest = Caller("honest", "192.0.2.2")
        everybody, held = shares(honest, *sybils), Held()
        assert everybody.of(honest) == 50 and everybody.of(sybils[0]) == 0.1
        held.add(honest, 50)
        assert not everybody.exceeds(honest, held)

    def test_an_address_may_have_half_while_there_are_others(self) -> None:
        neighbours = [Caller(f"neighbour {number}", "192.0.2.1") for number in range(9)]
        far, held = Caller("far", "192.0.2.2"), Held()
        for neighbour in neighbours:
            held.add(neighbour, 6)
        assert not shares(*neighbours).exceeds(neighbours[0], held)
        assert shares(far, *neighbours).exceeds(neighbours[0], held)

    def test_callers_whose_address_says_nothing_do_not_share_one(self) -> None:
        far, held = Caller("far", "192.0.2.2"), Held()
        for client in (ANNA, BERT):
            held.add(client, 30)
        everybody = shares(ANNA, BERT, far)
        assert everybody.of(ANNA) == everybody.of(far) == 100 / 3
        assert not everybody.exceeds(ANNA, held)


class TestPromises:
    def test_of_those_who_never_began_are_given_back_first(self) -> None:
        begun, empty = tenant(charged=40, held=10, used=10), tenant(charged=40)
        found = relief(need(30), [begun, empty], shares(ANNA, BERT))
        assert (found.shrunk, found.preempted) == ([empty], [])
        assert relief(need(60), [begun, empty], shares(ANNA, BERT)).shrunk == [empty, begun]

    def test_are_kept_for_a_moment(self) -> None:
        young = tenant(charged=100, idle_s=UNUSED_S - 0.1)
        assert relief(need(10), [young], shares(ANNA, BERT)).shrunk == []

    def test_are_kept_from_sessions_of_the_same_client(self) -> None:
        assert relief(need(10, client=ANNA), [tenant(charged=100)], shares(ANNA)).shrunk == []


class TestRoom:
    def test_that_is_held_and_hardly_used(self) -> None:
        full, wasted = tenant(charged=50, held=50, used=50), tenant(charged=50, held=50, used=1)
        assert relief(need(40), [full, wasted], shares(ANNA, BERT)).preempted == [wasted]
        busy = tenant(charged=50, held=50, used=1, idle_s=IDLE_S - 0.1)
        assert relief(need(40), [full, busy], shares(ANNA, BERT)).preempted == []

    def test_beyond_a_share_is_given_back_after_a_while(self) -> None:
        mine = [tenant(charged=20, held=20, used=20, idle_s=0.0, seniority=(float(n), n)) for n in range(5)]
        assert relief(need(30, waited_s=TURN_S - 1), mine, shares(ANNA, BERT)).preempted == []
        assert relief(need(30, waited_s=TURN_S), mine, shares(ANNA, BERT)).preempted == [mine[4], mine[3]]

    def test_within_a_share_is_kept(self) -> None:
        mine = [tenant(client, charged=30, held=30, used=30) for client in (ANNA, CARL)]
        assert relief(need(30, 10, waited_s=LONG_S), mine, shares(ANNA, BERT, CARL)).preempted == []

    @pytest.mark.parametrize("used", [1, 90])
    def test_is_not_taken_for_more_than_a_share(self, used: int) -> None:
        """Nor for nothing."""
        mine = tenant(charged=90, held=90, used=used)
        assert relief(need(60, 50, waited_s=LONG_S), [mine], shares(ANNA, BERT)).preempted == []


class TestPlaces:
    def test_are_those_of_whoever_has_most_that_never_began(self) -> None:
        many = [tenant(ANNA, charged=0, idle_s=UNUSED_S + number) for number in range(5)]
        one, working = tenant(CARL, charged=0), tenant(CARL, charged=10, held=10)
        assert relief(need(10, 0), [one, working, *many], shares(ANNA, BERT, CARL)).preempted == [many[4]]

    def test_are_not_those_that_work_unless_they_are_idle_for_long(self) -> None:
        idle, busy = tenant(held=10), tenant(held=10, idle_s=0.0)
        assert relief(need(10, 0), [idle, busy], shares(ANNA, BERT)).preempted == []
        assert relief(need(10, 0, waited_s=TURN_S), [idle, busy], shares(ANNA, BERT)).preempted == [idle]
