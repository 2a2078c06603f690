"""The rounds that this peer takes part in, or has lately: others ask for them by the group's id."""

from __future__ import annotations

import asyncio
from hashlib import sha256

from swarm_protocol.errors import RequestRejected
from swarm_training.averaging.round import Round

_KEPT = 3  # groups


class Rounds:
    def __init__(self) -> None:
        self._groups: dict[str, list[Round]] = {}  # by id, the rounds of its phases
        self._ended: frozenset[str] = frozenset()  # groups of the last step
        self._changed = asyncio.Condition()

    async def add(self, new: Round, accepted: str = "") -> None:
        """``accepted``: the group whose result this peer has, which is kept however many have failed since."""
        async with self._changed:
            for group in self._ended:
                self._groups.pop(group, None)
            self._ended = frozenset()
            self._groups.setdefault(new.group.id, []).append(new)
            others = [group for group in self._groups if group not in (accepted, new.group.id)]
            for oldest in others[: max(0, len(self._groups) - _KEPT)]:
                del self._groups[oldest]
            self._changed.notify_all()

    async def find(self, group: str, phase: int, timeout_s: float) -> Round:
        """Others may hear of a group, or come to a phase, before this peer does.

        Raises:
            RequestRejected: this peer takes no part in it.
        """
        try:
            async with asyncio.timeout(timeout_s):
                async with self._changed:
                    await self._changed.wait_for(lambda: phase < len(self._groups.get(group, ())))
        except TimeoutError:
            raise RequestRejected("this peer takes no part in the group") from None
        return self._groups[group][phase]

    def of(self, group: str) -> list[Round]:
        """One for each phase that this peer has come to."""
        return list(self._groups.get(group, ()))

    def end_step(self) -> None:
        """Keep the results alone, which others may lack, and those until there is a new group."""
        for rounds in self._groups.values():
            for each in rounds:
                each.forget_vector()
        self._ended = frozenset(self._groups)

    async def digest_of(self, group: str) -> bytes:
        """SHA-256 over the results of all phases, which must be complete. Streams stay alive meanwhile."""
        digest = sha256()
        for finished in self._groups[group]:
            for number in range(len(finished.chunks)):
                await asyncio.sleep(0)
                digest.update(finished.results[number])
        return digest.digest()
