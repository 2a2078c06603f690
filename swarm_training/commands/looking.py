"""The view of a run from outside, from the signed records of its peers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from math import inf, isfinite
from typing import TYPE_CHECKING

from swarm_training.contract.views import BanView, HeldOutView, PeerView, RunView, UserView
from swarm_training.core.record import PRESENT, HeldOutLoss, Progress
from swarm_training.core.signing import read_signed
from swarm_training.evaluation.policy import shown_losses
from swarm_training.ledger.ledger import UserTotal
from swarm_training.ledger.orders import Ban, ModeratorOrder
from swarm_training.progress.policy import mean_loss, of_usual_model

if TYPE_CHECKING:
    from swarm_training.pb import training_pb2 as pb

_SHOWN_USERS = 10


def peers_of(run: str, records: Iterable[pb.SignedProgress], banned: Collection[str] = ()) -> tuple[Progress, ...]:
    """Return the peers that train the most common model, by their own records. Wrongly signed records are left out."""
    newest: dict[str, Progress] = {}
    for signed in records:
        with suppress(ValueError):  # records come from strangers
            record = read_signed(signed)
            known = newest.get(record.peer_id)
            if record.run == run and (known is None or record.version > known.version):
                newest[record.peer_id] = record
    present = [newest[peer_id] for peer_id in sorted(newest.keys() - set(banned))]
    return tuple(of_usual_model([peer for peer in present if peer.state in PRESENT]))


def shown_bans(bans: Mapping[str, ModeratorOrder]) -> tuple[BanView, ...]:
    return tuple(
        BanView(peer_id, order.expires_at, order.action.reason)
        for peer_id, order in sorted(bans.items())
        if isinstance(order.action, Ban)
    )


def shown_users(totals: Mapping[str, UserTotal]) -> tuple[UserView, ...]:
    samples = sum(total.samples for total in totals.values())
    first = list(totals.items())[:_SHOWN_USERS]
    return tuple(UserView(user, total.samples, total.samples / samples) for user, total in first)


def view_of(
    run: str,
    target_batch_size: int,
    peers: tuple[Progress, ...],
    bans: tuple[BanView, ...] = (),
    max_samples: int = 0,
) -> RunView:
    """Return the view of a run. Records are some seconds old, and not all equally old. Loss and bytes are of the last
    step that each peer reports. All speeds count for the next step. ``max_samples``: the most samples that count of one
    peer, whatever it claims; 0: all."""
    if not peers:
        return RunView(run, 0, None, 0, target_batch_size, None, 0, 0, bans=bans)
    moment = max(peer.moment for peer in peers)
    held_out = shown_losses(moment, peers)
    target = Counter(peer.target_batch_size for peer in peers).most_common(1)[0][0]
    most = max_samples or max(peer.samples for peer in peers)
    shown = [min(peer.samples, most) if peer.moment == moment else 0 for peer in peers]
    samples = sum(shown)
    speed = sum(peer.samples_per_s for peer in peers)
    return RunView(
        run,
        moment.step,
        mean_loss(peers, max_samples or inf),
        samples,
        target,
        max(0, target - samples) / speed if speed else None,
        sum(peer.bytes_sent for peer in peers),
        sum(peer.bytes_received for peer in peers),
        tuple(PeerView(peer.peer_id, "", own, peer.samples_per_s) for peer, own in zip(peers, shown, strict=True)),
        bans,
        moment.rollbacks,
        held_out=shown_loss(held_out.newest),
        best_held_out=shown_loss(held_out.best),
        has_ended=any(peer.has_ended for peer in peers if peer.moment == moment),
    )


def shown_loss(loss: HeldOutLoss | None) -> HeldOutView | None:
    """Return the view of a loss."""
    return None if loss is None else HeldOutView(loss.step, loss.loss if isfinite(loss.loss) else None)
