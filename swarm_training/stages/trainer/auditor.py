"""The auditor of a trainer: other peers compute some of a trainer's answers again before the trainer uses them.

Whether an answer is audited is drawn after the answer has come, so that no peer can know it before. If two peers
disagree, the auditor asks more peers of the stage until more than half of all that were asked agree. It then avoids
each peer with another answer, and accuses that peer before its mates (the other peers of its stage). The mates compute
the same work again and exclude the peer. If no majority is found, as with two peers, it is unknown which one is wrong.
No answer is used then, all these peers are avoided for a while, and all their later answers are audited.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from swarm_protocol.errors import BadReply, SwarmError
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.stages.audit.client import AuditClient, AuditEvidence
from swarm_training.stages.audit.sketch import SEED_BYTES
from swarm_training.stages.audit.testimony import Testimony, Tolerance, majority
from swarm_training.stages.routing.run_stages import Stages
from swarm_training.stages.rpc.answers import StageAnswer
from swarm_training.stages.rpc.client import StageRequest
from swarm_training.stages.trainer.config import TrainerConfig
from swarm_training.stages.trainer.peer_caller import Look, PeerCaller

_SUSPICION_S = 20.0  # the time for which peers are avoided if it is unknown which of them is wrong
_TIMEOUT_S = 60.0  # the time limit for a signature, and for the judgement of a mate
_LATE_S = 5.0  # after the first answer of a step; until then, peers may be about to reach the step
_TRIES, _RETRY_S = 3, 0.5  # attempts to accuse a peer before one mate, and the pause between them
_UNSIGNED = 3  # consecutive unsigned answers after which a peer is avoided; fewer prove nothing, as peers die or move
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Witness:
    testimony: Testimony
    evidence: AuditEvidence

    @property
    def peer_id(self) -> str:
        return self.testimony.peer_id


class Auditor:
    """A trainer's auditor. All its methods are for one event loop. ``convicted``: the ids of peers that answered
    wrongly, each confirmed by at least one mate."""

    def __init__(
        self,
        config: TrainerConfig,
        look: Look,
        asker: Callable[[Look], PeerCaller],
        client: AuditClient,
    ) -> None:
        """Set up the auditor. ``look``: returns the living peers of each stage. ``asker``: makes a caller of the
        peers that a look returns."""
        self._config, self._look, self._asker, self._client = config, look, asker, client
        self._draw = random.SystemRandom().random
        self._asking = asker(self.allowed)
        self._avoided_until_s: dict[str, float] = {}
        self._disputed: set[str] = set()  # every answer of these peers is audited
        self._unsigned: Counter[str] = Counter()
        self._moment: Moment | None = None  # of the last audit
        self._late_s = 0.0  # from then on, no audit of this moment waits for peers that lag behind
        self._too_late: set[str] = set()  # peers for which an audit has waited in vain
        self.convicted: set[str] = set()

    def allowed(self) -> Stages:
        """Return the peers of each stage that the trainer may ask now."""
        now = asyncio.get_running_loop().time()
        avoided = {peer_id for peer_id, until_s in self._avoided_until_s.items() if until_s > now}
        return _without(self._present(), avoided)

    def _present(self) -> Stages:
        return _without(self._look(), self.convicted)

    async def ask(self, asked: StageRequest, kept_by: str | None = None) -> tuple[StageAnswer, Progress]:
        """Return the answer and its peer, see ``PeerCaller.ask``."""
        while True:
            answer, peer = await self._asking.ask(asked, kept_by)
            if peer.peer_id not in self._disputed and self._draw() >= self._config.audit_share:
                return answer, peer
            if await self._is_confirmed(asked, answer, peer):
                return answer, peer

    async def _is_confirmed(self, asked: StageRequest, answer: StageAnswer, peer: Progress) -> bool:
        """Return whether others confirm the answer, or none can check it. Avoid or convict peers that disagree."""
        if not await self._others_in_time(asked, {peer.peer_id}):
            return True  # a stage with one peer can be trained too
        seed, seen = secrets.token_bytes(SEED_BYTES), {peer.peer_id}
        first = await self._witness(asked, answer, peer, seed, withdraws=False)
        if first is None:
            return False
        witnesses = [first]
        while others := await self._others_in_time(asked, seen):
            witness = await self._another_witness(asked, seed, others, seen)
            if witness is None:
                continue
            witnesses.append(witness)
            agreed = {each.peer_id for each in majority([each.testimony for each in witnesses], self._tolerance(asked))}
            if agreed:
                self._disputed -= agreed
                wrong = [each for each in witnesses if each.peer_id not in agreed]
                await asyncio.gather(*(self._convict(asked, each) for each in wrong))
                return first.peer_id in agreed
        if len(witnesses) == 1:  # none of the others has given a signed answer
            return True
        self._leave_alone(asked, [each.peer_id for each in witnesses])
        return False

    def _tolerance(self, asked: StageRequest) -> Tolerance:
        forms = self._config.forms
        return Tolerance.of(self._config.precision, forms.gradients if asked.is_backward else forms.activations)

    async def _another_witness(
        self, asked: StageRequest, seed: bytes, others: Collection[str], seen: set[str]
    ) -> _Witness | None:
        """Return the answer and signature of one of ``others``; None if there is none. Add to ``seen`` those that need
        not be asked again."""
        try:
            asker = self._asker(partial(self._only, asked, frozenset(others)))
            answer, other = await asker.ask(asked)
        except SwarmError as error:  # the fault of the peers that were asked, not of the request
            _logger.debug("stage %d: no other peer computes %s: %s", asked.which.stage, asked.which, error)
            seen.update(others)
            return None
        seen.add(other.peer_id)
        return await self._witness(asked, answer, other, seed, withdraws=True)

    async def _others_in_time(self, asked: StageRequest, seen: Collection[str]) -> set[str]:
        """Return ``_others``. If there are none, wait up to ``_LATE_S`` for peers of the stage that are a step behind.

        The first peer to take a step is asked before its mates have taken the step.
        """
        clock, moment = asyncio.get_running_loop().time, asked.which.moment
        if moment != self._moment:
            self._moment, self._late_s = moment, clock() + _LATE_S
        before = Moment(moment.rollbacks, moment.step - 1)
        while not (others := self._others(asked, seen)):
            peers = self._present()[asked.which.stage]
            late = {peer.peer_id for peer in peers if peer.moment == before and peer.is_reachable} - self._too_late
            if not late:
                break
            if clock() >= self._late_s:
                self._too_late |= late
                break
            await asyncio.sleep(self._config.poll_s)
        self._too_late -= others
        return others

    def _others(self, asked: StageRequest, seen: Collection[str]) -> set[str]:
        """Return the ids of other peers at this moment. Avoided peers are included: their answers are only compared."""
        peers = self._present()[asked.which.stage]
        at = {peer.peer_id for peer in peers if peer.moment == asked.which.moment and peer.is_reachable}
        return at.difference(seen)

    def _only(self, asked: StageRequest, peer_ids: Collection[str]) -> Stages:
        stages = self._present()
        return _without(stages, {peer.peer_id for peer in stages[asked.which.stage]}.difference(peer_ids))

    async def _witness(
        self, asked: StageRequest, answer: StageAnswer, peer: Progress, seed: bytes, *, withdraws: bool
    ) -> _Witness | None:
        """Return the peer's answer and signature; None if the peer does not sign, which may happen now and then.
        ``withdraws``: the peer drops the gradient afterwards, since the trainer commits that of the first peer."""
        try:
            evidence = await self._client.attest(peer, asked, answer, seed, _TIMEOUT_S, withdraws=withdraws)
        except SwarmError as error:
            self._unsigned[peer.peer_id] += 1
            _logger.debug("%s does not sign its answer: %s", peer.peer_id, error)
            if isinstance(error, BadReply) or self._unsigned[peer.peer_id] >= _UNSIGNED:
                _logger.warning("%s does not sign its answers, and is avoided for a while: %s", peer.peer_id, error)
                self._suspect([peer.peer_id])
            return None
        del self._unsigned[peer.peer_id]
        return _Witness(Testimony(peer.peer_id, answer, evidence.statement.sketch), evidence)

    def _leave_alone(self, asked: StageRequest, peer_ids: Sequence[str]) -> None:
        which = asked.which
        _logger.warning(
            "%s disagree about micro-batch %d of step %d at stage %d, and no other peer can say which is wrong: "
            "no answer is used, and these peers are avoided for %g s",
            " and ".join(peer_ids),
            which.number,
            which.moment.step,
            which.stage,
            _SUSPICION_S,
        )
        self._suspect(peer_ids)

    def _suspect(self, peer_ids: Collection[str]) -> None:
        until_s = asyncio.get_running_loop().time() + _SUSPICION_S
        self._avoided_until_s |= dict.fromkeys(peer_ids, until_s)
        self._disputed |= set(peer_ids)

    async def _convict(self, asked: StageRequest, wrong: _Witness) -> None:
        """Let the mates of a peer judge its answer. The trainer does not ask the peer meanwhile."""
        if wrong.peer_id in self.convicted:
            return
        self._suspect([wrong.peer_id])
        which = asked.which
        mates = [peer for peer in self._look()[which.stage] if peer.peer_id != wrong.peer_id and peer.is_reachable]
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

    async def _accuse(self, mate: Progress, asked: StageRequest, wrong: _Witness) -> bool:
        answer, evidence = wrong.testimony.answer, wrong.evidence
        for _ in range(_TRIES):
            try:
                return await self._client.accuse(mate, asked, answer, evidence, _TIMEOUT_S)
            except SwarmError as error:  # a mate may be about to reach this step
                _logger.debug("%s does not judge %s: %s", mate.peer_id, wrong.peer_id, error)
            await asyncio.sleep(_RETRY_S)
        return False


def _without(stages: Stages, peer_ids: Collection[str]) -> Stages:
    return [[peer for peer in stage if peer.peer_id not in peer_ids] for stage in stages] if peer_ids else stages
