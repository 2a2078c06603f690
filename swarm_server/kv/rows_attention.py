"""Places of a batch's rows for the attention kernel, and which calls the kernel can take over."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from swarm_models.kernels.attention import Numbers, PagedRows, PartOfPage
from swarm_server.kv.kv_rows import Page, Run


class SeenPart(NamedTuple):
    """The positions ``start`` to ``start + length`` of one row of a page, to which a new position attends.

    Attributes:
        run: the number of the run to which the part belongs; the run's channels are those of the page.
    """

    page: Page
    row: int
    start: int
    length: int
    run: int


def seen_parts(runs: Sequence[Run], hidden: Sequence[int] | None = None, num_new: int = 1) -> list[list[SeenPart]]:
    """Return where a batch's positions are, as each new position sees them: without the positions after it.

    Args:
        runs: the runs of all rows, in order; each run ends with its ``num_new`` new positions.
        hidden: how many positions at the start are left out, for each row and new position.

    Returns:
        ``num_new`` lists of parts for each row, in order; the last part of a list ends with its new position.
    """
    rows = []
    for number, run in enumerate(runs):
        for row in range(run.num_rows):
            for new in range(num_new):
                left = hidden[(run.first + row) * num_new + new] if hidden else 0  # still to be left out
                behind = num_new - 1 - new  # later new positions, all in the last part
                seen = []
                for i, part in enumerate(run.parts, 1 - len(run.parts)):
                    start, stop = part.start, part.end
                    if i == 0:
                        stop -= behind
                    first, left = start + left, max(0, left - (stop - start))
                    if first < stop:
                        seen.append(SeenPart(part.page, part.row + row, first, stop - first, number))
                rows.append(seen)
    return rows


def paged_rows(runs: Sequence[Run], hidden: Sequence[int] | None = None, num_new: int = 1) -> PagedRows:
    """Return the parts of ``seen_parts`` in the form that the CPU's kernel takes."""
    if num_new == 1 and hidden and all([len(run.parts) == 1 == run.num_rows for run in runs]):
        return PagedRows.of_one_part(_only_parts(runs, hidden))
    return PagedRows(
        [
            [PartOfPage(page.table.address, page.capacity, *place) for page, *place in parts]
            for parts in seen_parts(runs, hidden, num_new)
        ]
    )


def _only_parts(runs: Sequence[Run], hidden: Sequence[int]) -> list[int]:
    """Return the numbers of a ``PartOfPage`` for each of these runs of one row, whose positions are all in one part."""
    numbers: list[int] = []
    for number, run in enumerate(runs):
        (part,) = run.parts
        page, start = part.page, part.start + hidden[number]
        numbers += (page.table.address, page.capacity, part.row, start, part.end - start, number)
    return numbers


def hidden_before(runs: Sequence[Run], window: int | None, seen: Sequence[int], num_new: int) -> list[int]:
    """Return, for each row and new position, how many kept positions lie before the ones that it attends to.

    Args:
        window: how many of the last positions a new position looks at; None means all.
        seen: how many of its last positions each row attends to at most, new positions included.
    """
    if num_new == 1 and len(runs) == len(seen):  # decoding, with a row in each run
        looks = seen if window is None else [min(window, last) for last in seen]
        return [run.length - last if run.length > last else 0 for run, last in zip(runs, looks, strict=True)]
    most = sys.maxsize if window is None else window
    rows = [(run.length, row) for run in runs for row in range(run.first, run.first + run.num_rows)]
    return [
        max(0, length - behind - min(most, seen[row] - behind))
        for length, row in rows
        for behind in reversed(range(num_new))
    ]


def hidden_at_start(mask: torch.Tensor | None, num_rows: int) -> list[int] | None:
    """Return how many positions at the start a mask hides from each row; None if the mask does anything else.

    mask: of one new position, [rows or 1, heads or 1, 1, positions], bool or added to scores; None hides nothing.
    """
    if mask is None:
        return [0] * num_rows
    if mask.shape[1] != 1:
        return None
    mask = mask[:, 0, 0]
    attended = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and bool((mask[~attended] > torch.finfo(mask.dtype).min).any()):
        return None
    counts = attended.sum(-1)
    if not bool(counts.all()) or not bool((attended.int().argmax(-1) + counts == mask.shape[-1]).all()):
        return None
    hidden: list[int] = (mask.shape[-1] - counts).tolist()
    return hidden if len(hidden) == num_rows else hidden * num_rows


@functools.lru_cache(maxsize=4096)
def channel_numbers(channels: tuple[int, ...]) -> Numbers:
    """Return the channel of each run in the form that the CPU's kernel takes."""
    return Numbers(channels)


def is_plain_sdpa(options: Mapping[str, object]) -> bool:
    """Return whether transformers' sdpa function, given these options and one new position, does nothing but attend.

    The sdpa function ignores options that are not named here.
    """
    return not options.get("dropout") and all(
        options.get(name) is None for name in ("position_bias", "softcap", "cache")
    )
