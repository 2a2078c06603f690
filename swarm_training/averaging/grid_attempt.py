"""One member's work on a grid: it adds up the parts of its row, then the means of all rows, and sends them on."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor

from swarm_training.averaging.attempt import Encode, Outcomes
from swarm_training.averaging.chunks import Chunk
from swarm_training.averaging.grid import Grid
from swarm_training.averaging.sums import ChunkSum

_ROW_DEADLINE = 0.5  # deadlines: the mean of a row with a straggler must still reach the owner in time


class GridAttempt:
    """One member's part in the first attempt of a group on a grid.

    A member sends its parts to the row owners, the members that add up for its row. The row owners send the means of
    the row to the owners of the chunks, which add up the rows and answer with the encoded means. The row owners then
    pass these to their row.

    A straggler is left out of its row. A chunk is lost if the mean of a whole row does not reach its owner in time. A
    lost chunk has no mean, and is added up again without a grid, so that the row's members are not all left out.

    Attributes:
        own: numbers of the chunks that this member adds up for its row, in the order in which they travel.
        targets: by member of its row or column, the chunks whose parts or row means this member sends there.
        deadlines: pairs of a number of group deadlines, and the action on stragglers that follows after them.
        late: members that did not send the mean of their row in time.
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
        """Prepare the sums. ``weights``: by member, weights that are not 0. ``gone``: members not to wait for.
        ``encode``: encodes the mean of a chunk that this member owns."""
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
        self._weights = _row_weights(grid, weights)
        self._sums = {number: ChunkSum(in_row) for number in self.own}
        self._ready = {number: asyncio.Event() for number in self.own}
        self._finals = {number: ChunkSum(self._weights) for number in self.own if chunks[number].owner == me}
        self._outcomes = Outcomes(self.own)
        self._counted: dict[int, set[int]] = {number: set() for number in self.own}
        for number in self.own:
            self._advance(number)
        for member in gone:
            self.leave_out(member)
            self.close(member)

    def is_across(self, member: int) -> bool:
        """Return whether the member is in another row, so that it exchanges row means with this one, not parts."""
        return self._grid.row_of[member] != self._row

    def serves(self, member: int) -> Sequence[int]:
        """Return the chunks whose parts or row means the member sends, and whose means it receives."""
        if not self.is_across(member):
            return self.own
        return tuple(self._finals) if self._adds_for_me(member) else ()

    def put(self, number: int, member: int, part: Tensor) -> None:
        """Take the part of a member of the same row."""
        self._sums[number].put(member, part)
        self._advance(number)

    def put_row(
        self, number: int, member: int, mean: Tensor | None, weight: float, counted: Collection[int] | None = None
    ) -> None:
        """Take the mean of another row from its row owner. Raise ValueError if the weight is impossible for that row.

        ``mean``: None if no part has arrived at the row owner. ``counted``: the members whose parts are in the mean;
        None: this is not known, so all members of the row count as such."""
        row = self._grid.row_of[member]
        if mean is None:
            self._finals[number].leave_out(row)
        elif 0 < weight <= self._weights.get(row, 0.0):
            if row in self._finals[number].missing:
                members = self._grid.rows[row]
                self._counted[number].update(members if counted is None else set(members) & set(counted))
            self._finals[number].put(row, mean, weight)
        else:
            raise ValueError("the mean of a row has a weight that is not possible")
        self._settle(number)

    async def row_mean(self, number: int) -> tuple[Tensor | None, float]:
        """Wait for the mean of this member's row. Return the mean and its weight; None and 0 if no part arrived."""
        await self._ready[number].wait()
        return self._sums[number].mean, self._sums[number].weight

    def counted_in_row(self, number: int) -> Collection[int]:
        """Return the members of this member's row whose parts are in its mean, which ``row_mean`` has returned."""
        return self._sums[number].counted

    async def mean_of(self, number: int) -> bytes | None:
        """Wait for the encoded mean of a chunk, and return it; None if the chunk is lost."""
        return await self._outcomes.of(number)

    def counted(self, number: int) -> Collection[int]:
        """Return the members of all rows whose parts are in the mean of a chunk, which ``mean_of`` has returned."""
        return self._counted[number]

    def take(self, number: int, mean: bytes, counted: Collection[int]) -> None:
        """Take the encoded mean that the chunk's owner has sent. ``counted``: the members whose parts are in it."""
        if number not in self._outcomes:
            self._counted[number].update(counted)
            self._outcomes.settle(number, lambda: mean)

    def leave_out(self, member: int) -> None:
        """Stop waiting for the parts or row means of this member."""
        if not self.is_across(member):
            for number, row_sum in self._sums.items():
                row_sum.leave_out(member)
                self._advance(number)
        elif self._adds_for_me(member):
            self._lose(self._grid.row_of[member])

    def close(self, owner: int) -> None:
        """Stop waiting for the means of this owner."""
        if self.is_across(owner):
            for number in self.targets.get(owner, ()):
                self._outcomes.settle(number, lambda: None)

    def end(self) -> None:
        """Stop waiting for everything that has not arrived."""
        self._end_row()
        self._end_rows()
        for number in self.own:
            self._outcomes.settle(number, lambda: None)

    def _end_row(self) -> None:
        """Leave out the stragglers of this member's row."""
        for member in frozenset().union(*(row_sum.missing for row_sum in self._sums.values())):
            self.leave_out(member)

    def _end_rows(self) -> None:
        """Give up this member's chunks for which the mean of a row is missing."""
        for row in frozenset().union(*(final.missing for final in self._finals.values())):
            self.late.add(self._grid.row_owner(row, self._me))
            self._lose(row)

    def _adds_for_me(self, member: int) -> bool:
        return bool(self._finals) and self._grid.row_owner(self._grid.row_of[member], self._me) == member

    def _lose(self, row: int) -> None:
        for number, final in self._finals.items():
            if row in final.missing:
                self._outcomes.settle(number, lambda: None)

    def _advance(self, number: int) -> None:
        """Use the row's mean of a chunk once the row is complete. This may complete the chunk."""
        row_sum = self._sums[number]
        if not row_sum.is_done or self._ready[number].is_set():
            return
        self._ready[number].set()
        if number in self._finals:
            if row_sum.mean is None:
                self._finals[number].leave_out(self._row)
            else:
                self._finals[number].put(self._row, row_sum.mean, row_sum.weight)
                self._counted[number].update(row_sum.counted)
            self._settle(number)

    def _settle(self, number: int) -> None:
        final = self._finals[number]
        if final.is_done:
            self._outcomes.settle(number, lambda: None if final.mean is None else self._encode(number, final.mean))


def _row_weights(grid: Grid, weights: Mapping[int, int]) -> dict[int, float]:
    """Return the sum of the members' weights by row, for rows where the sum is not 0."""
    of_rows = [sum(float(weights.get(member, 0)) for member in members) for members in grid.rows]
    return {number: weight for number, weight in enumerate(of_rows) if weight}


def _in_turns(chunks: Sequence[Chunk]) -> list[int]:
    """Return the first chunks of all owners, then the second ones, and so on, so that the owners work in parallel."""
    seen: dict[int, int] = {}
    places = []
    for number, chunk in enumerate(chunks):
        place = seen[chunk.owner] = seen.get(chunk.owner, -1) + 1
        places.append((place, number))
    return [number for _, number in sorted(places)]
