"""What follows from the progress that peers report. Decides from data alone.

Who is ahead of whom is a matter of moments, not of steps: after a rollback the run is at an earlier step than those who
have not heard of it.

Quorums make sure that a run never forks. The *roster* of a step are the peers that could be reached and took part in
the averaging that led to it. The next averaging counts only if it has a majority of that roster, less those that are
evidently gone; so of two halves of a network at most one goes on, and each step's roster is that step's electorate
(dynamic voting: Jajodia and Mutchler, 1990). Half of them is enough if it has the first of them (dynamic-linear
voting).

Where a batch is made of named micro-batches, peers meet when their sets of them are disjoint and complete, and not when
somebody else wants to: a meeting cannot succeed otherwise, but to hand on a result that may have been decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import sha256

from swarm_training.core.bitmap import are_disjoint, is_partition
from swarm_training.core.moment import Moment
from swarm_training.core.record import MEETING, PRESENT, Progress

_MIN_VOTES = 2  # to exclude somebody


@dataclass(frozen=True)
class View:
    """What a peer knows of a run at one moment.

    Attributes:
        own: its own record.
        others: those it has heard of lately that are part of the run, and not just joining.
        silent: those it has not heard of for a moment.
        gone: ids of those that have left, have not joined yet, stand aside or have been banned for a while, or whose
            process has evidently ended.
    """

    own: Progress
    others: tuple[Progress, ...] = ()
    silent: tuple[Progress, ...] = ()
    gone: frozenset[str] = frozenset()

    @property
    def all(self) -> tuple[Progress, ...]:
        return self.own, *self.others

    def at(self, moment: Moment) -> tuple[Progress, ...]:
        return tuple(peer for peer in self.all if peer.moment == moment and peer.state in PRESENT)


def samples_at(view: View, moment: Moment) -> int:
    """Accumulated by all together towards the next step."""
    return sum(peer.samples for peer in view.at(moment))


def is_batch_complete(view: View) -> bool:
    """In this view, or in that of somebody who wants to meet already."""
    peers = view.at(view.own.moment)
    if view.own.counts_exactly:
        return _is_exactly_complete(peers, view.own)
    enough = sum(peer.samples for peer in peers) >= view.own.target_batch_size
    return enough or any(peer.state == MEETING for peer in peers)


def _is_exactly_complete(peers: Collection[Progress], own: Progress) -> bool:
    """Or there is a result that may have been decided, and has to be handed on."""
    if decided := {peer.decided for peer in peers if peer.decided}:
        return own.accepted in decided  # who does not hold the result waits for the others to step
    parts = (peer.micro_batches for peer in peers)
    return any(peer.accepted for peer in peers) or is_partition(parts, own.target_batch_size)


def must_discard(view: View) -> bool:
    """Whether this peer has to give up what it has added up: a micro-batch of it counts at another peer too, that with
    the lower id keeps it; or the batch is decided without this peer, which still could hold up a barrier."""
    own = view.own
    mates = [peer for peer in view.at(own.moment) if peer is not own]
    if not own.samples or own.decided:
        return False
    if any(peer.decided not in (b"", own.accepted) for peer in mates):
        return True
    lower = (peer for peer in mates if peer.peer_id < own.peer_id)
    return not own.accepted and any(not are_disjoint((peer.micro_batches, own.micro_batches)) for peer in lower)


def excluded_by_most(records: Collection[Progress]) -> frozenset[str]:
    """Whom more than half of the others say to exclude, and two of them at least: nobody can exclude one by itself."""
    votes = Counter(peer_id for peer in records for peer_id in set(peer.excludes) - {peer.peer_id})
    ids = {peer.peer_id for peer in records}
    return frozenset(
        peer_id for peer_id, number in votes.items() if number >= _MIN_VOTES and 2 * number > len(ids - {peer_id})
    )


def seconds_to_step(view: View) -> float | None:
    """Until the batch will be complete at the present speed; None if nobody has measured one yet."""
    peers = view.at(view.own.moment)
    missing = view.own.target_batch_size - sum(peer.samples for peer in peers)
    speed = sum(peer.samples_per_s for peer in peers)
    if missing <= 0:
        return 0.0
    return missing / speed if speed > 0 else None


def expected_at(view: View, moment: Moment, roster: Collection[str]) -> frozenset[str]:
    """Who is waited for: all that are at this moment, and those of its roster that are alive but not so far yet."""
    lagging = (peer.peer_id for peer in view.all if peer.peer_id in roster and peer.moment < moment)
    return frozenset(peer.peer_id for peer in view.at(moment)) | frozenset(lagging)


def rank(run: str, moment: Moment, peer_id: str) -> bytes:
    """Low ranks lead; whose it is changes with every step."""
    return sha256(f"{run}/{moment}/{peer_id}".encode()).digest()


def leader_of(view: View, unreachable: Collection[str] = ()) -> Progress | None:
    """Who leads the next meeting in this view; None if nobody can be called."""
    moment, run = view.own.moment, view.own.run
    candidates = [
        peer
        for peer in view.at(moment)
        if peer.is_reachable and not peer.decided and (peer is view.own or peer.peer_id not in unreachable)
    ]
    return min(candidates, key=lambda peer: rank(run, moment, peer.peer_id), default=None)


def has_quorum(present: Collection[str], roster: Iterable[str], gone: Collection[str]) -> bool:
    """Whether those who are present may decide for all of the roster, less those that are gone."""
    electorate = sorted(set(roster) - set(gone))
    votes = sum(peer in present for peer in electorate)
    if not electorate or 2 * votes > len(electorate):
        return True
    return 2 * votes == len(electorate) and electorate[0] in present


def known_at(view: View, moment: Moment) -> frozenset[str]:
    """All that are at this moment, silent ones too: newcomers, who are in no roster yet, count as much as others when a
    group is formed."""
    silent = (peer.peer_id for peer in view.silent if peer.moment == moment)
    return frozenset(peer.peer_id for peer in view.at(moment)).union(silent)


def is_behind(view: View, roster: Collection[str]) -> bool:
    """Whether the others have gone on: a quorum of this moment's roster, or half of all others, are at a later one."""
    later = {peer.peer_id for peer in view.others if peer.moment > view.own.moment}
    return bool(later) and (has_quorum(later, roster, view.gone) or 2 * len(later) >= len(view.others))


def sources_of_state(view: View) -> tuple[Progress, ...]:
    """Who can be asked for the state of the run: the most that agree on a moment and a digest, none of them behind this
    peer; of two groups that are equally large, the one that is further."""
    least = view.own.moment if view.own.state in PRESENT else Moment(0, 0)
    groups: dict[tuple[Moment, bytes], list[Progress]] = {}
    for peer in view.others:
        is_own_state = (peer.moment, peer.state_digest) == (view.own.moment, view.own.state_digest)
        if peer.is_reachable and peer.state_digest and peer.moment >= least and not is_own_state:
            groups.setdefault((peer.moment, peer.state_digest), []).append(peer)
    return tuple(max(groups.items(), key=lambda group: (len(group[1]), group[0]))[1]) if groups else ()


def is_in_minority(view: View) -> bool:
    """Whether most of the others at the same moment have another state, and agree on it."""
    return bool(view.own.state_digest) and majority_digest(view.at(view.own.moment)) != view.own.state_digest


def majority_digest(records: Iterable[Progress]) -> bytes | None:
    """The state that most have, of records of one moment; of two that equally many have, that of the peer which is
    first by id. A peer counts once."""
    digests = {peer.peer_id: peer for peer in records if peer.state_digest}
    known = [digests[peer_id] for peer_id in sorted(digests)]
    counts = Counter(peer.state_digest for peer in known)
    return max(counts, key=lambda digest: counts[digest]) if counts else None
