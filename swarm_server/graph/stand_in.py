"""A cache for made-up rows of equal length, to find out what blocks do with one new position."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from swarm_server.graph.recording import NotCapturable
from swarm_server.kv.rows_attention import is_plain_sdpa
from swarm_server.kv.rows_cache import BlockRuns, RowsCache


class StandInCache(RowsCache):
    """A cache that stands for rows without storing anything.

    Attributes:
        windows: for each block so far, how many of the last positions it looks at; None for all.
    """

    def __init__(self, num_blocks: int, length: int) -> None:
        """Set the ``length`` of all rows, the new position included; it is longer than any window."""
        super().__init__([BlockRuns((), (), ())] * num_blocks, length, 1, in_place=True)
        self._newest: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self.windows: dict[int, int | None] = {}

    @abstractmethod
    def attended(
        self, block: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Return attention [rows, 1, heads, value width] for inputs [rows, heads, 1, width]; handle keys and values."""

    def window_of(self, mask: torch.Tensor | None) -> int | None:
        """Return how many of the last positions a mask [rows, 1, 1, length] lets through in every row; None for all.

        Raises:
            NotCapturable: the mask lets other positions through.
        """
        if mask is None:
            return None
        seen = mask if mask.dtype == torch.bool else mask == 0
        length = seen.shape[-1]
        count = int(seen[0].sum())
        if not bool(seen[..., length - count :].all()) or int(seen.sum()) != count * len(seen):
            raise NotCapturable("attention leaves out positions in between")
        return None if count == length else count

    def update(  # type: ignore[override]  # as in RowsCache
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._newest = layer_idx, keys, values
        return keys, values

    def attend(
        self,
        attention: Callable[..., Any],
        module: nn.Module,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        piecewise: bool,
        **options: Any,
    ) -> torch.Tensor:
        if not piecewise or not is_plain_sdpa(options):
            raise NotCapturable("attention is more than scaled dot products")
        assert self._newest is not None, "attention without keys and values"
        block, keys, values = self._newest
        if block in self.windows:
            raise NotCapturable("a block attends twice")
        self.windows[block] = self.window_of(mask)
        scaling = options.get("scaling")
        return self.attended(block, query, keys, values, float(query.shape[3] ** -0.5 if scaling is None else scaling))
