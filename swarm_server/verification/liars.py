"""Servers that are known to answer wrongly, for as long as the evidence counts."""

from __future__ import annotations

import time
from collections.abc import Callable

from swarm_protocol.verification.evidence import LASTS_S, Evidence


class Liars:
    """By peer id."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """``clock`` gives Unix time in seconds."""
        self._clock = clock
        self._shown: dict[str, Evidence] = {}

    def __contains__(self, peer_id: object) -> bool:
        evidence = self._shown.get(str(peer_id))
        return evidence is not None and evidence.statement.made_at + LASTS_S > self._clock()

    def add(self, evidence: Evidence) -> None:
        self._shown[evidence.statement.peer_id] = evidence

    def evidence(self) -> list[Evidence]:
        """One for each of them, the oldest first."""
        self._shown = {peer_id: evidence for peer_id, evidence in self._shown.items() if peer_id in self}
        return sorted(self._shown.values(), key=lambda evidence: evidence.statement.made_at)
