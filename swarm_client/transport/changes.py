"""Merges the changes to a session's rows before a step, so that only a few messages are sent."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_protocol.pb import swarm_pb2 as pb


def merged(changes: Sequence[pb.Change], change: pb.Change) -> list[pb.Change]:
    """Return changes with the effect of ``changes`` followed by ``change``: at most one of each kind.

    Rows and positions change independently of each other. Each crop is to a length that is left, so only the last one
    counts. Recording begins at the length after all changes.
    """
    last = {kind: old for old in changes if (kind := old.WhichOneof("kind"))}
    kind = change.WhichOneof("kind")
    assert kind is not None
    if kind == "reorder" and kind in last:
        before = last[kind].reorder.indices
        change = pb.Change(reorder=pb.Reorder(indices=[before[index] for index in change.reorder.indices]))
    last[kind] = change
    return [last[kind] for kind in ("reorder", "crop", "record_past") if kind in last]
