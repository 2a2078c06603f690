"""The shortest way to prepare a step: one more position of text for a row that has room behind its last one.

Nearly all steps are such steps. They change nothing but the end of the row.
"""

from __future__ import annotations

from swarm_server.engine.batch import Prepared
from swarm_server.engine.content import followed
from swarm_server.engine.session_state import KvState, Session, SessionStep
from swarm_server.kv.kv_rows import grown_in_place


def next_position(session: Session, step: SessionStep) -> Prepared | None:
    """Return the prepared step, or None if the step is of another kind or its row has no room where it ends."""
    state, inputs = session.state, step.inputs
    if len(state.rows) != 1 or step.changes or step.start != state.rows[0].length or session.layout.slots:
        return None
    if inputs.hidden.shape[:2] != (1, 1) or not (state.mask is inputs.attention_mask is None):
        return None
    growth = grown_in_place(state.rows, 1, session.layout, session.lease)
    return (
        None
        if growth is None
        else Prepared(session, step, _with_content(state, step).with_changes(rows=growth.rows), 0, growth)
    )


def _with_content(state: KvState, step: SessionStep) -> KvState:
    """Return the state with the step's content. One position alone cannot be found in the prefix cache."""
    return state if state.hashes is None else followed(state, step)
