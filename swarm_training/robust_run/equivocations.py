"""Evidence of equivocation: two statements of one peer where only one is allowed.

All peers agree on which of the two counts, so no peer is misled. But some peers may have seen only one statement.
A peer that has seen both attaches them to its next statement, on which all agree.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm_training.broadcast import wire
from swarm_training.broadcast.agreement import Agreement
from swarm_training.broadcast.signed import SignedStatement
from swarm_training.pb import training_robust_pb2 as pb
from swarm_training.robust import messages as msg

_MAX_BYTES = wire.MAX_SAID_BYTES // 2  # of all evidence in one statement
_MOST = 64
_SILENT_KINDS = frozenset({"ready", "welcome"})  # the machine does not handle these


def attached(agreements: Iterable[Agreement]) -> list[pb.Equivocation]:
    """Return evidence of equivocation, one pair for each sender, as many as fit."""
    found: dict[str, pb.Equivocation] = {}
    for agreement in agreements:
        if agreement.kind not in _SILENT_KINDS:
            for sender, (first, second) in agreement.equivocations().items():
                evidence = pb.Equivocation(first=first.to_proto(), second=second.to_proto())
                if sum(each.ByteSize() for each in found.values()) + evidence.ByteSize() <= _MAX_BYTES:
                    found.setdefault(sender, evidence)
    return list(found.values())


def proven(statement: SignedStatement, session: bytes) -> list[msg.Event]:
    """Return both messages of each peer that the evidence convicts, as events. Invalid evidence is skipped."""
    events: list[msg.Event] = []
    for evidence in list(statement.said.equivocations)[:_MOST]:
        try:
            events += _messages(
                SignedStatement.from_proto(evidence.first), SignedStatement.from_proto(evidence.second), session
            )
        except ValueError:
            continue
    return events


def _messages(first: SignedStatement, second: SignedStatement, session: bytes) -> list[msg.Event]:
    """Return two messages as events. Raises ValueError unless they are of one peer, in one phase of this session."""
    if (
        first.sender != second.sender
        or first.place != second.place
        or first.digest == second.digest
        or first.place.kind not in wire.KINDS
    ):
        raise ValueError("two statements are not of one peer, or not of one phase")
    if {first.said.session, second.said.session} != {session} or first.place.kind not in wire.KINDS:
        raise ValueError("a statement is of another run, or the machine knows nothing of it")
    return [msg.Received(wire.to_message(each.sender, each.said)) for each in (first, second)]
