"""A large group on a grid, where each member exchanges with its row and its column alone.

After Moshpit All-Reduce (Ryabinin et al., 2021), whose second round is taken at once: rows are averaged first, then,
in each column, the means of the rows. Decides from data alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isqrt

LEAST_OWNERS = 17  # smaller groups exchange directly


def needs_grid(shares: Iterable[float]) -> bool:
    """Whether a group of these shares is large enough: only who has a share can add up for others."""
    return sum(share > 0 for share in shares) >= LEAST_OWNERS


@dataclass(frozen=True)
class Grid:
    """Attributes:
    rows: the members of each, in the order of the group.
    row_of: by member.
    """

    rows: tuple[tuple[int, ...], ...]
    row_of: tuple[int, ...]
    _adders: tuple[tuple[int, ...], ...]  # by row, those with a share, in the order of their columns
    _column_of: tuple[int, ...]  # by member; -1: none

    @classmethod
    def of(cls, shares: Sequence[float]) -> Grid:
        """ceil(sqrt(N)) rows. Those with a share are dealt into columns of as many, by share: in its row a member adds
        up what its whole column owns, which is in proportion to its own share if those of the column are similar. Those
        without one go to the smallest rows. Ties follow the order of the group, which is another one in each step, and
        so do the places in a column.

        shares: of the N members, at least 0, and some above it.
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
        """Who adds up, for the members of the row, what belongs to the owner in the end: its own row has the owner
        itself, others who stands in its column. Where a row has nobody there, the column is the last one, and the
        owners of that column are dealt to the members of the row."""
        adders, column = self._adders[row], self._column_of[owner]
        return adders[column] if column < len(adders) else adders[(self.row_of[owner] + row) % len(adders)]


def _frozen(lists: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(each) for each in lists)
