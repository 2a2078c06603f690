"""How much servers have computed, from counters that begin again whenever a server is started."""

from __future__ import annotations

import pytest

from swarm_gateway.history.work import RATE_LIFETIME_S, Rate, Tally, advance
from swarm_gateway.monitor.model_monitor import ModelStatus, ServerStatus
from swarm_protocol.dht.records import MAX_FORWARD_BLOCKS_PER_S, MAX_WORK, WorkTotals
from tests.unit.support import server_record

START = 1_000_000.0


class Counted:
    """One server of a model with 8 blocks, read again and again."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[str, str], Tally] = {}

    def read(self, time: float, decoded: int, uptime_s: float, process: bytes = b"1", **counts: int) -> Tally:
        record = server_record("a", work=WorkTotals(decoded, uptime_s=uptime_s, **counts), tls_fingerprint=process)
        advance(self.tallies, [ModelStatus("model", 8, (ServerStatus(record),))], START + time)
        return self.tallies["model", "a"]


def test_the_first_reading_counts_since_the_start_of_the_server():
    tally = Counted().read(0, 800, 50.0, prompts=80, passes=8)
    assert tally.total == WorkTotals(800, 80, 8, 50.0) and tally.tokens == (800 + 80 + 8) / 8
    assert tally.rate == Rate()  # nobody knows when


def test_the_rate_is_that_between_two_readings_by_the_clock_of_the_server():
    counted = Counted()
    counted.read(0, 800, 50.0, prompts=0)
    tally = counted.read(9, 1200, 55.0, prompts=80)
    assert tally.rate == Rate(400 / 5 / 8, 80 / 5 / 8, 0.0) and tally.total == WorkTotals(1200, 80, 0, 55.0)
    assert tally.rate_at(START + 9 + RATE_LIFETIME_S - 1) == tally.rate
    assert tally.rate_at(START + 9 + RATE_LIFETIME_S + 1) == Rate()
    assert counted.read(12, 1200, 58.0, prompts=80).rate == Rate()


def test_a_record_that_is_read_twice_counts_once():
    counted = Counted()
    counted.read(0, 800, 50.0)
    before = counted.read(2, 900, 52.0)
    assert counted.read(4, 900, 52.0) is before
    assert counted.read(6, 800, 50.0) is before  # an older one from the DHT
    assert counted.read(8, 1000, 58.0).total.decoded == 1000


def test_a_server_that_was_started_again_adds_to_what_it_had():
    counted = Counted()
    counted.read(0, 800, 50.0)
    assert counted.read(20, 30, 10.0, b"2").total == WorkTotals(830, uptime_s=60.0)
    assert counted.read(22, 900, 52.0, b"1").total.decoded == 830  # a late record of the process before
    assert counted.read(25, 90, 15.0, b"2").total.decoded == 890
    assert counted.read(500, 5000, 400.0, b"3").total.decoded == 5890  # though it counts more than the last


def test_what_counters_should_never_do_counts_as_nothing():
    counted = Counted()
    counted.read(0, 800, 50.0)
    tally = counted.read(2, 700, 52.0)
    assert tally.total.decoded == 800 and tally.rate.decoded == 0
    assert counted.read(4, 900, 54.0).total.decoded == 1000


def test_boasting_has_limits():
    counted = Counted()
    counted.read(0, 0, 50.0)
    tally = counted.read(2, MAX_WORK, 50.001)
    assert tally.rate.decoded == MAX_FORWARD_BLOCKS_PER_S / 8
    for start in range(5):
        tally = counted.read(1000 * (start + 1), MAX_WORK, 10.0, bytes([start]))
    assert tally.total.decoded == MAX_WORK


def test_servers_that_do_not_count_have_no_tally():
    counted = Counted()
    with pytest.raises(KeyError):
        counted.read(0, 0, 0.0)


def test_rates_add_up():
    assert Rate(1, 2, 3) + Rate(4, 5, 6) == Rate(5, 7, 9)
