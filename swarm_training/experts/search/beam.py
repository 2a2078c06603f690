"""The search for the living experts with the best scores: beam search over prefixes (Learning@home, section 3.2).

The score of a cell is the sum of its coordinates' scores, one gate for each dimension (product keys: Lample et al.,
2019). The search therefore goes through the dimensions, and keeps the prefixes with the best sums. It yields prefixes,
and the caller, which reads the DHT, answers with the coordinates that follow them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Prefix = tuple[int, ...]
Following = Mapping[Prefix, Iterable[int]]
_NO_CELL = -1


@dataclass(frozen=True)
class BeamResult:
    """The best cells of each row, best first."""

    cells: Ints  # [rows, k, dimensions]; -1 where there are fewer than k
    # For each dimension, [size], whether a coordinate may have living experts; true for first coordinates that were not
    # looked up.
    living: list[Mask]


def beam_search(scores: Sequence[Floats], k: int, beam: int) -> Generator[frozenset[Prefix], Following, BeamResult]:
    """Yield prefixes, receive the coordinates that follow each, and return the best cells.

    The result is exact if ``beam`` is at least the number of prefixes of each length; or at least k, and no cell is
    empty. Prefixes of one coordinate without experts do not count in the beam.

    Args:
        scores: for each dimension, [rows, size]; finite.
    """
    sizes = [own.shape[1] for own in scores]
    living = [np.ones(sizes[0], bool), *(np.zeros(size, bool) for size in sizes[1:])]
    following: dict[Prefix, Mask] = {}
    # prefixes: [rows, beam], each encoded as the number of its cell, row by row of the grid; sums: their scores
    prefixes, sums = np.zeros((len(scores[0]), 1), np.int64), np.zeros((len(scores[0]), 1))
    start = 0
    if len(scores) > 1:  # the DHT has no record of the empty prefix: try the best first coordinates
        start = 1
        prefixes, sums = yield from _search_first(scores[0], beam, sizes, living[0], following)
    for level in range(start, len(scores)):
        used, numbers = np.unique(prefixes, return_inverse=True)
        keys = [_coordinates(int(number), sizes[:level]) for number in used]
        if wanted := _wanted(prefixes, sums, sizes[:level], following):
            _note(following, (yield frozenset(wanted)), wanted, sizes[level])
        nothing = np.zeros(sizes[level], bool)
        masks = np.array([following.get(key, nothing) for key in keys], bool).reshape(len(keys), sizes[level])
        living[level] = np.asarray(masks.any(0), bool)
        of_each = masks[numbers.reshape(prefixes.shape)]  # [rows, beam, size]; NumPy 1 returns flat numbers
        extended = np.where(of_each, sums[:, :, None] + scores[level][:, None, :], -np.inf)
        best, sums = _top(
            extended.reshape(len(prefixes), prefixes.shape[1] * sizes[level]), k if level == len(scores) - 1 else beam
        )
        before = np.take_along_axis(prefixes, best // sizes[level], axis=1)
        prefixes = before * sizes[level] + best % sizes[level]
    cells = np.full((len(prefixes), k, len(sizes)), _NO_CELL, np.int64)
    found = np.stack(np.unravel_index(prefixes, sizes), axis=2)
    cells[:, : found.shape[1]] = np.where(sums[:, :, None] > -np.inf, found, _NO_CELL)
    return BeamResult(cells, living)


def _search_first(
    scores: Floats, beam: int, sizes: Sequence[int], living: Mask, following: dict[Prefix, Mask]
) -> Generator[frozenset[Prefix], Following, tuple[Ints, Floats]]:
    """Yield the best first coordinates until the best of those with experts are known, and return these. Note in
    ``living`` and ``following`` what becomes known."""
    while True:
        prefixes, sums = _top(np.where(living, scores, -np.inf), beam)
        wanted = _wanted(prefixes, sums, sizes[:1], following)
        if not wanted:
            return prefixes, sums
        _note(following, (yield frozenset(wanted)), wanted, sizes[1])
        for prefix in wanted:
            living[prefix[0]] = following[prefix].any()


def _wanted(prefixes: Ints, sums: Floats, sizes: Sequence[int], following: Mapping[Prefix, Mask]) -> set[Prefix]:
    """Return the possible prefixes of which it is not known yet what follows them."""
    return {_coordinates(int(at), sizes) for at in np.unique(prefixes[sums > -np.inf])} - following.keys()


def _coordinates(number: int, sizes: Sequence[int]) -> Prefix:
    return tuple(int(at) for at in np.unravel_index(number, sizes)) if sizes else ()


def _top(values: Floats, count: int) -> tuple[Ints, Floats]:
    """Return the indices and values of the greatest elements of each row, greatest first: [rows, up to count]."""
    count = min(count, values.shape[1])
    some = np.argpartition(-values, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(values, some, axis=1), axis=1, kind="stable")
    best = np.take_along_axis(some, order, axis=1)
    return best, np.take_along_axis(values, best, axis=1)


def _note(following: dict[Prefix, Mask], answer: Following, wanted: Iterable[Prefix], size: int) -> None:
    for prefix in wanted:
        mask = np.zeros(size, bool)
        mask[[at for at in answer.get(prefix, ()) if 0 <= at < size]] = True
        following[prefix] = mask
