"""Servers whose speed nobody has seen get little work until it was, and all of it where there is nobody else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from swarm_client.routing.routing import NEWCOMER_FACTOR, Costs, Newcomers, fastest_chain, spread
from swarm_protocol.dht.records import SwarmView
from swarm_protocol.span import Span
from tests.unit.support import server_record


def test_what_a_newcomer_claims_does_not_count_until_it_was_seen() -> None:
    known = [server_record(name, "0:8", tokens_per_s=speed) for name, speed in (("a", 8.0), ("b", 10.0), ("c", 12.0))]
    liar = server_record("liar", "0:8", tokens_per_s=1e6, forward_tokens_per_s=1e6)
    view = SwarmView((*known, liar))
    assert [hop.server.peer_id for hop in fastest_chain(view, Span(0, 8), Costs({}))] == ["liar"]
    costs = Costs({}, newcomers=Newcomers.among(view, {"liar", "gone"}))
    assert [hop.server.peer_id for hop in fastest_chain(view, Span(0, 8), costs)] == ["c"]
    assert costs.block_s(liar) == pytest.approx(NEWCOMER_FACTOR / 10.0 / 8)
    batches = replace(costs, num_tokens=32)
    assert batches.block_s(liar) == pytest.approx(NEWCOMER_FACTOR * 32 / 10.0 / 8)
    slow = server_record("liar", "0:8", tokens_per_s=1.0)
    assert costs.block_s(slow) == pytest.approx(NEWCOMER_FACTOR / 1.0 / 8)


def test_newcomers_get_some_work_when_there_is_much() -> None:
    view = SwarmView(tuple(server_record(name, "0:8", forward_tokens_per_s=100.0) for name in "abcd"))
    costs = Costs({}, newcomers=Newcomers.among(view, {"d"}))
    counts = Counter(hop.server.peer_id for chain in spread(view, Span(0, 8), [16] * 100, costs) for hop in chain)
    assert 0 < counts["d"] < min(counts[name] for name in "abc")


def test_where_all_are_new_or_none_is_everybody_is_as_good_as_its_word() -> None:
    view = SwarmView((server_record("a", tokens_per_s=5.0), server_record("b", "4:8", tokens_per_s=7.0)))
    for peer_ids in (set(), {"a", "b"}, {"a", "b", "c"}, {"c"}):
        assert Newcomers.among(view, peer_ids) == Newcomers()


def test_a_newcomer_is_taken_where_there_is_nobody_else() -> None:
    view = SwarmView((server_record("a", "0:4"), server_record("new", "4:8", tokens_per_s=1e6)))
    costs = Costs({}, newcomers=Newcomers.among(view, {"new"}))
    assert [hop.server.peer_id for hop in fastest_chain(view, Span(0, 8), costs)] == ["a", "new"]
