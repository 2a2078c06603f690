"""The retry budget of a pass without a session: how long it is repeated when servers fail."""

from __future__ import annotations

import contextlib

from swarm_client.core.background import now_s
from swarm_client.core.events import Reporter, Retry, Waiting
from swarm_client.passes.divergence import ADVICE
from swarm_client.routing.routing import Route
from swarm_client.swarm.stall import Stall
from swarm_client.swarm.swarm import Swarm
from swarm_client.swarm.watchdog import Stalled
from swarm_protocol.errors import NoRoute, NotFinite, PeerError, TrainingDiverged
from swarm_protocol.span import Span

_COMPUTED = "computed by any server"


class RetryBudget:
    """The retry budget of one pass. It ends if no block is computed within ``recovery_timeout_s`` after a failure.

    If an answer in training is not finite, it is first computed again, by another server if possible. Only the second
    answer decides whether the server or the training is to blame.

    Attributes:
        alarms: the number of proven servers that counted as stalled.
    """

    def __init__(self, swarm: Swarm, trains: bool = False) -> None:
        self._swarm = swarm
        self._trains = trains
        self.alarms = 0
        self._suspected: NotFinite | None = None
        self._reporter = Reporter(swarm.config.on_event)
        self._stall: Stall | None = None

    async def chain(self, span: Span) -> Route:
        """Return the currently fastest chain; wait for missing blocks.

        Raises:
            NoRoute: there is no chain, though no server has failed. RecoveryFailed: failures have left no chain.
        """
        stall = self._stall
        if self._suspected is not None:  # another server answers if there is one, or else the same
            with contextlib.suppress(NoRoute):  # no other server has the blocks
                return await self._swarm.chain(span, avoid=(self._suspected.peer_id,), timeout_s=0.0, pushes=False)
        if self._suspected is not None or stall is None:
            return await self._swarm.chain(span, pushes=False)
        try:
            return await self._swarm.chain(
                span,
                timeout_s=stall.time_left_s,
                on_wait=lambda *why: self._reporter.report(Waiting(*why)),
                pushes=False,
            )
        except NoRoute as error:
            stall.tried.append(str(error))
            raise stall.error(span, _COMPUTED) from None

    def failed(self, error: PeerError) -> None:
        """Record the failure. Raise RecoveryFailed if the budget is used up, TrainingDiverged if training diverges."""
        if self._trains and isinstance(error, NotFinite):
            if self._suspected is not None:
                same = self._suspected.peer_id == error.peer_id  # the second answer is another server's if possible
                who = f"server …{error.peer_id[-6:]} answers twice" if same else "two servers answer"
                what = f"values that are not finite (NaN or infinity) for blocks {error.span}, given finite ones"
                raise TrainingDiverged(f"{who} {what}: {ADVICE}") from None
            self._suspected = error
            return
        if isinstance(error, Stalled):  # each alarm of a proven server doubles the time of later watches
            self.alarms += self._swarm.has_worked(error.peer_id)
            self._swarm.distrust_newcomers()
        self._swarm.failed(error)
        if self._stall is None:
            timeout_s = self._swarm.config.recovery_timeout_s
            self._stall = Stall(now_s(), now_s() + timeout_s, timeout_s, error.peer_id)
        self._stall.tried.append(str(error))
        if not self._stall.time_left_s:
            raise self._stall.error(error.span, _COMPUTED) from None
        self._reporter.report(Retry(error.span, error.peer_id, str(error)))

    def renew(self, end: int = 0) -> None:
        """Renew the budget, because all blocks before ``end`` have been computed."""
        self._stall, suspected = None, self._suspected
        if suspected is None:
            return
        assert suspected.span is not None
        if end >= suspected.span.end:  # another server had finite results
            self._suspected = None
            self._swarm.failed(suspected)
            self._reporter.report(Retry(suspected.span, suspected.peer_id, str(suspected)))
