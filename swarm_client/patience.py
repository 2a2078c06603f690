"""How long a pass without a session is tried again when servers fail."""

from __future__ import annotations

from swarm_client.background import now_s
from swarm_client.events import Reporter, Retry, Waiting
from swarm_client.routing import Chain
from swarm_client.swarm import Swarm
from swarm_protocol.errors import NoRoute, PeerError, RecoveryFailed
from swarm_protocol.span import Span


class Patience:
    """Runs out when nothing has worked for ``recovery_timeout_s`` since the first failure."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._reporter = Reporter(swarm.config.on_event)
        self._deadline_s: float | None = None
        self._tried: list[str] = []

    async def chain(self, span: Span) -> Chain:
        """The fastest chain at present; waits for missing blocks.

        Raises:
            NoRoute: there is none, though no server has failed. RecoveryFailed: there is none any more.
        """
        if self._deadline_s is None:
            return await self._swarm.chain(span)
        left_s = max(0.0, self._deadline_s - now_s())
        try:
            return await self._swarm.chain(
                span, timeout_s=left_s, on_wait=lambda *why: self._reporter.report(Waiting(*why))
            )
        except NoRoute as error:
            self._tried.append(str(error))
            raise self._over("", span) from None

    def failed(self, error: PeerError) -> None:
        """Raises RecoveryFailed if it is enough."""
        self._swarm.failed(error)
        self._tried.append(str(error))
        if self._deadline_s is None:
            self._deadline_s = now_s() + self._swarm.config.recovery_timeout_s
        if now_s() >= self._deadline_s:
            raise self._over(error.peer_id, error.span) from None
        self._reporter.report(Retry(error.span, error.peer_id, str(error)))

    def renew(self) -> None:
        """Something has worked."""
        self._deadline_s = None
        self._tried.clear()

    def _over(self, peer_id: str, span: Span | None) -> RecoveryFailed:
        tried = tuple(dict.fromkeys(self._tried))
        return RecoveryFailed(
            f"blocks {span} could not be computed by any server within {self._swarm.config.recovery_timeout_s:g} s: "
            f"{'; '.join(tried)}",
            peer_id,
            span,
            tried,
        )
