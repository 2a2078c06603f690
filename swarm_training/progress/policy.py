"""The decisions that follow from the peers' reported progress. The module decides from data alone.

Moments, not steps, show which peer is ahead: after a rollback the run is at an earlier step than peers that have not
heard of the rollback.

Quorums ensure that a run never forks. The *roster* of a step is the set of reachable peers that took part in the
averaging that led to the step. The next averaging counts only if it has a majority of that roster, without the peers
that are evidently gone. At most one of two halves of a network therefore goes on, and each step's roster is that step's
electorate (dynamic voting: Jajodia and Mutchler, 1990). Exactly half of the electorate is enough if it contains the
first peer by id (dynamic-linear voting).

If a batch consists of named micro-batches, peers meet when their sets are disjoint and complete, not when another peer
wants to meet. Otherwise a meeting can only hand on a result that may have been decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import sha256
from math import inf

from swarm_protocol.codecs.bitmap import are_disjoint, is_partition
from swarm_training.core.moment import Moment
from swarm_training.core.record import MEETING, PRESENT, Progress

_MIN_VOTES = 2  # to exclude a peer


@dataclass(frozen=True)
class LocalView:
    """A peer's knowledge of its run at one time."""

    own: Progress  # the peer's own record
    # Records of the other participants that it has heard from recently, without peers that are joining.
    others: tuple[Progress, ...] = ()
    silent: tuple[Progress, ...] = ()  # records of participants that it has not heard from recently
    # Ids of peers that have left, have not joined yet, stand aside, have been banned for a while, or whose process has
    # evidently ended.
    gone: frozenset[str] = frozenset()
    max_samples: float = inf  # the most samples of one peer that count, whatever it claims

    @property
    def all(self) -> tuple[Progress, ...]:
        return self.own, *self.others

    def samples_of(self, peers: Iterable[Progress]) -> float:
        """Return the samples of these peers that count towards the next step."""
        return sum(min(peer.samples, self.max_samples) for peer in peers)

    def at(self, moment: Moment) -> tuple[Progress, ...]:
        return tuple(peer for peer in self.all if peer.moment == moment and peer.state in PRESENT)


def samples_at(view: LocalView, moment: Moment) -> float:
    """Return the samples of all peers at a moment towards the next step, of each peer at most ``max_samples``."""
    return view.samples_of(view.at(moment))


def mean_loss(peers: Iterable[Progress], max_samples: float) -> float | None:
    """Return the mean of the losses that peers report, weighted by samples; None if no peer reports one.
    ``max_samples``: the most samples of one peer that count, whatever it claims."""
    weighted = [(peer.loss, min(peer.loss_samples, max_samples)) for peer in peers if peer.loss_samples]
    weight = sum(samples for _, samples in weighted)
    return sum(loss * samples for loss, samples in weighted) / weight if weight else None


def is_batch_complete(view: LocalView) -> bool:
    """Return whether the batch is complete in this view, or in the view of a peer that already wants to meet."""
    peers = view.at(view.own.moment)
    if view.own.counts_exactly:
        return _is_exactly_complete(peers, view.own)
    enough = view.samples_of(peers) >= view.own.target_batch_size
    return enough or any(peer.state == MEETING for peer in peers)


def _is_exactly_complete(peers: Collection[Progress], own: Progress) -> bool:
    """Return whether the micro-batches are complete, or this peer must hand on a result that may have been decided."""
    if decided := {peer.decided for peer in peers if peer.decided}:
        return own.accepted in decided  # a peer without the result waits until the others have stepped
    parts = (peer.micro_batches for peer in peers)
    return any(peer.accepted for peer in peers) or is_partition(parts, own.target_batch_size)


def must_discard(view: LocalView) -> bool:
    """Return whether this peer must discard its sums, for one of two reasons. A peer with a lower id, which keeps its
    sums, counts one of the same micro-batches. Or the batch is decided without this peer's sums, which could still hold
    up a barrier."""
    own = view.own
    mates = [peer for peer in view.at(own.moment) if peer is not own]
    if not own.samples or own.decided:
        return False
    if any(peer.decided not in (b"", own.accepted) for peer in mates):
        return True
    lower = (peer for peer in mates if peer.peer_id < own.peer_id)
    return not own.accepted and any(not are_disjoint((peer.micro_batches, own.micro_batches)) for peer in lower)


def of_usual_model(records: Collection[Progress]) -> list[Progress]:
    """Return the records with the most common model. Of equally common models, take the one with the largest digest."""
    counts = Counter(record.model for record in records)
    usual = max(counts, key=lambda model: (counts[model], model), default=b"")
    return [record for record in records if record.model == usual]


def excluded_by_most(records: Collection[Progress]) -> frozenset[str]:
    """Return the peers that more than half of the others, and at least two, exclude. No peer can exclude one alone."""
    votes = Counter(peer_id for peer in records for peer_id in set(peer.excludes) - {peer.peer_id})
    ids = {peer.peer_id for peer in records}
    return frozenset(
        peer_id for peer_id, number in votes.items() if number >= _MIN_VOTES and 2 * number > len(ids - {peer_id})
    )


def seconds_to_step(view: LocalView) -> float | None:
    """Return the seconds until the batch is complete at the present speed; None if no speed has been measured yet."""
    peers = view.at(view.own.moment)
    missing = view.own.target_batch_size - view.samples_of(peers)
    speed = sum(peer.samples_per_s for peer in peers)
    if missing <= 0:
        return 0.0
    return missing / speed if speed > 0 else None


def expected_at(view: LocalView, moment: Moment, roster: Collection[str]) -> frozenset[str]:
    """Return the peers to wait for: all at this moment, and peers of its roster that are alive but lag behind."""
    lagging = (peer.peer_id for peer in view.all if peer.peer_id in roster and peer.moment < moment)
    return frozenset(peer.peer_id for peer in view.at(moment)) | frozenset(lagging)


def rank(run: str, moment: Moment, peer_id: str) -> bytes:
    """Return a peer's rank, which changes with every step. The peer with the lowest rank leads."""
    return sha256(f"{run}/{moment}/{peer_id}".encode()).digest()


def leader_of(view: LocalView, unreachable: Collection[str] = ()) -> Progress | None:
    """Return the peer that leads the next meeting in this view; None if no peer can be called."""
    moment, run = view.own.moment, view.own.run
    candidates = [
        peer
        for peer in view.at(moment)
        if peer.is_reachable and not peer.decided and (peer is view.own or peer.peer_id not in unreachable)
    ]
    return min(candidates, key=lambda peer: rank(run, moment, peer.peer_id), default=None)


def has_quorum(present: Collection[str], roster: Iterable[str], gone: Collection[str]) -> bool:
    """Return whether the present peers may decide for the whole roster. Peers that are gone have no vote."""
    electorate = sorted(set(roster) - set(gone))
    votes = sum(peer in present for peer in electorate)
    if not electorate or 2 * votes > len(electorate):
        return True
    return 2 * votes == len(electorate) and electorate[0] in present


def known_at(view: LocalView, moment: Moment) -> frozenset[str]:
    """Return all peers at this moment, including silent ones. Newcomers, which are in no roster yet, count as much as
    other peers when a group is formed."""
    silent = (peer.peer_id for peer in view.silent if peer.moment == moment)
    return frozenset(peer.peer_id for peer in view.at(moment)).union(silent)


def is_behind(view: LocalView, roster: Collection[str]) -> bool:
    """Return whether a quorum of this moment's roster, or half of the other peers, have gone on to a later moment."""
    later = {peer.peer_id for peer in view.others if peer.moment > view.own.moment}
    return bool(later) and (has_quorum(later, roster, view.gone) or 2 * len(later) >= len(view.others))


def sources_of_state(view: LocalView) -> tuple[Progress, ...]:
    """Return the peers to ask for the state: the largest group that agrees on a moment and a digest, and is not behind
    this peer; of two equally large groups, the one that is further ahead."""
    least = view.own.moment if view.own.state in PRESENT else Moment(0, 0)
    groups: dict[tuple[Moment, bytes], list[Progress]] = {}
    for peer in view.others:
        is_own_state = (peer.moment, peer.state_digest) == (view.own.moment, view.own.state_digest)
        if peer.is_reachable and peer.state_digest and peer.moment >= least and not is_own_state:
            groups.setdefault((peer.moment, peer.state_digest), []).append(peer)
    return tuple(max(groups.items(), key=lambda group: (len(group[1]), group[0]))[1]) if groups else ()


def is_in_minority(view: LocalView) -> bool:
    """Return whether the most common state of the peers at this moment is not this peer's."""
    return bool(view.own.state_digest) and majority_digest(view.at(view.own.moment)) != view.own.state_digest


def majority_digest(records: Iterable[Progress]) -> bytes | None:
    """Return the most common state digest in the records of one moment; None if no record has one. Of equally common
    digests, return that of the first peer by id. Each peer counts once."""
    digests = {peer.peer_id: peer for peer in records if peer.state_digest}
    known = [digests[peer_id] for peer_id in sorted(digests)]
    counts = Counter(peer.state_digest for peer in known)
    return max(counts, key=lambda digest: counts[digest]) if counts else None
