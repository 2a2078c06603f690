"""Where the attention kernel finds the rows of a batch, and which calls it can take over."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from swarm_protocol.kernels.attention import Numbers, PagedRows, PartOfPage
from swarm_server.kv.kv_rows import Page, Run


class SeenPart(NamedTuple):
    """Positions ``start`` to ``start + length`` of one row of a page, which a new position attends to.

    Attributes:
        run: the number of the run that it belongs to, whose channels are those of the page.
    """

    page: Page
    row: int
    start: int
    length: int
    run: int


def seen_parts(runs: Sequence[Run], hidden: Sequence[int] | None = None, num_new: int = 1) -> list[list[SeenPart]]:
    """Where a batch's positions are, as each new position sees them: without those behind it.

    Args:
        runs: of all rows, in order; each ends with its ``num_new`` new positions.
        hidden: how many positions at the start are left out, for each row and new position.

    Returns:
        Of each row as many as it has new positions, in order; the last part ends with the new position.
    """
    rows = []
    for number, run in enumerate(runs):
        for row in range(run.rows.stop - run.rows.start):
            for new in range(num_new):
                left = hidden[(run.rows.start + row) * num_new + new] if hidden else 0  # still to be left out
                behind = num_new - 1 - new  # which are all in the last part
                seen = []
                for i, (page, rows_of_page, positions) in enumerate(run.parts, 1 - len(run.parts)):
                    start, stop = positions.start, positions.stop
                    if i == 0:
                        stop -= behind
                    first, left = start + left, max(0, left - (stop - start))
                    if first < stop:
                        seen.append(SeenPart(page, rows_of_page.start + row, first, stop - first, number))
                rows.append(seen)
    return rows


def paged_rows(runs: Sequence[Run], hidden: Sequence[int] | None = None, num_new: int = 1) -> PagedRows:
    """What ``seen_parts`` gives, for the CPU's kernel."""
    return PagedRows(
        [
            [PartOfPage(page.table.address, page.capacity, *place) for page, *place in parts]
            for parts in seen_parts(runs, hidden, num_new)
        ]
    )


def hidden_before(runs: Sequence[Run], window: int | None, seen: Sequence[int], num_new: int) -> list[int]:
    """How many of the positions that are kept of each row lie before those that each of its new ones attends to.

    Args:
        window: how many of the last positions a new one looks at; None: all.
        seen: how many of its last positions each row attends to at most, its new ones included.
    """
    most = sys.maxsize if window is None else window
    rows = [(run.length, row) for run in runs for row in range(run.rows.start, run.rows.stop)]
    return [
        max(0, length - behind - min(most, seen[row] - behind))
        for length, row in rows
        for behind in reversed(range(num_new))
    ]


def hidden_at_start(mask: torch.Tensor | None, num_rows: int) -> list[int] | None:
    """How many positions at the start a mask of one new position hides from each row; None: it does something else.

    mask: [rows or 1, heads or 1, 1, positions], bool or to be added to scores; None: it hides nothing.
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
    """Of each run."""
    return Numbers(channels)


def is_plain_sdpa(options: Mapping[str, object]) -> bool:
    """Whether transformers' sdpa function, given these options and one new position, does nothing but attend.

    It takes no notice of options that are not named here.
    """
    return not options.get("dropout") and all(
        options.get(name) is None for name in ("position_bias", "softcap", "cache")
    )
