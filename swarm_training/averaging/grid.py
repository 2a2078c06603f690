"""The grid of a large group, on which each member exchanges data with its row and its column alone.

The scheme is Moshpit All-Reduce (Ryabinin et al., 2021) with both of its rounds in one: rows are averaged first, then
the means of the rows in each column. The module decides from data alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isqrt

LEAST_OWNERS = 17  # smaller groups exchange parts directly


def needs_grid(shares: Iterable[float]) -> bool:
    """Return whether a group is large enough for a grid. Only members with a share add up for others."""
    return sum(share > 0 for share in shares) >= LEAST_OWNERS


@dataclass(frozen=True)
class Grid:
    """A group's rows and columns."""

    rows: tuple[tuple[int, ...], ...]  # the members of each row, in the order of the group
    row_of: tuple[int, ...]  # the row of each member
    _adders: tuple[tuple[int, ...], ...]  # by row, members with a share, in the order of their columns
    _column_of: tuple[int, ...]  # by member; -1: it has none

    @classmethod
    def of(cls, shares: Sequence[float]) -> Grid:
        """Return a grid of ceil(sqrt(N)) rows, or fewer if fewer members have a share.

        Members with a share fill the columns by descending share. A member adds up for its row what the members of its
        column own, so the shares within a column should be similar. Members without a share go to the smallest rows.
        Ties, and places in a column, follow the order of the group, which changes with each step.

        shares: the shares of the N members, none below 0 and some above 0.
        """
        able = sorted((member for member, share in enumerate(shares) if share > 0), key=lambda each: -shares[each])
        num_rows = min(1 + isqrt(len(shares) - 1), len(able))
        row_of, column_of = [-1] * len(shares), [-1] * len(shares)
        adders: list[list[int]] = [[] for _ in range(num_rows)]
        for column, start in enumerate(range(0, len(able), num_rows)):
            for row, member in enumerate(sorted(able[start : start + num_rows])):
                row_of[member], column_of[member] = row, column
                adders[row].append(member)
        rows = [list(members) for members in adders]
        for member, row in enumerate(row_of):
            if row < 0:
                row_of[member] = min(range(num_rows), key=lambda each: len(rows[each]))
                rows[row_of[member]].append(member)
        return cls(_frozen(map(sorted, rows)), tuple(row_of), _frozen(adders), tuple(column_of))

    def row_owner(self, row: int, owner: int) -> int:
        """Return the member that adds up the owner's chunks for a row: the owner itself in its own row, elsewhere the
        member in the owner's column. If a row has no such member, the column is the last one, and its owners are dealt
        to the members of the row."""
        adders, column = self._adders[row], self._column_of[owner]
        return adders[column] if column < len(adders) else adders[(self.row_of[owner] + row) % len(adders)]


def _frozen(lists: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(each) for each in lists)
