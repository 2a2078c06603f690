"""Where the attention kernel finds the rows of a batch, and which calls it can take over."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from swarm_protocol.kernels.attention import Numbers, PagedRows, PartOfPage
from swarm_server.kv.kv_rows import Run


def paged_rows(runs: Sequence[Run], hidden: Sequence[int] | None = None, num_new: int = 1) -> PagedRows:
    """Where a batch's positions are, as each new position sees them: without those behind it.

    Args:
        runs: of all rows, in order; each ends with its ``num_new`` new positions.
        hidden: how many positions at the start are left out, for each row and new position.

    Returns:
        Of each row as many as it has new positions, in order.
    """
    rows = []
    for number, run in enumerate(runs):
        parts = [
            (page.table.address, page.capacity, rows_of_page.start, positions.start, positions.stop)
            for page, rows_of_page, positions in run.parts
        ]
        for row in range(run.rows.stop - run.rows.start):
            for new in range(num_new):
                left = hidden[(run.rows.start + row) * num_new + new] if hidden else 0  # still to be left out
                behind = num_new - 1 - new  # which are all in the last part
                seen = []
                for i, (table, capacity, first_row, start, stop) in enumerate(parts, 1 - len(parts)):
                    if i == 0:
                        stop -= behind
                    first, left = start + left, max(0, left - (stop - start))
                    if first < stop:
                        seen.append(PartOfPage(table, capacity, first_row + row, first, stop - first, number))
                rows.append(seen)
    return PagedRows(rows)


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
