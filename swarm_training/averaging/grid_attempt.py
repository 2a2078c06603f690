"""What one member of a grid adds up: parts of its row, then the means of all rows; and what it hands on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from swarm_training.averaging.attempt import Encode, Outcomes, nothing
from swarm_training.averaging.chunks import Chunk
from swarm_training.averaging.grid import Grid
from swarm_training.averaging.sums import ChunkSum

_ROW_DEADLINE = 0.5  # deadlines; the mean of a row that has a straggler must still arrive at the owner in time


class GridAttempt:
    """The first attempt of a group on a grid.

    A member gives its parts to those who add up for its row. These give the means of the row to the owners of the
    chunks, who add the rows up, and hand what the owners have encoded back to their row.

    A straggler is left out of its row. A chunk is lost if an owner does not hear of a whole row in time: rather than
    leave all its members out, it has no mean then, and is added up again without a grid.

    Attributes:
        own: numbers of the chunks that this member adds up for its row, in the order in which they travel.
        targets: the members of its row and of its column to which it gives parts, or row means, of which chunks.
        deadlines: what is done about stragglers, and after how many deadlines of the group.
        late: members that the mean of a row was waited for in vain.
    """

    def __init__(
        self,
        grid: Grid,
        me: int,
        chunks: Sequence[Chunk],
        weights: Mapping[int, int],
        gone: Iterable[int],
        encode: Encode,
    ) -> None:
        """``weights``: of all members whose weight is not 0. ``gone``: those that are not waited for. ``encode``: for
        the owner of a chunk."""
        self._grid = grid
        self._me = me
        self._row = row = grid.row_of[me]
        self._encode = encode
        adder_of = [grid.row_owner(row, chunk.owner) for chunk in chunks]
        in_turns = _in_turns(chunks)
        self.own = tuple(number for number in in_turns if adder_of[number] == me)
        self.targets: dict[int, list[int]] = {}
        for number in in_turns:
            target = chunks[number].owner if adder_of[number] == me else adder_of[number]
            if target != me:
                self.targets.setdefault(target, []).append(number)
        self.deadlines = ((_ROW_DEADLINE, self._end_row), (1.0, self._end_rows))
        self.late: set[int] = set()
        in_row = {member: float(weights[member]) for member in grid.rows[row] if member in weights}
        of_rows = [sum(float(weights.get(member, 0)) for member in members) for members in grid.rows]
        self._weights = {number: weight for number, weight in enumerate(of_rows) if weight}
        self._sums = {number: ChunkSum(in_row) for number in self.own}
        self._ready = {number: asyncio.Event() for number in self.own}
        self._finals = {number: ChunkSum(self._weights) for number in self.own if chunks[number].owner == me}
        self._outcomes = Outcomes(self.own)
        for number in self.own:
            self._advance(number)
        for member in gone:
            self.leave_out(member)
            self.close(member)

    def is_across(self, member: int) -> bool:
        """Whether row means go to and fro between it and this member, and not parts."""
        return self._grid.row_of[member] != self._row

    def serves(self, member: int) -> Sequence[int]:
        """The chunks that the member gives parts, or row means, of and gets the means of."""
        if not self.is_across(member):
            return self.own
        return tuple(self._finals) if self._adds_for_me(member) else ()

    def put(self, number: int, member: int, part: Tensor) -> None:
        """The part of a member of the same row."""
        self._sums[number].put(member, part)
        self._advance(number)

    def put_row(self, number: int, member: int, mean: Tensor | None, weight: float) -> None:
        """The mean of another row, from who has added it up; None if nothing has arrived there.

        Raises:
            ValueError: the row has not such a weight.
        """
        row = self._grid.row_of[member]
        if mean is None:
            self._finals[number].leave_out(row)
        elif 0 < weight <= self._weights.get(row, 0.0):
            self._finals[number].put(row, mean, weight)
        else:
            raise ValueError("the mean of a row has a weight that is not possible")
        self._settle(number)

    async def row_mean(self, number: int) -> tuple[Tensor | None, float]:
        """That of this member's row, once it is known, and its weight; None and 0 if nothing has arrived."""
        await self._ready[number].wait()
        return self._sums[number].mean, self._sums[number].weight

    async def mean_of(self, number: int) -> bytes | None:
        """The encoded mean, once it is known; None if it is lost."""
        return await self._outcomes.of(number)

    def take(self, number: int, mean: bytes) -> None:
        """The owner has answered."""
        self._outcomes.settle(number, lambda: mean)

    def leave_out(self, member: int) -> None:
        """Nothing comes from it any more."""
        if not self.is_across(member):
            for number, row_sum in self._sums.items():
                row_sum.leave_out(member)
                self._advance(number)
        elif self._adds_for_me(member):
            self._lose(self._grid.row_of[member])

    def close(self, owner: int) -> None:
        """It answers no more."""
        if self.is_across(owner):
            for number in self.targets.get(owner, ()):
                self._outcomes.settle(number, nothing)

    def end(self) -> None:
        """What has not come is not waited for."""
        self._end_row()
        self._end_rows()
        for number in self.own:
            self._outcomes.settle(number, nothing)

    def _end_row(self) -> None:
        """Stragglers of the own row are left out."""
        for member in frozenset().union(*(row_sum.missing for row_sum in self._sums.values())):
            self.leave_out(member)

    def _end_rows(self) -> None:
        """Chunks are lost that some row has not come of."""
        for row in frozenset().union(*(final.missing for final in self._finals.values())):
            self.late.add(self._grid.row_owner(row, self._me))
            self._lose(row)

    def _adds_for_me(self, member: int) -> bool:
        return bool(self._finals) and self._grid.row_owner(self._grid.row_of[member], self._me) == member

    def _lose(self, row: int) -> None:
        for number, final in self._finals.items():
            if row in final.missing:
                self._outcomes.settle(number, nothing)

    def _advance(self, number: int) -> None:
        """If the row is complete, so may be the chunk."""
        row_sum = self._sums[number]
        if not row_sum.is_done or self._ready[number].is_set():
            return
        self._ready[number].set()
        if number in self._finals:
            if row_sum.mean is None:
                self._finals[number].leave_out(self._row)
            else:
                self._finals[number].put(self._row, row_sum.mean, row_sum.weight)
            self._settle(number)

    def _settle(self, number: int) -> None:
        final = self._finals[number]
        if final.is_done:
            self._outcomes.settle(number, lambda: None if final.mean is None else self._encode(number, final.mean))


def _in_turns(chunks: Sequence[Chunk]) -> list[int]:
    """The first chunks of all owners, then the second ones, and so on: a row's owners are busy at the same time."""
    seen: dict[int, int] = {}
    places = []
    for number, chunk in enumerate(chunks):
        place = seen[chunk.owner] = seen.get(chunk.owner, -1) + 1
        places.append((place, number))
    return [number for _, number in sorted(places)]
