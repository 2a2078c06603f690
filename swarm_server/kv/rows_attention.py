"""Where the attention kernel finds the rows of a batch, and which calls it can take over."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from swarm_protocol.kernels.attention import Numbers, PagedRows, PartOfPage
from swarm_server.kv.kv_rows import Run


def paged_rows(runs: Sequence[Run], window: int | None = None) -> PagedRows:
    """runs: of all rows of a batch, in order; window: how many of the last positions are looked at, None for all."""
    rows = []
    for number, run in enumerate(runs):
        parts = [
            (page.table.address, page.capacity, rows_of_page.start, positions.start, positions.stop - positions.start)
            for page, rows_of_page, positions in (run.parts if window is None else run.last(window))
        ]
        for i in range(run.rows.stop - run.rows.start):
            rows.append(
                [
                    PartOfPage(table, capacity, row + i, start, count, number)
                    for table, capacity, row, start, count in parts
                ]
            )
    return PagedRows(rows)


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
