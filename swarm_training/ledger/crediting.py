"""A peer's part in the ledger at meetings: it signs its samples, countersigns those of others, and checks leaders."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_training.core.moment import Moment
from swarm_training.ledger.contributions import (
    MAX_ROUND_BYTES,
    MAX_SIGNED_CONTRIBUTION_BYTES,
    Contribution,
    RoundContributions,
    countersign,
    verify_contribution,
)
from swarm_training.ledger.ledger import Ledger
from swarm_training.ledger.signing import parsed
from swarm_training.pb import training_ledger_pb2 as ledger_pb
from swarm_training.pb import training_pb2 as pb

_MAX_PEERS = 4096
_MAX_CHECKS = 8  # different contributions of one peer to one step: signatures take time to check
_logger = logging.getLogger(__name__)


class Crediting:
    """A peer's signer and checker of contributions. Training goes on whatever is wrong with the ledger."""

    def __init__(self, ledger: Ledger, own: SwarmAccess, moment: Callable[[], Moment]) -> None:
        """Sign with the key and token of ``own``. ``moment``: returns the moment of the run."""
        self._ledger = ledger
        self._access = own
        self._moment = moment
        self._own: tuple[Moment, int, bytes] | None = None
        self._checked_at: Moment | None = None
        self._checked: dict[str, set[bytes]] = {}  # digests of contributions to that step, by peer

    def creditable(self, samples: int) -> int:
        """Return how many of these samples the ledger's limits let count."""
        return min(samples, self._ledger.limits.max_samples)

    def own(self, samples: int) -> bytes:
        """Return this peer's signed contribution, the same for all meetings of a step; empty if it gives nothing."""
        moment, samples = self._moment(), self.creditable(samples)
        if samples < 1:
            return b""
        if self._own is None or self._own[:2] != (moment, samples):
            content = Contribution(self._ledger.run, moment, self._access.identity.peer_id, samples)
            signed = content.signed(self._access.identity, self._access.token)
            self._own = moment, samples, signed.SerializeToString()
        return self._own[2]

    def check(self, peer_id: str, join: pb.Join) -> None:
        """Remove the contribution from a peer's join if it is wrong: the peer still takes part, without credit."""
        if join.contribution:
            try:
                self._require_right(peer_id, join)
            except ValueError as error:
                _logger.info("%s will not be credited: %s", peer_id, error)
                join.ClearField("contribution")

    def _require_right(self, peer_id: str, join: pb.Join) -> None:
        moment = self._moment()
        self._count_check(peer_id, join.contribution, moment)
        signed = parsed(ledger_pb.SignedByPeer, join.contribution, MAX_SIGNED_CONTRIBUTION_BYTES)
        given = verify_contribution(signed, self._ledger.organiser, time.time()).contribution
        if (given.run, given.moment, given.peer_id) != (self._ledger.run, moment, peer_id):
            raise ValueError("its contribution is that of another peer, run or step")
        most = self.creditable(join.samples)
        # A peer that holds a result has signed for the samples in that result, and may have more by now.
        if given.samples > most or (given.samples < most and not join.accepted.group):
            raise ValueError(f"its contribution is of {given.samples} samples, and it joins with {join.samples}")

    def _count_check(self, peer_id: str, data: bytes, moment: Moment) -> None:
        if self._checked_at != moment:
            self._checked_at = moment
            self._checked.clear()
        digests = self._checked.get(peer_id, set()) | {sha256(data).digest()}
        if len(digests) > _MAX_CHECKS or len(self._checked) > _MAX_PEERS:
            raise ValueError("too many contributions to one step have come")
        self._checked[peer_id] = digests

    def countersign(self, joins: Sequence[pb.Join]) -> bytes:
        """Sign and return the round of these joins, whose contributions were checked; empty if there is no round."""
        now, entries = time.time(), []
        for join in joins:
            if not join.contribution:
                continue
            signed = parsed(ledger_pb.SignedByPeer, join.contribution, MAX_SIGNED_CONTRIBUTION_BYTES)
            try:
                entries.append((verify_contribution(signed, self._ledger.organiser, now).contribution, signed))
            except ValueError as error:  # its token has expired meanwhile
                _logger.info("a member is not credited: %s", error)
        own = self._access
        peers = {own.identity.peer_id, *(given.peer_id for given, _ in entries)}
        if not entries or len(peers) < self._ledger.limits.min_peers:
            return b""
        moment = max(given.moment for given, _ in entries)
        kept = [signed for given, signed in entries if given.moment == moment]
        data = countersign(self._ledger.run, moment, kept, now, own.identity, own.token)
        return data if len(data) <= MAX_ROUND_BYTES else b""

    def require_fair(
        self, round_: RoundContributions, moment: Moment, leader: str, weights: Mapping[str, int], given: int
    ) -> None:
        """Check the round of a meeting at ``moment`` under ``leader``. Raise ValueError if the round is of another
        meeting, or credits a peer with more samples than it had. Log a warning if this peer lacks credit.

        ``weights``: the samples with which each member joined; ``given``: this peer's samples in the result.
        """
        credited = {each.contribution.peer_id: each.contribution.samples for each in round_.credited}
        if (round_.moment, round_.leader) != (moment, leader):
            raise ValueError("the round is that of another meeting")
        if any(samples > weights.get(peer, 0) for peer, samples in credited.items()):
            raise ValueError("the round credits peers with more samples than they had")
        own = credited.get(self._access.identity.peer_id, 0)
        if own != self.creditable(given):
            _logger.warning(
                "%s, which led step %d, has credited this peer with %d samples instead of %d",
                *(leader, moment.step + 1, own, self.creditable(given)),
            )
