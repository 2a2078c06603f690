"""All members of a group choose the same leader, and keep it."""

from __future__ import annotations

import itertools

from swarm_protocol.dht.records import GroupCandidate
from swarm_server.placement.group_leader import chosen_leader

A, B, C = (GroupCandidate(name, f"{name}:1", leads=False) for name in "abc")
LEADING_B, LEADING_C = (GroupCandidate(name, f"{name}:1", leads=True) for name in "bc")


def test_all_choose_the_first_in_whatever_order_they_see_the_candidates() -> None:
    for candidates in itertools.permutations([A, B, C]):
        assert chosen_leader(candidates, 3, waits=True) == A
        assert chosen_leader(candidates, 2, waits=True) == A


def test_who_is_early_waits_for_the_others_for_a_while() -> None:
    assert chosen_leader([B, C], 3, waits=True) is None
    assert chosen_leader([B, C], 3, waits=False) == B
    assert chosen_leader([], 1, waits=False) is None


def test_who_leads_stays_the_leader_and_one_of_two_leaders_gives_way() -> None:
    assert chosen_leader([A, B, LEADING_C], 3, waits=True) == LEADING_C
    assert chosen_leader([A, LEADING_C], 3, waits=True) == LEADING_C
    assert chosen_leader([A, LEADING_B, LEADING_C], 3, waits=True) == LEADING_B
