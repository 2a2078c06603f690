"""Two statements of one peer where there must be one, as evidence that others can check.

Which of them a phase has counted is agreed upon, so nobody is misled; but that there were two, some may not have seen.
Who has seen it attaches both to what it says next, on which all agree.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm_training.broadcast import wire
from swarm_training.broadcast.agreement import Agreement
from swarm_training.broadcast.signed import Statement
from swarm_training.pb import training_robust_pb2 as pb
from swarm_training.robust import messages as msg

_MAX_BYTES = wire.MAX_SAID_BYTES // 2  # of all evidence in one statement
_MOST = 64
_SILENT_KINDS = frozenset({"ready", "welcome"})  # the machine knows nothing of them


def attached(agreements: Iterable[Agreement]) -> list[pb.Equivocation]:
    """One of each sender, as many as fit."""
    found: dict[str, pb.Equivocation] = {}
    for agreement in agreements:
        if agreement.kind not in _SILENT_KINDS:
            for sender, (first, second) in agreement.equivocations().items():
                evidence = pb.Equivocation(first=first.to_proto(), second=second.to_proto())
                if sum(each.ByteSize() for each in found.values()) + evidence.ByteSize() <= _MAX_BYTES:
                    found.setdefault(sender, evidence)
    return list(found.values())


def proven(statement: Statement, session: bytes) -> list[msg.Event]:
    """Both messages of everybody whom the evidence convicts, as if they had been heard; from a stranger."""
    events: list[msg.Event] = []
    for evidence in list(statement.said.equivocations)[:_MOST]:
        try:
            events += _messages(Statement.from_proto(evidence.first), Statement.from_proto(evidence.second), session)
        except ValueError:
            continue
    return events


def _messages(first: Statement, second: Statement, session: bytes) -> list[msg.Event]:
    """Raises ValueError if they are not two of one peer in one place of this session."""
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
