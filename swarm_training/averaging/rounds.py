"""The present and recent averaging rounds of a peer, which other peers request by the group's id."""

from __future__ import annotations

import asyncio
from hashlib import sha256

from swarm_protocol.errors import RequestRejected
from swarm_training.averaging.round import AveragingRound

_KEPT = 3  # groups


class Rounds:
    """The averaging rounds of one peer, by group and phase."""

    def __init__(self) -> None:
        self._groups: dict[str, list[AveragingRound]] = {}  # by group id, one round for each phase
        self._ended: frozenset[str] = frozenset()  # groups of the last step, of which only results are kept
        self._changed = asyncio.Condition()

    async def add(self, new: AveragingRound, accepted: str = "") -> None:
        """Add a round. ``accepted``: the group whose result this peer holds. It stays, though later groups may fail."""
        async with self._changed:
            for group in self._ended:
                self._groups.pop(group, None)
            self._ended = frozenset()
            self._groups.setdefault(new.group.id, []).append(new)
            others = [group for group in self._groups if group not in (accepted, new.group.id)]
            for oldest in others[: max(0, len(self._groups) - _KEPT)]:
                del self._groups[oldest]
            self._changed.notify_all()

    async def find(self, group: str, phase: int, timeout_s: float) -> AveragingRound:
        """Wait for a round and return it: other peers may learn of a group, or reach a phase, before this peer does.
        Raise RequestRejected if this peer takes no part in the group within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self._changed:
                    await self._changed.wait_for(lambda: phase < len(self._groups.get(group, ())))
        except TimeoutError:
            raise RequestRejected("this peer takes no part in the group") from None
        return self._groups[group][phase]

    def of(self, group: str) -> list[AveragingRound]:
        """Return one round for each phase that this peer has reached."""
        return list(self._groups.get(group, ()))

    def end_step(self) -> None:
        """Keep only results, which other peers may lack, until a new group is added."""
        self.forget_vectors()
        self._ended = frozenset(self._groups)

    def forget_vectors(self) -> None:
        """Free this peer's vectors once a result is decided; results stay for late members."""
        for rounds in self._groups.values():
            for each in rounds:
                each.forget_vector()

    async def digest_of(self, group: str) -> bytes:
        """Return the SHA-256 over the results of all phases, which must be complete."""
        digest = sha256()
        for finished in self._groups[group]:
            for number in range(len(finished.chunks)):
                await asyncio.sleep(0)  # heartbeats have their turn
                digest.update(finished.results[number])
        return digest.digest()
