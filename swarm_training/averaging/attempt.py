"""What an owner adds up in one attempt: its chunks, and who is still waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from swarm_training.averaging.sums import ChunkClip, ChunkSum, ExactSum

Encode = Callable[[int, Tensor], bytes]  # a chunk's number and mean to the bytes that everybody gets
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class Outcomes:
    """The encoded means of some chunks, for those who wait for them.

    A mean is made for the first who takes it, one chunk after another: when a straggler is left out, all may be known
    at once, and streams must stay alive while they are made.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._ready = {number: asyncio.Event() for number in numbers}
        self._making: dict[int, Callable[[], bytes | None]] = {}
        self._means: dict[int, bytes | None] = {}

    def __contains__(self, number: int) -> bool:
        return self._ready[number].is_set()

    def settle(self, number: int, mean: Callable[[], bytes | None]) -> None:
        """``mean``: makes it, or None if there will be none; called once. Ignored if the chunk is settled already."""
        if number not in self:
            self._making[number] = mean
            self._ready[number].set()

    async def of(self, number: int) -> bytes | None:
        await self._ready[number].wait()
        if number not in self._means:
            await asyncio.sleep(0)
        if number not in self._means:
            self._means[number] = self._making.pop(number)()
        return self._means[number]


def nothing() -> None:
    """In place of a mean."""


class Attempt:
    """Members give their parts to the owners themselves; see ``GridAttempt`` for the other way.

    Attributes:
        own: numbers of the chunks that this member adds up.
        targets: by owner, the chunks that it gets this member's parts of.
        deadlines: what is done about stragglers, and after how many deadlines of the group.
    """

    def __init__(
        self,
        owners: Mapping[int, int],
        me: int,
        weights: Mapping[int, float],
        encode: Encode,
        clipping: InThread | None = None,
        num_micro_batches: int = 0,
    ) -> None:
        """``owners``: by chunk; ``weights``: of the members that are waited for. ``encode``: called once a chunk.
        ``clipping``: calls a function that takes long; CenteredClip takes the mean's place then.
        ``num_micro_batches``: of the whole batch, if it is counted exactly: see ``ExactSum``."""
        self.own = tuple(number for number, owner in owners.items() if owner == me)
        self.targets: dict[int, list[int]] = {}
        for number, owner in owners.items():
            if owner != me:
                self.targets.setdefault(owner, []).append(number)
        self.deadlines = ((1.0, self.end),)
        self._encode = encode
        self._clipping = clipping
        self._one_at_a_time = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._sums = {number: self._sum_of(weights, num_micro_batches) for number in self.own}  # that are not settled
        self._outcomes = Outcomes(self.own)
        for number in self.own:
            self._settle(number)

    def serves(self, member: int) -> Sequence[int]:
        """The chunks that the member gives parts of, and gets the means of."""
        return self.own

    def put(self, number: int, member: int, part: Tensor) -> None:
        if number in self._sums:
            self._sums[number].put(member, part)
            self._settle(number)

    def leave_out(self, member: int) -> None:
        """Nothing comes from it any more."""
        for number, chunk_sum in list(self._sums.items()):
            chunk_sum.leave_out(member)
            self._settle(number)

    def end(self) -> None:
        """Whoever is late is left out."""
        for member in frozenset().union(*(chunk_sum.missing for chunk_sum in self._sums.values())):
            self.leave_out(member)

    async def mean_of(self, number: int) -> bytes | None:
        """The encoded mean, once it is known; None if nothing has arrived."""
        return await self._outcomes.of(number)

    def _sum_of(self, weights: Mapping[int, float], num_micro_batches: int) -> ChunkSum | ExactSum | ChunkClip:
        if num_micro_batches:
            return ExactSum(weights, num_micro_batches)
        return ChunkSum(weights) if self._clipping is None else ChunkClip(weights)

    def _settle(self, number: int) -> None:
        """Of a sum that is done, the encoded mean alone is kept."""
        chunk_sum = self._sums[number]
        if not chunk_sum.is_done:
            return
        del self._sums[number]
        if isinstance(chunk_sum, ChunkClip):
            self._tasks.append(asyncio.ensure_future(self._clip(number, chunk_sum)))
        else:
            self._outcomes.settle(number, lambda: self._encoded(number, chunk_sum.mean))

    async def _clip(self, number: int, chunk: ChunkClip) -> None:
        assert self._clipping is not None
        async with self._one_at_a_time:
            mean = await self._clipping(chunk.clipped)
        self._outcomes.settle(number, lambda: self._encoded(number, mean))

    def _encoded(self, number: int, mean: Tensor | None) -> bytes | None:
        return None if mean is None else self._encode(number, mean)
