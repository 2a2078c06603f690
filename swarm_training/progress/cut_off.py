"""Who stands aside where peers hear of each other by others, but cannot call each other. Decides from data alone.

They can neither average together nor take each other for gone: without a rule, each waits for the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm_training.progress.policy import View


def must_stand_aside(view: View, failing_s: Mapping[str, float], patience_s: float) -> bool:
    """Whether this peer is to take no part until it can call the others.

    Of two parts of a network the smaller one stands aside; of two peers, or of equal parts, who is behind, or else has
    the higher id. Who alone has the newest state never does.

    Where some can call both sides, who would stand aside by this waits twice as long: those in a smaller part have done
    so by then.

    Args:
        failing_s: for how long calls have failed, in seconds, by peer.
        patience_s: for how long they must have.
    """
    own = view.own
    away = [peer for peer in view.others if peer.is_reachable and failing_s.get(peer.peer_id, 0.0) >= patience_s]
    num_here = 1 + len(view.others) - len(away)
    if not away or own.moment > max(peer.moment for peer in away):
        return False
    if len(away) > num_here:
        return True
    long_s = patience_s if len(away) == num_here else 2 * patience_s
    first = [peer for peer in away if (peer.moment, own.peer_id) > (own.moment, peer.peer_id)]
    return any(failing_s[peer.peer_id] >= long_s for peer in first)
