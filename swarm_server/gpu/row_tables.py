"""Tables of where the keys and values of a batch's rows are, as numbers in GPU memory for kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from swarm_server.kv.kv_rows import MAX_PARTS
from swarm_server.kv.rows_attention import hidden_before, seen_parts
from swarm_server.kv.rows_cache import BlockRuns

PARTS = MAX_PARTS + 1  # most parts of a row that has just grown; the first part has the new position
FIELDS = 4  # numbers for each part:
KEYS, VALUES = 0, 1  # the address of the first position in the first head
CAPACITY = 2  # positions from one head to the next
LENGTH = 3  # positions; 0 if there is no such part


def row_tables(
    blocks: Sequence[BlockRuns],
    windows: Mapping[int, int | None],
    seen: Sequence[int],
    num_new: int,
    num_rows: int,
) -> npt.NDArray[np.int64] | None:
    """Return the table of addresses at which kernels find each block's keys and values.

    Args:
        windows: for each block that attends, how many of the last positions it looks at; None for all.
        seen: see ``hidden_before``.
        num_rows: the number of rows in the table, at least as many as in the batch; surplus rows have no positions.

    Returns:
        The table [blocks, num_rows, PARTS, FIELDS]; None if a row has more parts.
    """
    table = np.zeros((len(blocks), num_rows, PARTS, FIELDS), dtype=np.int64)
    alike: dict[tuple[int, int | None], list[int]] = {}  # blocks with positions in the same pages
    for number, window in windows.items():
        alike.setdefault((id(blocks[number].runs), window), []).append(number)
    for (_, window), numbers in alike.items():
        runs = blocks[numbers[0]].runs
        keys = np.array([blocks[number].keys for number in numbers])  # [blocks, runs]
        values = np.array([blocks[number].values for number in numbers])
        for row, parts in enumerate(seen_parts(runs, hidden_before(runs, window, seen, num_new), num_new)):
            if len(parts) > PARTS:
                return None
            for place, part in enumerate(reversed(parts)):
                addresses = part.page.addresses(part.row, part.start)
                entry = table[:, row, place]
                entry[numbers, KEYS] = addresses[keys[:, part.run]]
                entry[numbers, VALUES] = addresses[values[:, part.run]]
                entry[numbers, CAPACITY] = part.page.capacity
                entry[numbers, LENGTH] = part.length
    return table
