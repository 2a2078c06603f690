"""The position of an expert: a cell of the grid, whose coordinates are the parts of its name, as in ``experts.3.7``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

Cell = tuple[int, ...]
Prefix = tuple[int, ...]  # the first coordinates of cells
MAX_DIMS = 4
MAX_SIZE = 1024  # of one dimension
_CELL = re.compile(r"\d{1,4}(\.\d{1,4})*", re.ASCII)
_SHOWN_CHARS = 60
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_name(name: str) -> str:
    """Return the name of a mixture. Raise ValueError if it is not valid."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a mixture: expected 1 to 64 letters, digits, hyphens or underscores")
    return name


def check_grid(grid: Sequence[int]) -> tuple[int, ...]:
    """Return the grid. Raise ValueError if it is not valid."""
    if not 1 <= len(grid) <= MAX_DIMS or not all(1 <= size <= MAX_SIZE for size in grid):
        raise ValueError(f"the grid is {tuple(grid)}: expected 1 to {MAX_DIMS} sizes, each from 1 to {MAX_SIZE}")
    return tuple(grid)


def num_cells(grid: Sequence[int]) -> int:
    return math.prod(grid)


def is_in(cell: Sequence[int], grid: Sequence[int]) -> bool:
    return len(cell) == len(grid) and all(0 <= at < size for at, size in zip(cell, grid, strict=True))


def expert_name(name: str, cell: Sequence[int]) -> str:
    return ".".join([name, *map(str, cell)])


def parse_expert_name(text: str, name: str, grid: Sequence[int]) -> Cell:
    """Return the cell of ``NAME.3.7``, or of ``3.7``. Raise ValueError if it is not an expert of that mixture."""
    coordinates = text.removeprefix(f"{name}.")
    if not _CELL.fullmatch(coordinates) or not is_in(cell := tuple(map(int, coordinates.split("."))), grid):
        raise ValueError(
            f"{text[:_SHOWN_CHARS]!r} is no expert of {name}: expected {len(grid)} numbers of the grid {tuple(grid)}"
        )
    return cell


def numbered(number: int, grid: Sequence[int]) -> Cell:
    """Return the cell with this number, row by row."""
    coordinates = []
    for size in reversed(grid):
        number, at = divmod(number, size)
        coordinates.append(at)
    return tuple(reversed(coordinates))
