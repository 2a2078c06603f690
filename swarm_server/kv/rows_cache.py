"""A cache that presents several sessions in one batch to a model's own code as an ordinary left-padded batch.

Rows of different lengths are presented right-aligned. The mask, the positions and the lengths that transformers asks
the cache for are those of a left-padded batch, which every family computes correctly. Only the keys and values are laid
out differently. Where the blocks call an attention function by name, our function takes its place. Ours calls the
original once for each run of rows, on keys and values where they are stored. Other blocks get a right-aligned copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, LinearAttentionLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swarm_models.kernels.attention import AttentionKernel, PagedRows
from swarm_server.kv.kv_rows import Run
from swarm_server.kv.rows_attention import channel_numbers, hidden_at_start, is_plain_sdpa, paged_rows

_PREFIX = "swarm_rows_"
_NAME = "_attn_implementation_internal"  # where a config keeps the name of its attention function
_ORIGINALS = ("sdpa", "eager")


@dataclass(frozen=True)
class BlockRuns:
    """The places of one block's keys and values.

    Attributes:
        runs: the positions to attend to; each run ends with its new positions.
        keys, values: for each run, the number of the channel in its pages.
        index: for each run, the channel of an index's keys; empty for blocks without an index.
    """

    runs: tuple[Run, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    index: tuple[int, ...] = ()


class StatesCache(Cache):
    """A cache that also has the methods by which MiniMax's code reads and writes a recurrent state."""

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        layer = self.layers[layer_idx]  # not get_recurrent_state, which transformers 5.20 lacks
        return layer.recurrent_states[0] if layer.is_recurrent_states_initialized[0] else None  # type: ignore[union-attr]

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        self.update_recurrent_state(state, layer_idx)


class RowsCache(StatesCache):
    """The keys and values of a batch of rows for one call of some blocks.

    Attributes:
        in_place: whether the blocks call ``attend`` for attention; otherwise ``update`` returns aligned copies.
    """

    is_compileable = False

    def __init__(
        self,
        blocks: Sequence[BlockRuns],
        length: int,
        num_new: int,
        in_place: bool,
        states: Sequence[LinearAttentionLayer | None] = (),
        kernel: AttentionKernel | None = None,
    ) -> None:
        """Describe the rows of one call.

        Args:
            length: the length of the longest row with its ``num_new`` new positions.
            states: the layer of each block's states, if any block has states.
            kernel: the kernel that attends for one new position where it can.
        """
        layers: list[Any] = list(states)  # None, where transformers expects a layer, for blocks that never ask for one
        self.layers = layers
        self._blocks = blocks
        self._length = length
        self._num_new = num_new
        self._current: BlockRuns | None = None
        # Keyed by the ids of mask and runs. Both are kept in the value, so that no other object gets their ids.
        self._masks: dict[tuple[int, int], tuple[object, object, list[torch.Tensor | None]]] = {}
        self._kernel = kernel if num_new == 1 else None
        self._paged: dict[tuple[int, int], tuple[object, object, PagedRows | None]] = {}
        self.in_place = in_place

    def update(  # type: ignore[override]  # they come by position
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [rows, heads, new, width]; return the keys and values that attention gets."""
        block = self._store(layer_idx, keys, values)
        if self.in_place:
            return keys, values
        return self._aligned(block.keys, keys), self._aligned(block.values, values)

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Store an index's keys [rows, new, width]; return the keys of all positions, [rows, length, width]."""
        block = self._current = self._blocks[layer_idx]
        for run, channel in zip(block.runs, block.index, strict=True):
            run.write(channel, keys[:, None])
        return self._aligned(block.index, keys[:, None])[:, 0]

    def _store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> BlockRuns:
        block = self._current = self._blocks[layer]
        if self._kernel is not None and block.runs:
            rows = self._paged_rows(block.runs, None)
            channels = channel_numbers(block.keys), channel_numbers(block.values)
            if rows is not None and self._kernel.store(rows, channels, keys, values):
                return block
        for run, key_channel, value_channel in zip(block.runs, block.keys, block.values, strict=True):
            run.write(key_channel, keys)
            run.write(value_channel, values)
        return block

    def attend(
        self,
        attention: Callable[..., Any],
        module: nn.Module,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        piecewise: bool,
        **options: Any,
    ) -> torch.Tensor:
        """Return the attention of ``query`` [rows, heads, new, width] to all positions, [rows, new, heads, width].

        ``piecewise``: scores may be computed part by part, as plain scaled dot products.
        """
        block, outputs = self._current, []
        assert block is not None
        if piecewise and is_plain_sdpa(options):
            output = self._attend_by_kernel(block, query, mask, options.get("scaling"))
            if output is not None:
                return output
        for number, (run, run_mask) in enumerate(zip(block.runs, self._run_masks(block.runs, mask), strict=True)):
            rows = query if len(block.runs) == 1 else query[run.rows]
            keys, values = list(run.read(block.keys[number])), list(run.read(block.values[number]))
            if len(keys) == 1:
                outputs.append(attention(module, rows, keys[0], values[0], run_mask, **options)[0])
            elif piecewise:
                outputs.append(_attend_parts(rows, keys, values, run_mask, options.get("scaling")))
            else:
                outputs.append(
                    attention(module, rows, torch.cat(keys, 2), torch.cat(values, 2), run_mask, **options)[0]
                )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_by_kernel(
        self, block: BlockRuns, query: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
    ) -> torch.Tensor | None:
        """Return the kernel's output, [rows, new, heads, width]; None if the kernel cannot compute this call."""
        if self._kernel is None or not block.runs:
            return None
        rows = self._paged_rows(block.runs, mask)
        if rows is None:
            return None
        channels = channel_numbers(block.keys), channel_numbers(block.values)
        value_width = block.runs[0].parts[0].page.data[block.values[0]].shape[3]
        return self._kernel.attend(rows, channels, query, value_width, scaling)

    def _paged_rows(self, runs: tuple[Run, ...], mask: torch.Tensor | None) -> PagedRows | None:
        """Return the positions that the mask leaves visible; None if the kernel cannot apply this mask."""
        key = id(mask), id(runs)
        if key not in self._paged:
            hidden: list[int] | None = []
            for run, part in zip(runs, self._run_masks(runs, mask), strict=True):
                of_run = hidden_at_start(part, run.num_rows)
                hidden = None if hidden is None or of_run is None else hidden + of_run
            self._paged[key] = mask, runs, None if hidden is None else paged_rows(runs, hidden)
        return self._paged[key][2]

    def _run_masks(self, runs: Sequence[Run], mask: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Return the mask's rows and columns for each run; None for a run that attends to everything."""
        if mask is None:
            return [None] * len(runs)
        key = id(mask), id(runs)
        if key not in self._masks:
            self._masks[key] = mask, runs, [_run_mask(run, mask) for run in runs]
        return self._masks[key][2]

    def _aligned(self, channels: tuple[int, ...], new: torch.Tensor) -> torch.Tensor:
        """Return a copy [rows, heads, length, width] with all rows aligned at their ends and zeros before them."""
        assert self._current is not None
        runs = self._current.runs
        if len(runs) == 1 and runs[0].length == self._length and len(runs[0].parts) == 1:
            return next(runs[0].read(channels[0]))
        rows, heads, _, width = new.shape
        aligned = new.new_zeros(rows, heads, self._length, width)
        for run, channel in zip(runs, channels, strict=True):
            position = self._length - run.length
            for part in run.read(channel):
                aligned[run.rows, :, position : position + part.shape[2]] = part
                position += part.shape[2]
        return aligned

    # The questions that transformers asks a cache; to transformers, every block seems to keep the same positions.

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self._blocks)

    is_linear = is_dummy = is_sliding

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length - self._num_new

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def __len__(self) -> int:
        return len(self._blocks)


def _run_mask(run: Run, mask: torch.Tensor) -> torch.Tensor | None:
    rows = mask if mask.shape[0] == 1 else mask[run.rows]
    part = rows[..., mask.shape[-1] - run.length :]
    if part.shape[-2] == 1:
        attends = part if part.dtype == torch.bool else part == 0
        if bool(attends.all()):
            return None
    return part


def _attend_parts(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Return softmax(q k^T * scaling + mask) v, [rows, new, heads, width]; several heads may share keys and values."""
    rows, heads, num_new, width = query.shape
    kv_heads = keys[0].shape[1]
    query = query.reshape(rows, kv_heads, heads // kv_heads * num_new, width)
    scores = torch.cat([query @ part.transpose(2, 3) for part in keys], -1)
    scores *= width**-0.5 if scaling is None else scaling
    if mask is not None:
        shaped = scores.view(rows, kv_heads, heads // kv_heads, num_new, -1)
        if mask.dtype == torch.bool:
            shaped.masked_fill_(~mask[:, :, None], torch.finfo(scores.dtype).min)
        else:
            shaped += mask[:, :, None]
    weights = torch.softmax(scores, -1)
    output, position = None, 0
    for part in values:
        piece = weights[..., position : position + part.shape[2]] @ part
        output = piece if output is None else output.add_(piece)
        position += part.shape[2]
    assert output is not None
    return output.view(rows, heads, num_new, -1).transpose(1, 2).contiguous()  # as transformers' function returns it


# ---------------------------------------------------------------- replacing an attention function

_running: ContextVar[RowsCache] = ContextVar("_running")  # the cache in use on a compute thread


def _register(original: str) -> None:
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: object,
    ) -> tuple[torch.Tensor, None]:
        function = (
            ALL_ATTENTION_FUNCTIONS[original]
            if original in ALL_ATTENTION_FUNCTIONS
            else sys.modules[type(module).__module__].eager_attention_forward
        )
        return _running.get().attend(function, module, query, attention_mask, original == "sdpa", **options), None

    ALL_ATTENTION_FUNCTIONS.register(_PREFIX + original, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_PREFIX + original, ALL_MASK_ATTENTION_FUNCTIONS[original])


for _original in _ORIGINALS:
    _register(_original)


@contextmanager
def attention_in_place(cache: RowsCache, configs: Sequence[PreTrainedConfig]) -> Iterator[None]:
    """Make models with these configs call ``cache.attend`` in this thread, while the context is active."""
    originals = [config._attn_implementation for config in configs]
    token = _running.set(cache)
    try:
        for config, original in zip(configs, originals, strict=True):
            vars(config)[_NAME] = _PREFIX + original  # avoids the checks of every assignment
        yield
    finally:
        for config, original in zip(configs, originals, strict=True):
            vars(config)[_NAME] = original
        _running.reset(token)


def replaceable(config: PreTrainedConfig) -> bool:
    """Return whether our function can take the place of the attention function that the config names."""
    return config._attn_implementation in _ORIGINALS
