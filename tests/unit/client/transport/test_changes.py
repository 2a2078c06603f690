"""However often a session's rows change between two steps, a few changes do the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm_client.transport.changes import merged
from swarm_protocol.pb import swarm_pb2 as pb

ROWS, LENGTH = 3, 9
State = tuple[list[int], int, int | None]


def applied(state: State, change: pb.Change) -> State:
    """As ``changed`` of ``swarm_server.engine.session_state`` does: rows, length, what a crop may go back to."""
    rows, length, settled = state
    kind = change.WhichOneof("kind")
    if kind == "reorder":
        return [rows[index] for index in change.reorder.indices], length, settled
    if kind == "crop":
        return rows, change.crop.length, settled if settled is None else change.crop.length
    return rows, length, length


@given(st.data(), st.sampled_from([None, 4]))
def test_the_same_happens_in_at_most_three(data: st.DataObject, settled: int | None) -> None:
    start: State = list(range(ROWS)), LENGTH, settled
    state, changes = start, []
    for kind in data.draw(st.lists(st.sampled_from(["reorder", "crop", "record_past"]), max_size=12)):
        if kind == "reorder":
            indices = data.draw(st.lists(st.integers(0, len(state[0]) - 1), min_size=1, max_size=5))
            change = pb.Change(reorder=pb.Reorder(indices=indices))
        elif kind == "crop":
            change = pb.Change(crop=pb.Crop(length=data.draw(st.integers(0, state[1]))))
        else:
            change = pb.Change(record_past=pb.RecordPast())
        state, changes = applied(state, change), merged(changes, change)
    found = start
    for change in changes:
        found = applied(found, change)
    assert found == state
    assert len(changes) <= 3
