"""Steps of one new position per row as graphs of a GPU: recorded once for each number of rows, launched in one call.

Blocks do the same in every step, except for hidden states, positions, and where keys and values are. These inputs have
fixed addresses, so that a graph can be launched again
(https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs). A step of few rows takes a GPU less time than Python
takes to launch its kernels.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from swarm_protocol.span import Span
from swarm_server.adapters.lora import PlacedAdapter
from swarm_server.blocks.blocks import BlockStack
from swarm_server.blocks.split_stack import Stack
from swarm_server.gpu.cuda_recorder import CudaRecorder
from swarm_server.gpu.row_tables import FIELDS, PARTS, row_tables
from swarm_server.graph.recording import NotCapturable
from swarm_server.graph.stand_in import StandInCache
from swarm_server.kv.rows_cache import BlockRuns, attention_in_place

if TYPE_CHECKING:  # Triton is not everywhere
    from swarm_server.gpu.triton_attention import TritonAttention

_MOST_ROWS = 256  # rows of a graph
_MOST_NEW = 16  # new positions of a row: each reads all positions before it, so graphs are slow for long prompts
_MOST_GRAPHS = 64  # graphs that are kept
_MOST_SPANS = 16  # spans that have graphs
_OFTEN = 3  # steps of a part of the span before it gets a graph, because a recording delays all sessions
_BEYOND = (1000, 20_000, 1003)  # positions, beyond the longest window, at which blocks are tried

_logger = logging.getLogger(__name__)


class StepReplays:
    """The graphs of one stack and its views. One thread at a time uses them.

    Attributes:
        refusal: why there are no graphs; None if there are, or may be, graphs.
    """

    description = "graphs, which the GPU runs in one call"

    def __init__(self, stack: Stack, longest_window: int, attention: TritonAttention, recorder: CudaRecorder) -> None:
        self._stack = stack
        self._longest_window = longest_window
        self._attention = attention
        self._recorder = recorder
        self._windows: dict[Span, Mapping[int, int | None]] = {}
        self._replays: OrderedDict[tuple[Span, int], _Replay] = OrderedDict()
        self._refused: set[tuple[Span, int]] = set()
        self._asked: Counter[tuple[Span, int]] = Counter()
        views = stack.views(stack.span)
        self._whole = {view.span for view in views}
        takes_positions = all(view.family.takes_positions for view in views)
        self.refusal = None if takes_positions else "the family has positions of its own"

    def run(
        self,
        blocks: Span,
        hidden: Sequence[torch.Tensor],
        positions: torch.Tensor,
        places: Sequence[BlockRuns],
        seen: Sequence[int],
        adapter: PlacedAdapter | None = None,
    ) -> torch.Tensor | None:
        """Compute a step like ``StepGraphs.run``; ``blocks`` must be on one device.

        Return None for a step with an adapter.
        """
        num_rows, num_new = positions.shape
        if (
            adapter is not None
            or self.refusal is not None
            or num_new > _MOST_NEW
            or not 0 < num_rows * num_new <= _MOST_ROWS
        ):
            return None
        key = blocks, 1 << (num_rows * num_new - 1).bit_length()  # the graph's number of rows: few graphs serve all
        if min(seen) < num_new or key in self._refused or not self._is_worth_a_graph(key):
            return None
        try:
            replay = self._replay(*key)
            table = row_tables(places, self._windows[blocks], seen, num_new, replay.num_rows)
            if table is None:
                return None
            rows = torch.cat([rows.reshape(-1, 1, rows.shape[2]) for rows in hidden])
            output = replay.run(rows, positions.reshape(-1), torch.from_numpy(table))
        except Exception as error:  # a model family's code or a driver may raise any error: graphs do not fit
            self._refuse(key, str(error) if isinstance(error, NotCapturable) else f"{type(error).__name__}: {error}")
            return None
        return output.view(num_rows, num_new, -1)

    def _refuse(self, key: tuple[Span, int], reason: str) -> None:
        self._replays.pop(key, None)
        self._refused.add(key)
        if not self._replays:
            self.refusal = reason
        _logger.info("there is no graph for %d rows of blocks %s: %s", key[1], key[0], reason)

    def _is_worth_a_graph(self, key: tuple[Span, int]) -> bool:
        span = key[0]
        if key in self._replays or span in self._whole:
            return True
        if span not in self._windows and len(self._windows) >= _MOST_SPANS:
            return False
        if len(self._asked) > _MOST_GRAPHS * _OFTEN:
            self._asked.clear()
        self._asked[key] += 1
        return self._asked[key] >= _OFTEN

    def _replay(self, blocks: Span, num_rows: int) -> _Replay:
        key = blocks, num_rows
        if key not in self._replays:
            stack = self._stack.view(blocks)
            if blocks not in self._windows:
                self._windows[blocks] = windows_of(stack, self._longest_window)
            if len(self._replays) == _MOST_GRAPHS:
                self._replays.popitem(last=False)
            length = self._longest_window + _BEYOND[0]
            with torch.inference_mode(False), torch.no_grad():
                self._replays[key] = _Replay(stack, num_rows, length, self._attention, self._recorder)
        self._replays.move_to_end(key)
        return self._replays[key]


def windows_of(stack: BlockStack, longest: int) -> Mapping[int, int | None]:
    """Return for each block that attends how many of the last positions it looks at; None for all.

    Raises:
        NotCapturable: attention does something else, or the blocks' results depend on the number of positions in the
            cache in another way than by these windows.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 1, stack.hidden_size, generator=generator).to(stack.device, stack.dtype)
    positions = torch.tensor([[3], [8]], device=stack.device)
    found = []
    for beyond in _BEYOND:
        cache = _NothingStored(stack.num_blocks, longest + beyond)
        with torch.no_grad(), attention_in_place(cache, stack.configs):
            found.append((cache.windows, stack(hidden, None, positions, cache)))
    (windows, output), *others = found
    if any(other != windows for other, _ in others):
        raise NotCapturable("what attention looks at depends on how many positions there are")
    if not all(torch.equal(other, output) for _, other in others):
        raise NotCapturable("what is computed depends on how many positions there are")
    return windows


class _Replay:
    """A graph of a step of ``num_rows`` rows. Unused rows have no positions, and any hidden states."""

    def __init__(
        self, stack: BlockStack, num_rows: int, length: int, attention: TritonAttention, recorder: CudaRecorder
    ) -> None:
        """Prepare the memory. ``length``: the number of positions that the stand-in cache reports to the blocks."""
        self.num_rows = num_rows
        self._stack, self._length, self._attention, self._recorder = stack, length, attention, recorder
        self._hidden = torch.zeros(num_rows, 1, stack.hidden_size, dtype=stack.dtype, device=stack.device)
        self._output = torch.zeros_like(self._hidden)
        shape = stack.num_blocks, num_rows, PARTS, FIELDS
        size = stack.num_blocks * num_rows * PARTS * FIELDS
        # One copy sends all numbers. The CPU waits for it only if the next numbers are ready before it has ended.
        self._sent = torch.zeros(size + num_rows, dtype=torch.long, pin_memory=stack.device.type == "cuda")
        self._arrived: torch.cuda.Event | None = None
        numbers = torch.zeros_like(self._sent, device=stack.device)
        self._numbers, self._table, self._positions = numbers, numbers[:size].view(shape), numbers[size:].view(-1, 1)
        self._launch: Callable[[], None] | None = None

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return the output, [rows, 1, hidden_size] as ``hidden``; later steps do not change it. positions: [rows]."""
        if self._arrived is not None:
            self._arrived.synchronize()
        self._hidden[: len(hidden)].copy_(hidden)
        self._sent[: table.numel()].copy_(table.view(-1))
        self._sent[table.numel() :][: len(positions)].copy_(positions)
        self._numbers.copy_(self._sent, non_blocking=True)
        if self._numbers.is_cuda:
            self._arrived = torch.cuda.current_stream(self._numbers.device).record_event()
        if self._launch is None:
            self._launch = self._recorder.record(self._stack.device, self._compute)
        self._launch()
        return self._output[: len(hidden)].clone()

    def _compute(self) -> None:
        cache = _StoredInPlace(self._stack.num_blocks, self._length, self._table, self._attention)
        with torch.no_grad(), attention_in_place(cache, self._stack.configs):
            self._output.copy_(self._stack(self._hidden, None, self._positions, cache))


class _NothingStored(StandInCache):
    """A cache that finds out windows. Its attention returns something that depends on the queries alone."""

    def attended(
        self, block: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        if not query.dtype == keys.dtype == values.dtype:
            raise NotCapturable("queries, keys and values are of several types")
        return query.sum(-1).transpose(1, 2)[..., None].repeat(1, 1, 1, values.shape[3]) * scaling


class _StoredInPlace(StandInCache):
    """A cache with keys and values where the table says. It ignores masks, which would be the same each time."""

    def __init__(self, num_blocks: int, length: int, table: torch.Tensor, attention: TritonAttention) -> None:
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
