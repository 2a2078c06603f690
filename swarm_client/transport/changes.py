"""What happens to a session's rows before a step, as messages; never more than a few, however much has happened."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_protocol.pb import swarm_pb2 as pb


def merged(changes: Sequence[pb.Change], change: pb.Change) -> list[pb.Change]:
    """Changes that do what these do, and then ``change``: at most one of each kind.

    Rows and positions change independently of each other. Of crops, each is to a length that is left, so the last one
    counts. What is recorded begins at the length after both.
    """
    last = {kind: old for old in changes if (kind := old.WhichOneof("kind"))}
    kind = change.WhichOneof("kind")
    assert kind is not None
    if kind == "reorder" and kind in last:
        before = last[kind].reorder.indices
        change = pb.Change(reorder=pb.Reorder(indices=[before[index] for index in change.reorder.indices]))
    last[kind] = change
    return [last[kind] for kind in ("reorder", "crop", "record_past") if kind in last]
