"""The choice of the leader among the candidates for a group: all members choose the same from the same candidates."""

from __future__ import annotations

from collections.abc import Collection

from swarm_protocol.dht.records import GroupCandidate


def chosen_leader(candidates: Collection[GroupCandidate], size: int, *, waits: bool) -> GroupCandidate | None:
    """Return the candidate that leads the group; None if it is too early to choose.

    One that leads already stays the leader; of several, or if there is none, the first by name. Without a leader, the
    choice ``waits`` until there are ``size`` candidates.
    """
    leading = [candidate for candidate in candidates if candidate.leads]
    if not candidates or (not leading and waits and len(candidates) < size):
        return None
    return min(leading or candidates, key=lambda candidate: candidate.name)
