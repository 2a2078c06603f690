"""The sums of an owner in one attempt: its chunks, and the members that it still waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import Tensor

from swarm_training.averaging.sums import ChunkClip, ChunkSum, ExactSum
from swarm_training.core.callbacks import InThread

Encode = Callable[[int, Tensor], bytes]  # a chunk's number and mean to the bytes for all members


class Outcomes:
    """The encoded means of some chunks, for the tasks that wait for them.

    A mean is encoded when the first task asks for it, one chunk after another. When a straggler is left out, all sums
    may be complete at once, and streams must stay alive while their means are encoded.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._ready = {number: asyncio.Event() for number in numbers}
        self._making: dict[int, Callable[[], bytes | None]] = {}
        self._means: dict[int, bytes | None] = {}

    def __contains__(self, number: int) -> bool:
        return self._ready[number].is_set()

    def settle(self, number: int, mean: Callable[[], bytes | None]) -> None:
        """Settle a chunk, unless it is settled. ``mean`` returns the encoded mean or None; it is called once, later."""
        if number not in self:
            self._making[number] = mean
            self._ready[number].set()

    async def of(self, number: int) -> bytes | None:
        await self._ready[number].wait()
        if number not in self._means:
            await asyncio.sleep(0)
        if number not in self._means:  # another task may have taken it in the meantime
            self._means[number] = self._making.pop(number)()
        return self._means[number]


class DirectAttempt:
    """One member's part in an attempt in which all send their parts directly to the owners; compare ``GridAttempt``.

    Attributes:
        own: numbers of the chunks that this member adds up.
        targets: by owner, the chunks whose parts this member sends there.
        deadlines: pairs of a number of group deadlines, and the action on stragglers that follows after them.
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
        """Prepare the sums. ``owners``: the owner of each chunk; ``weights``: of the members to wait for. ``encode`` is
        called once per chunk. ``clipping``: calls a slow function; if given, CenteredClip replaces the mean.
        ``num_micro_batches``: the micro-batches in the whole batch, if it is counted exactly: see ``ExactSum``."""
        self.own = tuple(number for number, owner in owners.items() if owner == me)
        self.targets: dict[int, list[int]] = {}
        for number, owner in owners.items():
            if owner != me:
                self.targets.setdefault(owner, []).append(number)
        self.deadlines = ((1.0, self.end),)
        self._encode = encode
        self._clipping = clipping
        self._one_at_a_time = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []  # the event loop itself holds tasks only weakly
        self._sums = {number: self._sum_of(weights, num_micro_batches) for number in self.own}  # not settled yet
        self._outcomes = Outcomes(self.own)
        self._counted: dict[int, Collection[int]] = {}
        for number in self.own:
            self._settle(number)

    def serves(self, member: int) -> Sequence[int]:
        """Return the chunks whose parts the member sends, and whose means it receives."""
        return self.own

    def put(self, number: int, member: int, part: Tensor) -> None:
        if number in self._sums:
            self._sums[number].put(member, part)
            self._settle(number)

    def leave_out(self, member: int) -> None:
        """Stop waiting for the parts of this member."""
        for number, chunk_sum in list(self._sums.items()):
            chunk_sum.leave_out(member)
            self._settle(number)

    def end(self) -> None:
        """Leave out all members whose parts are still missing."""
        for member in frozenset().union(*(chunk_sum.missing for chunk_sum in self._sums.values())):
            self.leave_out(member)

    async def mean_of(self, number: int) -> bytes | None:
        """Wait for the encoded mean of a chunk, and return it; None if no part has arrived."""
        return await self._outcomes.of(number)

    def counted(self, number: int) -> Collection[int]:
        """Return the members whose parts are in the mean of a chunk, which ``mean_of`` has returned."""
        return self._counted[number]

    def _sum_of(self, weights: Mapping[int, float], num_micro_batches: int) -> ChunkSum | ExactSum | ChunkClip:
        if num_micro_batches:
            return ExactSum(weights, num_micro_batches)
        return ChunkSum(weights) if self._clipping is None else ChunkClip(weights)

    def _settle(self, number: int) -> None:
        """Replace a finished sum by its encoded mean."""
        chunk_sum = self._sums[number]
        if not chunk_sum.is_done:
            return
        del self._sums[number]
        self._counted[number] = chunk_sum.counted
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
