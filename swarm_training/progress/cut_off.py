"""The rule for peers that hear of each other through others, but cannot call each other.

Such peers can neither average together nor treat each other as gone: without a rule, each waits for the other. The
module decides from data alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm_training.progress.policy import LocalView


def must_stand_aside(view: LocalView, failing_s: Mapping[str, float], patience_s: float) -> bool:
    """Return whether this peer must take no part until it can call the others.

    The smaller part of a network stands aside. Between two peers or equal parts, the one that is behind stands aside,
    or else the one with the higher id. A peer that alone has the newest state never stands aside.

    If some peers can call both sides, a peer of the larger part waits twice as long before it stands aside: by then,
    the peers of the smaller part have stood aside.

    Args:
        failing_s: by peer, for how long calls have failed, in seconds.
        patience_s: for how long calls must have failed, in seconds.
    """
    own = view.own
    away = [peer for peer in view.others if peer.is_reachable and failing_s.get(peer.peer_id, 0.0) >= patience_s]
    num_here = 1 + len(view.others) - len(away)
    if not away or own.moment > max(peer.moment for peer in away):
        return False
    if len(away) > num_here:
        return True
    long_s = patience_s if len(away) == num_here else 2 * patience_s
    # The peers away that come before this one: they are further ahead, or as far and have a lower id.
    first = [peer for peer in away if (peer.moment, own.peer_id) > (own.moment, peer.peer_id)]
    return any(failing_s[peer.peer_id] >= long_s for peer in first)
