"""The choice of the checkpoint from which a run starts again. The module decides from data alone.

All peers of a run have ended, and come back one after the other with the checkpoints on their disks. The first one
founds the run again, but may have left it early. It therefore waits for a while, in which the others offer theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from swarm_training.core.moment import Moment
from swarm_training.core.record import Kept, Lineage


def offer_of(moment: Moment, state_digest: bytes) -> Kept:
    """Return the offer of a checkpoint from this moment."""
    return Kept(moment.step, state_digest, Lineage(moment.rollbacks, moment.rollbacks))


def moment_of(offer: Kept) -> Moment:
    return Moment(offer.lineage.rollbacks, offer.step)


def newest_shown(own: Kept, others: Collection[Kept], needs_half: bool) -> Kept:
    """Return the newest of the checkpoints that peers offer; ``own`` if none is newer.

    Moments decide, not steps: a rollback has undone later steps of earlier moments. Of several states of one moment,
    return the one that most peers offer.

    Args:
        own: the checkpoint of the peer that founds the run again.
        others: one offer of each other peer.
        needs_half: whether half of all these peers must offer a checkpoint from that moment or a later one. Then a
            few strangers cannot pretend that the run had come further than it has.
    """
    offers = [own, *others]

    def is_shown(moment: Moment) -> bool:
        return 2 * sum(moment_of(each) >= moment for each in offers) >= len(offers)

    counts = Counter((moment_of(each), each.state_digest) for each in offers)
    shown = [each for each in offers if is_shown(moment_of(each)) or not needs_half]
    newest = max(
        shown, key=lambda each: (moment_of(each), counts[moment_of(each), each.state_digest], each.state_digest)
    )
    return newest if moment_of(newest) > moment_of(own) else own
