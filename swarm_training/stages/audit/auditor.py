"""The auditor of a trainer: other peers compute some of a trainer's answers again before the trainer uses them.

The draw of which answers to audit comes after the answer. If two peers disagree, the auditor asks more peers of the
stage until more than half of all that were asked agree. It then avoids each peer with another answer, and accuses that
peer before its mates (the other peers of its stage). The mates compute the same work again and exclude the peer. If no
majority is found, as with two peers, it is unknown which one is wrong. No answer is used then, all these peers are
avoided for a while, and all their later answers are audited.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

from swarm_protocol.errors import BadReply, PeerMoved, SwarmError
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.stages.audit.client import AuditClient, AuditedRequest, AuditEvidence, answer_of
from swarm_training.stages.audit.sketch import SEED_BYTES
from swarm_training.stages.audit.testimony import AuditAnswer, Testimony, Tolerance, majority
from swarm_training.stages.rpc.client import BackwardReply

R = TypeVar("R", Tensor, BackwardReply)
_TRIES, _RETRY_S = 3, 0.5  # attempts to accuse a peer before one mate, and the pause between them
_UNSIGNED = 3  # consecutive unsigned answers after which a peer is avoided; fewer prove nothing, as peers die or move
_logger = logging.getLogger(__name__)


class AuditedPeer(Protocol):
    """A peer of a stage as the trainer sees it."""

    @property
    def peer_id(self) -> str: ...
    @property
    def moment(self) -> Moment: ...
    @property
    def address(self) -> str: ...
    @property
    def tls_fingerprint(self) -> bytes: ...


Stages = Sequence[Sequence[Any]]
Look = Callable[[], Stages]


class Asker(Protocol):
    """The interface of ``PeerCaller`` in the trainer."""

    async def ask(
        self,
        stage: int,
        moment: Moment,
        kind: str,
        call: Callable[[Progress, float], Awaitable[R]],
        kept_by: str | None = None,
    ) -> tuple[R, Progress]: ...


@dataclass(frozen=True)
class AuditConfig:
    """The settings of audits. Raises ValueError if a setting is out of its range.

    Attributes:
        share: the fraction of all answers that is audited, above 0 and up to 1.
        precision: the precision in which peers compute.
        activations, gradients: the wire forms in which they travel.
        suspicion_s: the time for which peers are avoided if it is unknown which of them is wrong.
        timeout_s: the time limit for a signature, and for the judgement of a mate.
    """

    share: float
    precision: str = "fp32"
    activations: str = "fp32"
    gradients: str = "fp32"
    suspicion_s: float = 20.0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"the share of audits is {self.share}: expected a number above 0, up to 1")


@dataclass(frozen=True)
class _Witness:
    testimony: Testimony
    evidence: AuditEvidence

    @property
    def peer_id(self) -> str:
        return self.testimony.peer_id


class Auditor:
    """A trainer's auditor. All its methods are for one event loop.

    Attributes:
        num_audits: the number of audits that have begun.
        convicted: the ids of peers that answered wrongly, each confirmed by at least one mate.
    """

    def __init__(
        self,
        config: AuditConfig,
        run: str,
        look: Look,
        asker: Callable[[Look], Asker],
        client: AuditClient,
        draw: Callable[[], float] | None = None,
    ) -> None:
        """Set up the auditor. ``look``: returns the living peers of each stage. ``asker``: makes an ``Asker`` for a
        look. ``draw``: returns an unpredictable number, uniform in [0, 1); None: the system's random numbers."""
        self._config, self._run, self._look, self._asker, self._client = config, run, look, asker, client
        self._draw = draw or random.SystemRandom().random
        self._asking = asker(self.allowed)
        self._avoided_until_s: dict[str, float] = {}
        self._disputed: set[str] = set()  # every answer of these peers is audited
        self._unsigned: Counter[str] = Counter()
        self.num_audits = 0
        self.convicted: set[str] = set()

    def allowed(self) -> Stages:
        """Return the peers of each stage that the trainer may ask now."""
        now = asyncio.get_running_loop().time()
        avoided = {peer_id for peer_id, until_s in self._avoided_until_s.items() if until_s > now}
        return _without(self._present(), avoided)

    def _present(self) -> Stages:
        return _without(self._look(), self.convicted)

    async def ask(
        self,
        asked: AuditedRequest,
        kind: str,
        call: Callable[[Progress, float], Awaitable[R]],
        kept_by: str | None = None,
    ) -> tuple[R, Progress]:
        """Return the answer and its peer, see ``PeerCaller.ask``. ``call`` sends the request to one peer."""
        which = asked.which
        while True:
            reply, peer = await self._asking.ask(which.stage, which.moment, kind, call, kept_by)
            if peer.peer_id not in self._disputed and self._draw() >= self._config.share:
                return reply, peer
            if await self._is_confirmed(asked, kind, call, answer_of(reply), peer):
                return reply, peer

    async def _is_confirmed(
        self,
        asked: AuditedRequest,
        kind: str,
        call: Callable[[Progress, float], Awaitable[R]],
        answer: AuditAnswer,
        peer: Progress,
    ) -> bool:
        """Return whether others confirm the answer, or none can check it. Avoid or convict peers that disagree."""
        if not self._others(asked, {peer.peer_id}):
            return True
        self.num_audits += 1
        seed, seen = secrets.token_bytes(SEED_BYTES), {peer.peer_id}
        first = await self._witness(asked, answer, peer, seed, withdraws=False)
        if first is None:
            return False
        witnesses = [first]
        while others := self._others(asked, seen):
            witness = await self._another_witness(asked, kind, call, seed, others, seen)
            if witness is None:
                continue
            witnesses.append(witness)
            agreed = {each.peer_id for each in majority([each.testimony for each in witnesses], self._tolerance(asked))}
            if agreed:
                self._disputed -= agreed
                wrong = [each for each in witnesses if each.peer_id not in agreed]
                await asyncio.gather(*(self._convict(asked, each) for each in wrong))
                return first.peer_id in agreed
        if len(witnesses) == 1:
            return True
        self._leave_alone(asked, [each.peer_id for each in witnesses])
        return False

    def _tolerance(self, asked: AuditedRequest) -> Tolerance:
        config = self._config
        return Tolerance.of(config.precision, config.gradients if asked.is_backward else config.activations)

    async def _another_witness(
        self,
        asked: AuditedRequest,
        kind: str,
        call: Callable[[Progress, float], Awaitable[R]],
        seed: bytes,
        others: Collection[str],
        seen: set[str],
    ) -> _Witness | None:
        """Return the answer and signature of one of ``others``; None if there is none. Add to ``seen`` those that need
        not be asked again."""
        try:
            asker = self._asker(partial(self._only, asked, frozenset(others)))
            reply, other = await asker.ask(asked.which.stage, asked.which.moment, kind, call)
        except SwarmError as error:  # the fault of the peers that were asked, not of the request
            _logger.debug("stage %d: no other peer computes %s: %s", asked.which.stage, asked.which, error)
            seen.update(others)
            return None
        seen.add(other.peer_id)
        return await self._witness(asked, answer_of(reply), other, seed, withdraws=True)

    def _others(self, asked: AuditedRequest, seen: Collection[str]) -> set[str]:
        """Return the ids of other peers at this moment. Avoided peers are included: their answers are only compared."""
        peers: Sequence[AuditedPeer] = self._present()[asked.which.stage]
        at = {peer.peer_id for peer in peers if peer.moment == asked.which.moment and peer.address}
        return at.difference(seen)

    def _only(self, asked: AuditedRequest, peer_ids: Collection[str]) -> Stages:
        stages = self._present()
        return _without(stages, {peer.peer_id for peer in stages[asked.which.stage]}.difference(peer_ids))

    async def _witness(
        self, asked: AuditedRequest, answer: AuditAnswer, peer: Progress, seed: bytes, *, withdraws: bool
    ) -> _Witness | None:
        """Return the peer's answer and signature; None if the peer does not sign, which may happen now and then."""
        try:
            evidence = await self._client.attest(peer, asked, answer, seed, self._config.timeout_s, withdraws=withdraws)
        except SwarmError as error:
            self._unsigned[peer.peer_id] += 1
            _logger.debug("%s does not sign its answer: %s", peer.peer_id, error)
            if isinstance(error, BadReply) or self._unsigned[peer.peer_id] >= _UNSIGNED:
                _logger.warning("%s does not sign its answers, and is avoided for a while: %s", peer.peer_id, error)
                self._suspect([peer.peer_id])
            return None
        del self._unsigned[peer.peer_id]
        return _Witness(Testimony(peer.peer_id, answer, evidence.statement.sketch), evidence)

    def _leave_alone(self, asked: AuditedRequest, peer_ids: Sequence[str]) -> None:
        which = asked.which
        _logger.warning(
            "%s disagree about micro-batch %d of step %d at stage %d, and no other peer can say which is wrong: "
            "no answer is used, and these peers are avoided for %g s",
            " and ".join(peer_ids),
            which.number,
            which.moment.step,
            which.stage,
            self._config.suspicion_s,
        )
        self._suspect(peer_ids)

    def _suspect(self, peer_ids: Collection[str]) -> None:
        until_s = asyncio.get_running_loop().time() + self._config.suspicion_s
        self._avoided_until_s |= dict.fromkeys(peer_ids, until_s)
        self._disputed |= set(peer_ids)

    async def _convict(self, asked: AuditedRequest, wrong: _Witness) -> None:
        """Let the mates of a peer judge its answer. The trainer does not ask the peer meanwhile."""
        if wrong.peer_id in self.convicted:
            return
        self._suspect([wrong.peer_id])
        which = asked.which
        mates = [peer for peer in self._look()[which.stage] if peer.peer_id != wrong.peer_id and peer.address]
        judgements = await asyncio.gather(*(self._accuse(mate, asked, wrong) for mate in mates))
        if not any(judgements):
            _logger.warning(
                "%s has given another answer than other peers of stage %d, but none of its mates confirms that",
                wrong.peer_id,
                which.stage,
            )
            return
        if wrong.peer_id not in self.convicted:
            self.convicted.add(wrong.peer_id)
            _logger.warning(
                "%s has computed micro-batch %d of step %d at stage %d wrongly, as %d of %d mates have found: it is "
                "excluded",
                wrong.peer_id,
                which.number,
                which.moment.step,
                which.stage,
                sum(judgements),
                len(mates),
            )

    async def _accuse(self, mate: AuditedPeer, asked: AuditedRequest, wrong: _Witness) -> bool:
        callee = Progress(self._run, mate.peer_id, address=mate.address, tls_fingerprint=mate.tls_fingerprint)
        answer, evidence = wrong.testimony.answer, wrong.evidence
        for _ in range(_TRIES):
            try:
                return await self._client.accuse(callee, asked, answer, evidence, self._config.timeout_s)
            except PeerMoved:
                return False
            except SwarmError as error:
                _logger.debug("%s does not judge %s: %s", mate.peer_id, wrong.peer_id, error)
            await asyncio.sleep(_RETRY_S)
        return False


def _without(stages: Stages, peer_ids: Collection[str]) -> Stages:
    return [[peer for peer in stage if peer.peer_id not in peer_ids] for stage in stages] if peer_ids else stages
