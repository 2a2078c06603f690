"""The blocklist of servers that answer wrongly, each for as long as its evidence counts."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.verification.evidence import LASTS_S, Evidence

_MAX_KNOWN = 256


class Blocklist:
    """The servers that answer wrongly, with the last evidence against each; at most ``_MAX_KNOWN``, the newest."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Create an empty record; ``clock`` returns Unix time in seconds."""
        self._clock = clock
        self._shown: OrderedDict[str, tuple[float, pb.Evidence]] = OrderedDict()  # with its expiry time

    def __contains__(self, peer_id: object) -> bool:
        known = self._shown.get(str(peer_id))
        return known is not None and known[0] > self._clock()

    def add(self, evidence: Evidence) -> None:
        statement = evidence.statement
        self._shown[statement.peer_id] = statement.made_at + LASTS_S, evidence.message
        self._shown.move_to_end(statement.peer_id)
        if len(self._shown) > _MAX_KNOWN:
            self._shown.popitem(last=False)

    def evidence(self) -> list[pb.Evidence]:
        """Return the evidence against each server, the most recent last."""
        for peer_id in [peer_id for peer_id in self._shown if peer_id not in self]:
            del self._shown[peer_id]
        return [message for _, message in self._shown.values()]
