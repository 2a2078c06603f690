"""The progress that servers report on all their work: a server that makes progress is alive, however slow it is."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from math import inf

from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.pb import swarm_pb2 as pb

_FRESH_S = 5.0  # a reported queue is better than the record's for this long (records are published every 20 s)


@dataclass
class _Said:
    """The latest reports of one server to any session of this client, with their times.

    Attributes:
        computed: the server's own count of all its work; ``grew_s``: when that count was last seen to grow.
    """

    heard_s: float = -inf
    has_answered: bool = False
    probed_s: float = -inf
    computed: int = 0
    grew_s: float = -inf
    queue_s: float = 0.0
    queue_time_s: float = -inf

    def answer(self, now_s: float) -> None:
        self.heard_s, self.has_answered = now_s, True

    def wait(self, queue_s: float | None, now_s: float) -> None:
        self.heard_s = now_s
        if queue_s is not None and 0 <= queue_s < inf:
            self.queue_s, self.queue_time_s = queue_s, now_s

    def compute(self, computed: int, now_s: float, between_probes_s: float) -> None:
        # After a longer gap, the work may have been done long ago.
        if computed > self.computed and now_s - self.probed_s <= between_probes_s:
            self.grew_s = now_s
        self.probed_s, self.computed = now_s, computed


class ProgressTracker:
    """The progress of all servers that this client uses. Pure."""

    def __init__(self, between_probes_s: float = 5.0) -> None:
        """Set the longest gap between two probes at which new work counts as just done."""
        self._between_probes_s = between_probes_s
        self._said: defaultdict[str, _Said] = defaultdict(_Said)

    def forget(self, peer_id: str) -> None:
        """Forget a server that has failed."""
        self._said.pop(peer_id, None)

    def answered(self, peer_id: str, now_s: float) -> None:
        """Note that outputs have arrived which the server must have helped to compute."""
        self._said[peer_id].answer(now_s)

    def waits(self, peer_id: str, queue_s: float | None, now_s: float) -> None:
        """Note how long a step would wait at the server, by its own report; None or an impossible value is ignored."""
        self._said[peer_id].wait(queue_s, now_s)

    def probed(self, peer_id: str, progress: pb.SessionProgress, now_s: float) -> None:
        """Note an answer to Progress."""
        self._said[peer_id].compute(progress.computed, now_s, self._between_probes_s)
        self.waits(peer_id, progress.queue_s if progress.HasField("queue_s") else None, now_s)

    def heard_s(self, peer_id: str) -> float:
        """Return when the server was last heard."""
        return self._said[peer_id].heard_s

    def has_answered(self, peer_id: str) -> bool:
        """Return whether outputs have come through the server since it last failed."""
        return self._said[peer_id].has_answered

    def grew_s(self, peer_id: str) -> float:
        """Return when the server was last seen to have computed something for any client."""
        return self._said[peer_id].grew_s

    def refreshed(self, server: ServerRecord, now_s: float) -> ServerRecord:
        """Return the record, with the queue that the server itself has reported since, if that report is fresh."""
        said = self._said.get(server.peer_id)
        if said is None or now_s - said.queue_time_s > _FRESH_S:
            return server
        return replace(server, queue_delay_s=said.queue_s)
