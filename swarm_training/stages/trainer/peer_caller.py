"""The requests to the peers of a stage: one peer after another is asked until one answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from swarm_protocol.errors import (
    AccessDenied,
    NotFinite,
    PeerBusy,
    PeerMoved,
    PeerUnavailable,
    RequestRejected,
    SwarmError,
    TrainingDiverged,
)
from swarm_training.core.record import Progress
from swarm_training.stages.routing.router import Router
from swarm_training.stages.routing.run_stages import Stages
from swarm_training.stages.routing.speed import BACKWARD, FORWARD
from swarm_training.stages.rpc.answers import StageAnswer
from swarm_training.stages.rpc.client import MicroBatch, StageRequest, StagesClient
from swarm_training.stages.trainer.config import TrainerConfig

_LISTEN_S = 0.5  # between two checks whether the peer that computes is still heard of
_ENOUGH = 2  # refusals after which the request is at fault, and not the peers
_logger = logging.getLogger(__name__)


Look = Callable[[], Stages]


class StepOver(Exception):
    """The error that no peer of a stage is at this moment of the run any more."""


class PeerCaller:
    """A caller that sends a trainer's requests to stage peers, and sends them again where it may. ``num_retries``: the
    number of requests that had to be made again."""

    def __init__(self, look: Look, router: Router, config: TrainerConfig, client: StagesClient) -> None:
        """Set up requests. ``look``: returns the living peers of each stage, as they are known now."""
        self._look, self._router, self._config, self._client = look, router, config, client
        self.num_retries = 0

    async def ask(self, asked: StageRequest, kept_by: str | None = None) -> tuple[StageAnswer, Progress]:
        """Return the answer, and the peer that gave it. ``kept_by``: see ``Router.choose``.

        Raises:
            StepOver: no peer is at this moment any more.
            RequestRejected, AccessDenied: the request is wrong, or this trainer may not ask.
            TrainingDiverged: the answer is not finite, whichever peer computes it.
        """
        stage, kind = asked.which.stage, BACKWARD if asked.is_backward else FORWARD
        refusals: dict[str, SwarmError] = {}
        clock = asyncio.get_running_loop().time
        while True:
            peers = {peer.peer_id: peer for peer in self._present(asked.which)}
            if not peers:
                raise StepOver
            _require_no_agreement(refusals, peers)
            willing = peers.keys() - refusals.keys()
            peer_id = self._router.choose(willing, kind, clock(), kept_by)
            if peer_id is None:
                await asyncio.sleep(min(self._config.poll_s, self._router.wait_s(willing, clock())))
                continue
            try:
                return await self._ask_one(asked, peers[peer_id], peers, kind)
            except (RequestRejected, AccessDenied, NotFinite) as error:
                refusals[peer_id] = error
            except SwarmError as error:
                _logger.debug("stage %d: %s gives no answer: %s", stage, peer_id, error)
            self.num_retries += 1

    async def note_not_finite(self, which: MicroBatch, ids: Tensor, labels: Tensor) -> bool:
        """Report to all peers of the last stage at once, see ``StagesClient``. Return False if at least one of them
        returns False, and none returns True. If no peer answers, return True, so that the caller reports again."""
        timeout_s = self._config.first_deadline_s
        calls = (self._client.note_not_finite(peer, which, ids, labels, timeout_s) for peer in self._present(which))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, SwarmError):
                raise answer
        return True in answers or False not in answers

    def _present(self, which: MicroBatch) -> list[Progress]:
        """Return the peers that can be asked about a micro-batch."""
        return [peer for peer in self._look()[which.stage] if peer.moment == which.moment and peer.is_reachable]

    async def _ask_one(
        self, asked: StageRequest, peer: Progress, candidates: Collection[str], kind: str
    ) -> tuple[StageAnswer, Progress]:
        router, clock, peer_id = self._router, asyncio.get_running_loop().time, peer.peer_id
        asked_s = clock()
        deadline_s = self._deadline_s(peer_id, candidates, kind, asked_s)
        router.asked(peer_id, candidates, kind, asked_s)
        note = partial(router.withdrawn, peer_id, kind)  # after a cancellation, nothing is known of the peer
        try:
            answering = self._client.ask(asked, peer, deadline_s)
            answer = await self._unless_silent(asked.which.stage, peer_id, answering)
            note = partial(router.answered, peer_id, kind, asked_s)
        except (PeerBusy, PeerMoved):  # the next look says where a moved peer is
            note = partial(router.busy, peer_id, kind)
            raise
        except SwarmError:
            note = partial(router.failed, peer_id, kind)
            raise
        finally:
            note(clock())
        return answer, peer

    async def _unless_silent(
        self, stage: int, peer_id: str, answering: Coroutine[Any, Any, StageAnswer]
    ) -> StageAnswer:
        """Return the answer. Raises PeerUnavailable if meanwhile nothing is heard of the peer any more."""
        task = asyncio.ensure_future(answering)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_LISTEN_S)
                if not task.done() and all(peer.peer_id != peer_id for peer in self._look()[stage]):
                    raise PeerUnavailable("nothing is heard of the peer any more", peer_id)
            return task.result()
        finally:
            task.cancel()

    def _deadline_s(self, peer_id: str, candidates: Collection[str], kind: str, now: float) -> float:
        if not self._router.is_known(candidates, kind):
            return self._config.first_deadline_s
        expected_s = self._router.ready_s(peer_id, candidates, kind, now) - now
        return max(self._config.least_deadline_s, self._config.slack * expected_s)


def _require_no_agreement(refusals: Mapping[str, SwarmError], peers: Collection[str]) -> None:
    """Raise a refusal of the request if enough peers have refused it, or all that there are."""
    if not refusals or (len(refusals) < _ENOUGH and not refusals.keys() >= set(peers)):
        return
    error = next(iter(refusals.values()))
    if isinstance(error, NotFinite):
        raise TrainingDiverged(f"whoever computes it: {error}; use a lower learning rate")
    raise error
