"""What an owner adds up in one attempt: its chunks, and who is still waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from swarm_training.averaging.sums import ChunkSum


class Attempt:
    """Attributes:
    own: numbers of the chunks that this member adds up.
    """

    def __init__(
        self, own: Sequence[int], weights: Mapping[int, float], encode: Callable[[int, Tensor], bytes]
    ) -> None:
        """``encode``: a chunk's number and mean to the bytes that everybody gets; called once for each."""
        self.own = tuple(own)
        self._encode = encode
        self._sums = {number: ChunkSum(weights) for number in own}
        self._means: dict[int, bytes | None] = {}
        self._ready = {number: asyncio.Event() for number in own}
        for number in own:
            self._settle(number)

    def put(self, number: int, member: int, part: Tensor) -> None:
        self._sums[number].put(member, part)
        self._settle(number)

    def leave_out(self, member: int) -> None:
        for number, chunk_sum in self._sums.items():
            chunk_sum.leave_out(member)
            self._settle(number)

    def leave_out_all(self) -> None:
        """Whoever is late."""
        for member in frozenset().union(*(chunk_sum.missing for chunk_sum in self._sums.values())):
            self.leave_out(member)

    async def mean_of(self, number: int) -> bytes | None:
        """The encoded mean, once it is known; None if nothing has arrived."""
        await self._ready[number].wait()
        return self._means[number]

    def _settle(self, number: int) -> None:
        chunk_sum = self._sums[number]
        if chunk_sum.is_done and number not in self._means:
            self._means[number] = None if chunk_sum.mean is None else self._encode(number, chunk_sum.mean)
            self._ready[number].set()
