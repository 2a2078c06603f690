"""Which codec goes over which link: as exact as the link is fast, within what is known and allowed."""

from __future__ import annotations

from math import inf

import pytest

from swarm_client.routing.compression import (
    Link,
    client_link,
    codec_for,
    forced,
    known_to,
    server_link,
    to_measure,
    within,
)
from swarm_protocol.codecs.sizes import LADDER, encoded_bytes
from tests.unit.support import server_record

WIDTH = 2048
ALL = frozenset(LADDER)
FAR = ("192.0.2.1:1",)


@pytest.mark.parametrize(
    ("mbit", "name"),
    [
        (inf, "raw"),
        (1000, "raw"),
        (340, "raw"),
        (320, "bf16"),
        (170, "bf16"),
        (160, "int8"),
        (90, "int8"),
        (84, "int4"),
    ],
)
def test_sending_takes_a_twentieth_of_computing(mbit: float, name: str) -> None:
    """250 positions per second are 16.4 Mbit/s in float32, 8.2 in bfloat16, 4.35 in int8, 2.3 in 4.5 bits."""
    link = Link(mbit * 1e6 / 8, 250.0, ALL)
    chosen = codec_for(link, WIDTH, 4, ALL)
    assert chosen == name
    sending = [encoded_bytes(name, 1, WIDTH, 4) * 250 * 8 / (mbit * 1e6) for name in LADDER]
    assert sending[LADDER.index(chosen)] <= 0.05
    assert all(share > 0.05 for share in sending[: LADDER.index(chosen)])


def test_where_nothing_is_small_enough_the_smallest_is_taken_that_is_allowed() -> None:
    link = Link(1000.0, 250.0, ALL)
    assert codec_for(link, WIDTH, 4, ALL) == "int4"
    assert codec_for(link, WIDTH, 4, {"bf16", "int8"}) == "int8"
    assert codec_for(link, WIDTH, 4, set()) == "raw"
    assert codec_for(link, WIDTH, 2, {"bf16"}) == "raw"  # numbers of two bytes gain nothing by it
    assert codec_for(Link(1000.0, 250.0), WIDTH, 4, ALL) == "int8"  # of a peer that knows no others


@pytest.mark.parametrize(
    ("name", "known", "taken"),
    [("int4", ALL, "int4"), ("int4", {"raw", "int8"}, "int8"), ("bf16", {"raw", "int8"}, "raw"), ("raw", ALL, "raw")],
)
def test_a_codec_that_is_asked_for_or_the_next_more_exact_one(name: str, known: set[str], taken: str) -> None:
    assert forced(name, known) == taken


def test_what_all_know() -> None:
    new, old = server_record(codecs=("bf16", "int4")), server_record()
    assert known_to() == known_to(new) == ALL
    assert known_to(new, old) == {"raw", "int8"}
    assert known_to(new, server_record(codecs=("bf16",))) == {"raw", "bf16", "int8"}


def test_a_link_of_servers_is_as_fast_as_the_slower_of_them() -> None:
    fast = server_record("a", network_tokens_per_s=1000.0, forward_tokens_per_s=100.0, addresses=FAR)
    slow = server_record("b", network_tokens_per_s=10.0, forward_tokens_per_s=300.0, addresses=FAR)
    silent = server_record("c", addresses=FAR, tokens_per_s=7.0)
    assert server_link(fast, slow, WIDTH) == Link(10.0 * WIDTH * 4, 100.0)
    assert server_link(fast, silent, WIDTH) == Link(1000.0 * WIDTH * 4, 7.0)
    assert server_link(silent, silent, WIDTH).bytes_per_s == inf


def test_what_stays_on_this_machine_is_fast_whatever_was_measured() -> None:
    here = server_record(network_tokens_per_s=1.0, forward_tokens_per_s=100.0)
    there = server_record(network_tokens_per_s=1.0, forward_tokens_per_s=100.0, addresses=FAR)
    assert server_link(here, here, WIDTH).bytes_per_s == client_link(here, 1.0).bytes_per_s == inf
    assert server_link(here, there, WIDTH).bytes_per_s == WIDTH * 4 and client_link(there, 1.0).bytes_per_s == 1.0


def test_codecs_are_allowed_by_what_was_measured() -> None:
    assert within({}, 0.1) == {"raw", "bf16"} and to_measure({}) == ["int8", "int4"]
    assert within({"int8": 0.01, "int4": 0.2}, 0.1) == {"raw", "bf16", "int8"}
    assert within({"int8": 0.01, "int4": 0.2}, 0.2) == ALL
    assert to_measure({"int8": 0.01}) == ["int4"]
