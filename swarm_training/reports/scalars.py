"""The numbers of a run that are reported, each with its name."""

from __future__ import annotations

from math import isfinite

from swarm_training.contract.views import RunView

_PEER_CHARS = 8  # last characters of a peer id, as `swarm train watch` shows them


def scalars_of(view: RunView) -> dict[str, float]:
    """Return the numbers of a view by name. Numbers that are not known, or not finite, are left out."""
    named = {
        "loss/training": view.loss,
        "loss/held_out": None if view.held_out is None else view.held_out.loss,
        "learning_rate": view.learning_rate,
        "computing_share": view.computing,
        "samples_per_s/total": view.samples_per_s,
        **{f"samples_per_s/{peer.peer_id[-_PEER_CHARS:]}": peer.samples_per_s for peer in view.peers},
        "bytes/sent": view.bytes_sent,
        "bytes/received": view.bytes_received,
        "run/peers": len(view.peers),
        "run/bans": len(view.bans),
        "run/rollbacks": view.rollbacks,
        "run/checkpoint": view.checkpoint,
    }
    return {name: float(value) for name, value in named.items() if value is not None and isfinite(value)}
