"""Steps of one new position per row as graphs of a GPU: recorded once for each number of rows, launched in one call.

What blocks do in a step is the same every time but for hidden states, positions, and where keys and values are: these
are in memory that stays where it is, so that a graph can be launched again
(https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs). A step of so few rows takes a GPU less time than
Python takes to ask for it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from swarm_protocol.span import Span
from swarm_server.blocks.blocks import BlockStack
from swarm_server.blocks.split_stack import Stack
from swarm_server.gpu.row_tables import FIELDS, PARTS, row_tables
from swarm_server.graph.recording import NotCapturable
from swarm_server.graph.stand_in import StandInCache
from swarm_server.kv.rows_cache import BlockRuns, attention_in_place

_MOST_ROWS = 256  # of a graph
_MOST_GRAPHS = 32  # that are kept
_BEYOND = (1000, 5000, 1003)  # positions, beyond the longest window, at which blocks are looked at

_logger = logging.getLogger(__name__)


class Attention(Protocol):
    """See ``TritonAttention``."""

    def store(self, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None: ...

    def attend(
        self, table: torch.Tensor, query: torch.Tensor, kv_heads: int, value_width: int, scaling: float
    ) -> torch.Tensor: ...


class Recorder(Protocol):
    """Records what a GPU is asked for. See ``CudaRecorder``."""

    def record(self, device: torch.device, compute: Callable[[], None]) -> Callable[[], None]:
        """Calls ``compute``, which reads and writes tensors that stay; the result does the same, without Python."""


class StepReplays:
    """Of one stack and its views. Used by the compute thread only.

    Attributes:
        refusal: why steps are not graphs; None: they are, as far as is known.
    """

    description = "graphs, which the GPU runs in one call"

    def __init__(self, stack: Stack, longest_window: int, attention: Attention, recorder: Recorder) -> None:
        self._stack = stack
        self._length = longest_window
        self._attention = attention
        self._recorder = recorder
        self._windows: dict[Span, Mapping[int, int | None]] = {}
        self._replays: OrderedDict[tuple[Span, int], _Replay] = OrderedDict()
        takes_positions = all(view.family.takes_positions for view in stack.views(stack.span))
        self.refusal = None if takes_positions else "the family has positions of its own"

    def run(
        self,
        blocks: Span,
        hidden: Sequence[torch.Tensor],
        positions: torch.Tensor,
        places: Sequence[BlockRuns],
        seen: Sequence[int],
    ) -> torch.Tensor | None:
        """As ``StepGraphs.run``; ``blocks`` are those of one device."""
        num_rows, num_new = positions.shape
        if self.refusal is not None or not 0 < num_rows * num_new <= _MOST_ROWS or min(seen) < num_new:
            return None
        try:
            replay = self._replay(blocks, num_rows * num_new)
            table = row_tables(places, self._windows[blocks], seen, num_new, replay.num_rows)
            if table is None:
                return None
            rows = torch.cat([rows.reshape(-1, 1, rows.shape[2]) for rows in hidden])
            output = replay.run(rows, positions.reshape(-1, 1), torch.from_numpy(table))
        except Exception as error:  # a family's own code, or a driver: whatever it raises means that this does not fit
            self.refusal = str(error) if isinstance(error, NotCapturable) else f"{type(error).__name__}: {error}"
            self._replays.clear()
            _logger.info("steps are not graphs any more: %s", self.refusal)
            return None
        return output.view(num_rows, num_new, -1)

    def _replay(self, blocks: Span, num_rows: int) -> _Replay:
        """A graph for so many rows or more."""
        size = 1 << (num_rows - 1).bit_length()
        key = blocks, size
        if key not in self._replays:
            stack = self._stack.view(blocks)
            if blocks not in self._windows:
                self._windows[blocks] = windows_of(stack, self._length)
            if len(self._replays) == _MOST_GRAPHS:
                self._replays.popitem(last=False)
            with torch.inference_mode(False), torch.no_grad():
                self._replays[key] = _Replay(stack, size, self._length + _BEYOND[0], self._attention, self._recorder)
        self._replays.move_to_end(key)
        return self._replays[key]


def windows_of(stack: BlockStack, longest: int) -> Mapping[int, int | None]:
    """Of each block that attends, how many of the last positions it looks at; None: all.

    Raises:
        NotCapturable: it depends on how many there are, or attention does something else.
    """
    found = []
    for beyond in _BEYOND:
        cache = _NothingStored(stack.num_blocks, longest + beyond)
        hidden = torch.zeros(2, 1, stack.hidden_size, dtype=stack.dtype, device=stack.device)
        positions = torch.full((2, 1), longest + beyond - 1, device=stack.device)
        with torch.no_grad(), attention_in_place(cache, stack.configs):
            stack(hidden, None, positions, cache)
        found.append(cache.windows)
    if any(windows != found[0] for windows in found):
        raise NotCapturable("what attention looks at depends on how many positions there are")
    return found[0]


class _Replay:
    """A step of so many rows; those that are not used have no positions, and any hidden states."""

    def __init__(self, stack: BlockStack, num_rows: int, length: int, attention: Attention, recorder: Recorder) -> None:
        self.num_rows = num_rows
        self._stack, self._length, self._attention, self._recorder = stack, length, attention, recorder
        self._hidden = torch.zeros(num_rows, 1, stack.hidden_size, dtype=stack.dtype, device=stack.device)
        self._positions = torch.zeros(num_rows, 1, dtype=torch.long, device=stack.device)
        self._table = torch.zeros(stack.num_blocks, num_rows, PARTS, FIELDS, dtype=torch.long, device=stack.device)
        self._output = torch.zeros_like(self._hidden)
        self._launch: Callable[[], None] | None = None

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """[rows, 1, hidden_size] of ``hidden``, which is not changed by later steps."""
        self._hidden[: len(hidden)].copy_(hidden)
        self._positions[: len(hidden)].copy_(positions)
        self._table.copy_(table)
        if self._launch is None:
            self._launch = self._recorder.record(self._stack.device, self._compute)
        self._launch()
        return self._output[: len(hidden)].clone()

    def _compute(self) -> None:
        cache = _StoredInPlace(self._stack.num_blocks, self._length, self._table, self._attention)
        with torch.no_grad(), attention_in_place(cache, self._stack.configs):
            self._output.copy_(self._stack(self._hidden, None, self._positions, cache))


class _NothingStored(StandInCache):
    """Finds out windows; attention gives zeros."""

    def attended(
        self, block: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        if not query.dtype == keys.dtype == values.dtype:
            raise NotCapturable("queries, keys and values are of several types")
        return query.new_zeros(len(query), 1, query.shape[1], values.shape[3])


class _StoredInPlace(StandInCache):
    """Keys and values are where the table says. Masks are not looked at: they would be the same each time."""

    def __init__(self, num_blocks: int, length: int, table: torch.Tensor, attention: Attention) -> None:
        super().__init__(num_blocks, length)
        self._table = table
        self._attention = attention

    def window_of(self, mask: torch.Tensor | None) -> int | None:
        return None

    def attended(
        self, block: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        table = self._table[block]
        self._attention.store(table, keys, values)
        return self._attention.attend(table, query, keys.shape[1], values.shape[3], scaling)
