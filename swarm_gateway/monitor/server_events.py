"""Compares two snapshots of a swarm, and returns the events between them. Decides from data alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from swarm_gateway.monitor.model_monitor import UNREACHABLE, ModelStatus, ServerStatus
from swarm_gateway.monitor.monitor import SwarmSnapshot
from swarm_protocol.span import runs_without


class EventKind(StrEnum):
    JOINED = "joined"  # a new server is in the DHT
    LEFT = "left"  # a server has withdrawn its record, or the record has expired
    MOVED = "moved"  # a server hosts other blocks, or has begun to load them
    RESTARTED = "restarted"  # the same peer runs another process
    UNREACHABLE = "unreachable"  # a server was asked and did not answer
    BACK = "back"  # a server answers again
    STATE = "state"  # a server's usability has changed for another reason
    BLOCKS_LOST = "blocks_lost"  # no server holds the blocks any more
    BLOCKS_BACK = "blocks_back"  # some server holds the blocks again


@dataclass(frozen=True)
class SwarmEvent:
    """One event of a server or of blocks.

    Attributes:
        peer_id: the server's peer id; empty if the event is about blocks.
        blocks: the server's blocks now, or the event's blocks: spans separated by commas.
        before: the value before the event: the old blocks of a server that moved, or else the old state.
    """

    kind: EventKind
    model: str
    peer_id: str = ""
    blocks: str = ""
    state: str = ""
    before: str = ""


def events_between(before: SwarmSnapshot, now: SwarmSnapshot) -> list[SwarmEvent]:
    """Return the events in a plausible order: servers that left, changed, and joined, then the blocks affected."""
    old = {status.model: status for status in before.models}
    new = {status.model: status for status in now.models}
    names = [*old, *(name for name in new if name not in old)]
    events = [event for name in names for event in _server_events(old.get(name), new.get(name))]
    return events + [event for name, status in old.items() for event in _block_events(status, new.get(name))]


def _server_events(before: ModelStatus | None, now: ModelStatus | None) -> Iterator[SwarmEvent]:
    old, new = _servers_of(before), _servers_of(now)
    for peer_id, (status, server) in old.items():
        if peer_id not in new:
            yield _event(EventKind.LEFT, status, server, before=status.state_of(server))
    for peer_id, (status, server) in new.items():
        if peer_id in old:
            yield from _changes(*old[peer_id], status, server)
    for peer_id, (status, server) in new.items():
        if peer_id not in old:
            yield _event(EventKind.JOINED, status, server)


def _servers_of(status: ModelStatus | None) -> dict[str, tuple[ModelStatus, ServerStatus]]:
    """Return a model's servers by peer id, each with the model's status."""
    return {} if status is None else {server.record.peer_id: (status, server) for server in status.servers}


def _changes(before: ModelStatus, old: ServerStatus, now: ModelStatus, new: ServerStatus) -> Iterator[SwarmEvent]:
    old_state, new_state = before.state_of(old), now.state_of(new)
    if old.record.tls_fingerprint != new.record.tls_fingerprint:
        yield _event(EventKind.RESTARTED, now, new, before=old_state)
    if old.record.span != new.record.span:
        yield _event(EventKind.MOVED, now, new, before=str(old.record.span))
    if old_state == new_state:
        return
    if new_state == UNREACHABLE:
        yield _event(EventKind.UNREACHABLE, now, new, before=old_state)
    elif old_state == UNREACHABLE:
        yield _event(EventKind.BACK, now, new, before=old_state)
    else:
        yield _event(EventKind.STATE, now, new, before=old_state)


def _event(kind: EventKind, status: ModelStatus, server: ServerStatus, before: str = "") -> SwarmEvent:
    record = server.record
    state = "" if kind is EventKind.LEFT else status.state_of(server)
    return SwarmEvent(kind, status.model, record.peer_id, str(record.span), state, before)


def _block_events(before: ModelStatus, now: ModelStatus | None) -> Iterator[SwarmEvent]:
    everything = set(range(before.num_blocks))
    old = {block for span in before.missing for block in span}
    new = everything if now is None else {block for span in now.missing for block in span}
    for kind, blocks in ((EventKind.BLOCKS_LOST, new - old), (EventKind.BLOCKS_BACK, old - new)):
        spans = runs_without([block not in blocks for block in range(before.num_blocks)])
        if spans:
            yield SwarmEvent(kind, before.model, blocks=",".join(map(str, spans)))
