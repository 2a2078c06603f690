"""What is said to have happened between two looks at a swarm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swarm_gateway.monitor.model_monitor import ModelStatus, ServerStatus
from swarm_gateway.monitor.monitor import SwarmSnapshot
from swarm_gateway.monitor.server_events import EventKind, events_between
from swarm_protocol.dht.records import ServerState
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import WIRE_VERSION
from tests.unit.support import server_record


def server(name: str, blocks: str = "0:8", *, answers: bool = True, denial: str = "", **fields: Any) -> ServerStatus:
    return ServerStatus(server_record(name, blocks, **fields), 0.01, answers, denial)


def swarm(*servers: ServerStatus) -> SwarmSnapshot:
    names = dict.fromkeys(each.record.model for each in servers)
    found = {name: tuple(each for each in servers if each.record.model == name) for name in names}
    return SwarmSnapshot(tuple(ModelStatus(name, 8, each) for name, each in found.items()))


def events(before: SwarmSnapshot, now: SwarmSnapshot) -> list[tuple[str, ...]]:
    return [(e.kind, e.peer_id, e.blocks, e.state, e.before) for e in events_between(before, now)]


A, B = server("a"), server("b", "0:4")


def test_nothing_happens_if_nothing_is_different():
    changed = replace(A.record, queue_delay_s=9.0, cache_tokens_left=1, expires_at=2.0, next_span=Span(1, 3))
    busy = replace(A, record=changed, rtt_s=None)  # a planned move is no event yet
    assert events(swarm(A, B), swarm(busy, B)) == []
    assert events(swarm(), swarm()) == []


def test_who_comes_and_who_goes():
    assert events(swarm(A), swarm(A, B)) == [("joined", "b", "0:4", "online", "")]
    assert events(swarm(A, B), swarm(A)) == [("left", "b", "0:4", "", "online")]
    joining = server("b", "0:4", state=ServerState.JOINING)
    assert events(swarm(A), swarm(A, joining)) == [("joined", "b", "0:4", "joining", "")]


@pytest.mark.parametrize(
    ("now", "kind", "state"),
    [
        (server("a", answers=False), "unreachable", "unreachable"),
        (server("a", state=ServerState.DRAINING), "state", "draining"),
        (server("a", state=ServerState.JOINING), "state", "joining"),
        (server("a", denial="members only"), "state", "denied"),
        (server("a", wire_version=WIRE_VERSION + 1), "state", "incompatible"),
        (server("a", tls_fingerprint=b"another"), "restarted", "online"),
    ],
)
def test_what_a_server_can_become(now, kind, state):
    spare = server("c")  # so that no blocks are lost
    assert events(swarm(A, spare), swarm(now, spare)) == [(kind, "a", "0:8", state, "online")]
    back = events(swarm(now, spare), swarm(A, spare))
    assert back == [("back" if kind == "unreachable" else kind, "a", "0:8", "online", state)]


def test_another_revision_than_that_of_most():
    others = server("b"), server("c")
    (event,) = events_between(
        SwarmSnapshot((ModelStatus("model", 8, (A, *others), "revision"),)),
        SwarmSnapshot((ModelStatus("model", 8, (server("a", revision="new"), *others), "revision"),)),
    )
    assert (event.kind, event.state) == (EventKind.STATE, "other_revision")


def test_a_move_is_one_event_for_the_server_and_one_for_its_blocks():
    left, right = server("a", "0:4"), server("b", "4:8")
    loading = server("b", "0:4", state=ServerState.JOINING)
    assert events(swarm(left, right), swarm(left, loading)) == [
        ("moved", "b", "0:4", "joining", "4:8"),
        ("state", "b", "0:4", "joining", "online"),
        ("blocks_lost", "", "4:8", "", ""),
    ]


def test_blocks_are_lost_once_and_come_back():
    parts = server("a", "0:3"), server("b", "3:5"), server("c", "5:8")
    gone = [replace(part, answers=False) for part in parts]
    lost = events(swarm(*parts), swarm(gone[0], parts[1], gone[2]))
    assert lost[-1] == ("blocks_lost", "", "0:3,5:8", "", "")
    assert events(swarm(gone[0], parts[1], gone[2]), swarm(*gone))[-1] == ("blocks_lost", "", "3:5", "", "")
    assert events(swarm(*gone), swarm(gone[0], *parts[1:]))[-1] == ("blocks_back", "", "3:8", "", "")


def test_a_model_without_servers_has_lost_its_blocks():
    lost = events(swarm(B), swarm())
    assert lost == [("left", "b", "0:4", "", "online"), ("blocks_lost", "", "0:4", "", "")]
    assert events(swarm(), swarm(B)) == [("joined", "b", "0:4", "online", "")]


def test_models_are_apart():
    other = server("a", "0:4", model="other")
    found = events_between(swarm(A, other), swarm(A))
    assert [(event.kind, event.model) for event in found] == [("left", "other"), ("blocks_lost", "other")]
