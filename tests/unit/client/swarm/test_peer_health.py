"""What a client learns by speaking to servers: round trips are measured, failures are remembered for a while."""

from __future__ import annotations

import asyncio
from math import inf

import pytest

from swarm_client.swarm.peer_health import FAILED, NEWCOMER_S, SILENT, PeerBackoff, PeerTrust, RttTracker
from swarm_protocol.dht.records import ServerRecord
from tests.unit.support import server_record
from tests.worlds.virtual_time import run_virtually


class Pings:
    """Servers at known distances; those without one never answer."""

    def __init__(self, rtts_s: dict[str, float | None]) -> None:
        self.rtts_s = rtts_s
        self.asked: list[str] = []

    async def __call__(self, server: ServerRecord) -> float | None:
        self.asked.append(server.peer_id)
        if server.peer_id not in self.rtts_s:
            await asyncio.Event().wait()
        return self.rtts_s[server.peer_id]


def servers(*names: str) -> list[ServerRecord]:
    return [server_record(name) for name in names]


async def test_unknown_round_trips_are_measured_once() -> None:
    pings = Pings({"a": 0.1, "b": 0.2})
    trips = RttTracker(pings)
    assert await trips.measure(servers("a"), servers("a", "b")) == set()
    assert await trips.measure(servers("a", "b"), []) == set()
    assert dict(trips.known) == {"a": 0.1, "b": 0.2}
    assert sorted(pings.asked) == ["a", "b"]


@pytest.mark.run_by(function=run_virtually)
async def test_those_who_do_not_answer_are_named() -> None:
    """One refuses, one is silent, and nobody waits for it for ever."""
    pings = Pings({"a": 0.1, "refuses": None})
    trips = RttTracker(pings)
    assert await trips.measure(servers("a", "refuses", "silent"), []) == {"refuses", "silent"}
    assert dict(trips.known) == {"a": 0.1}


@pytest.mark.parametrize("num_servers", [17, 31, 47, 500])
async def test_of_many_only_some_are_asked_at_a_time(num_servers: int) -> None:
    names = [f"s{number:03}" for number in range(num_servers)]
    pings = Pings(dict.fromkeys(names, 0.1))
    trips = RttTracker(pings)
    await trips.measure(servers(names[-1]), servers(*names))
    assert names[-1] in pings.asked and 9 <= len(pings.asked) <= 20
    assert max(map(int, (name[1:] for name in pings.asked[1:]))) > 0.8 * num_servers  # of all blocks


async def test_beside_a_long_chain_too_servers_of_all_blocks_are_asked() -> None:
    names = [f"s{number:03}" for number in range(48)]
    pings = Pings(dict.fromkeys(names, 0.1))
    await RttTracker(pings).measure(servers(*names[1:9]), servers(*names))
    assert {*names[1:9]} < {*pings.asked} and len(pings.asked) == 16
    assert max(int(name[1:]) for name in pings.asked) > 40


async def test_who_failed_is_measured_again() -> None:
    pings = Pings({"a": 0.1})
    trips = RttTracker(pings)
    await trips.measure(servers("a"), [])
    trips.forget("a")
    pings.rtts_s["a"] = 0.3
    await trips.measure(servers("a"), [])
    assert dict(trips.known) == {"a": 0.3}


def test_an_unknown_server_is_taken_for_near_or_far() -> None:
    trips = RttTracker(Pings({}))
    assert trips.guess_s(optimistic=True) == 0.0
    assert trips.guess_s(optimistic=False) > 5.0  # no server that is known is so far


# ------------------------------------------------------------ failures


def test_a_ban_ends_and_grows() -> None:
    backoff = PeerBackoff()
    backoff.add("a", 100.0, None)
    assert backoff.now(104.9, []) == {"a": FAILED}
    assert backoff.now(105.1, []) == {}
    backoff.add("a", 110.0, None)
    assert backoff.now(119.9, []) == {"a": FAILED}
    assert backoff.now(120.1, []) == {}
    for number in range(10):
        backoff.add("a", 200.0 + 2 * number, None)
    assert backoff.now(277.0, []) == {"a": FAILED} and backoff.now(279.0, []) == {}


def test_a_failure_of_which_many_sessions_tell_is_one() -> None:
    backoff = PeerBackoff()
    for number in range(10):
        backoff.add("a", 100.0 + number / 20, None)
    assert backoff.now(105.0, []) == {"a": FAILED} and backoff.now(106.0, []) == {}


def test_a_server_that_works_has_its_backoff_reset() -> None:
    backoff = PeerBackoff()
    for _ in range(5):
        backoff.add("a", 100.0, 500.0)
    backoff.reset("a")
    assert backoff.now(100.0, [server_record("a", expires_at=500.0)]) == {}
    backoff.add("a", 200.0, None)
    assert backoff.now(205.1, []) == {}  # as short as the first


def test_who_did_not_answer_stays_out_until_it_is_heard_of() -> None:
    """A record lives on for minutes after its server died."""
    backoff = PeerBackoff()
    backoff.add("a", 100.0, expires_at=500.0)
    same, newer = server_record("a", expires_at=500.0), server_record("a", expires_at=520.0)
    assert backoff.now(101.0, [newer]) == {"a": SILENT}
    assert backoff.now(300.0, [same]) == {"a": SILENT}
    assert backoff.now(300.0, [newer]) == {}


@pytest.mark.parametrize("expires_at", [None, 500.0])
def test_without_another_way_only_the_last_moment_counts(expires_at: float | None) -> None:
    backoff = PeerBackoff()
    backoff.add("a", 100.0, expires_at)
    record = server_record("a", expires_at=500.0)
    assert set(backoff.now(100.9, [record], just_now=True)) == {"a"}
    assert backoff.now(101.1, [record], just_now=True) == {}


def test_a_record_that_never_expires_says_nothing_about_life() -> None:
    backoff = PeerBackoff()
    backoff.add("a", 100.0, expires_at=inf)
    assert backoff.now(106.0, [server_record("a")]) == {}


def test_who_comes_while_a_client_is_there_is_new_until_it_works_or_has_been_there_for_long() -> None:
    trust = PeerTrust()
    trust.see([], 90.0)
    trust.see(servers("a", "b"), 100.0)  # they were there before
    assert trust.newcomers(100.0) == set()
    trust.see(servers("a", "b", "c", "d"), 110.0)
    assert trust.newcomers(110.0) == {"c", "d"}
    trust.worked.add("c")
    assert trust.newcomers(110.0) == {"d"} and trust.worked == {"c"}
    assert trust.newcomers(111.0 + NEWCOMER_S) == set()
    trust.worked.discard("c")
    assert trust.newcomers(120.0) == {"c", "d"}


def test_who_comes_again_under_the_same_identity_begins_anew_unless_it_has_worked() -> None:
    trust = PeerTrust()
    trust.see(servers("a", "b"), 100.0)
    trust.worked.add("a")
    trust.see([], 110.0)
    trust.see(servers("a", "b"), 120.0)
    assert trust.newcomers(120.0) == {"b"}


def test_after_a_stall_everybody_is_new_who_was_not_seen_to_work() -> None:
    trust = PeerTrust()
    trust.see(servers("a", "b", "c"), 100.0)
    trust.worked.add("a")
    trust.distrust_newcomers(200.0)
    assert trust.newcomers(201.0) == {"b", "c"}
    assert trust.newcomers(201.0 + NEWCOMER_S) == set()
