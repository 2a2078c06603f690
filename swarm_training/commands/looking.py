"""What a run looks like from outside, by the signed records of its peers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from swarm_training.contract.run_like import PeerView, RunView
from swarm_training.core.record import PRESENT, Progress
from swarm_training.core.signing import read_signed
from swarm_training.progress import policy
from swarm_training.progress.policy import View

if TYPE_CHECKING:
    from swarm_training.pb import training_pb2 as pb


def peers_of(run: str, records: Iterable[pb.SignedProgress]) -> tuple[Progress, ...]:
    """The peers that train what most do, by what they say of themselves; what is not signed so is left out."""
    newest: dict[str, Progress] = {}
    for signed in records:
        with suppress(ValueError):  # from a stranger
            record = read_signed(signed)
            known = newest.get(record.peer_id)
            if record.run == run and (known is None or record.version > known.version):
                newest[record.peer_id] = record
    present = [newest[peer_id] for peer_id in sorted(newest) if newest[peer_id].state in PRESENT]
    counts = Counter(peer.model for peer in present)
    usual = max(counts, key=lambda model: (counts[model], model), default=b"")
    return tuple(peer for peer in present if peer.model == usual)


def view_of(run: str, target_batch_size: int, peers: tuple[Progress, ...]) -> RunView:
    """Loss and bytes are those of the last step, as far as peers that have taken it say."""
    if not peers:
        return RunView(run, 0, None, 0, target_batch_size, None, 0, 0)
    step = max(peer.step for peer in peers)
    own = next(peer for peer in peers if peer.step == step)
    view = View(own, tuple(peer for peer in peers if peer is not own))
    here = view.at(step)
    loss_samples = sum(peer.loss_samples for peer in here)
    losses = sum(peer.loss * peer.loss_samples for peer in here)
    return RunView(
        run,
        step,
        losses / loss_samples if loss_samples else None,
        policy.samples_at(view, step),
        own.target_batch_size,
        policy.seconds_to_step(view),
        sum(peer.bytes_sent for peer in here),
        sum(peer.bytes_received for peer in here),
        tuple(
            PeerView(peer.peer_id, "", peer.samples if peer.step == step else 0, peer.samples_per_s) for peer in peers
        ),
    )
