"""The input of a span of blocks, on both sides of the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.nn.functional import pad

from swarm_protocol.wire.constants import MAX_JOINED, PAGE_TOKENS

IN_WINDOWS, ACROSS_WINDOWS = 1, 2  # values of ``BlockInput.joined``


@dataclass(frozen=True)
class BlockInput:
    """Hidden states with the information that attention needs about their positions.

    hidden: [batch, tokens, hidden_size]; attention_mask: [batch, past + tokens] or None; position_ids: [batch or 1,
    tokens] or None, or [batch or 1, tokens, axes] for pictures in models with ``Family.position_axes``. packed: without
    mask and past, a position that does not follow the previous one begins another sequence, which attends only to
    itself. additions: [batch, tokens, blocks, hidden_size] or None: ``additions[:, :, i]`` is added to the output of
    block i of the model (DeepStack).

    joined: uint8 [batch, tokens], or None if every position sees the earlier ones only, as in text. An entry that is
    not 0 joins its position to the next one. Joined positions are a *run*: all of them attend to each other, and no
    step ends within it. ``IN_WINDOWS``: within sliding windows; ``ACROSS_WINDOWS``: also where a window hides them.
    """

    hidden: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    packed: bool = False
    additions: torch.Tensor | None = field(default=None, kw_only=True)
    joined: torch.Tensor | None = field(default=None, kw_only=True)

    @property
    def stacked(self) -> torch.Tensor:
        """Return the hidden states, or [batch, tokens, 1 + blocks, hidden_size] with the additions if there are any."""
        if self.additions is None or not bool(self.additions.any()):
            return self.hidden
        return torch.cat([self.hidden[:, :, None], self.additions.to(self.hidden)], 2)

    @property
    def is_plain(self) -> bool:
        """Return whether the hidden states, with positions that count on, are all there is to know."""
        return self.attention_mask is self.position_ids is self.additions is self.joined is None

    def additions_at(self, tokens: slice) -> torch.Tensor | None:
        """Return the additions at some of the positions."""
        return None if self.additions is None else self.additions[:, tokens]

    def rows(self, rows: slice | list[int]) -> BlockInput:
        """Return the input of some rows of the batch."""
        mask, positions = self.attention_mask, self.position_ids
        return BlockInput(
            self.hidden[rows],
            None if mask is None else mask[rows],
            positions if positions is None or len(positions) == 1 else positions[rows],
            self.packed,
            additions=None if self.additions is None else self.additions[rows],
            joined=None if self.joined is None else self.joined[rows],
        )

    def at(self, positions: slice) -> BlockInput:
        """Return the input of some of the positions, if there is no past."""
        tensors = (self.hidden, self.attention_mask, self.position_ids)
        hidden, mask, ids = (None if tensor is None else tensor[:, positions] for tensor in tensors)
        assert hidden is not None
        joined = None if self.joined is None else self.joined[:, positions]
        return BlockInput(hidden, mask, ids, self.packed, additions=self.additions_at(positions), joined=joined)

    @property
    def unpadded(self) -> slice:
        """Return the positions from the first to the last one that is no padding in some row; all if there is none."""
        used: Sequence[int] = range(self.hidden.shape[1])
        if self.attention_mask is not None and bool(self.attention_mask.any()):
            used = self.attention_mask.bool().any(0).nonzero().flatten().tolist()
        return slice(used[0], used[-1] + 1)

    def without_repeats(self) -> tuple[BlockInput, list[int]]:
        """Return the input of those rows that differ from all rows before them, and which of these each row equals.

        The list has an entry for each row of the batch. It is empty if all rows differ.
        """
        # The first elements of all positions come first, because they are few and nearly always differ between rows.
        by_row = (self.hidden[..., 0], self.hidden, self.attention_mask, self.position_ids, self.additions, self.joined)
        tensors = [each.detach() for each in by_row if each is not None and len(each) == len(self.hidden)]
        distinct: list[int] = []
        repeats: list[int] = []
        for row in range(len(self.hidden)):
            same = (n for n, other in enumerate(distinct) if all(torch.equal(t[other], t[row]) for t in tensors))
            repeats.append(next(same, len(distinct)))
            if repeats[-1] == len(distinct):
                distinct.append(row)
        return (self, []) if len(distinct) == len(self.hidden) else (self.rows(distinct), repeats)

    @classmethod
    def of_rows(cls, parts: Sequence[BlockInput]) -> BlockInput:
        """Join all rows of these inputs, which have equally many positions, and position ids for every row."""
        positions = [part.position_ids for part in parts if part.position_ids is not None]
        assert len(positions) == len(parts)
        rows = [len(part.hidden) for part in parts]
        return cls(
            torch.cat([part.hidden for part in parts]),
            _rows_of([part.attention_mask for part in parts], rows, fill=1),
            torch.cat(with_same_axes(positions)),
            additions=_rows_of([part.additions for part in parts], rows, fill=0),
            joined=_rows_of([part.joined for part in parts], rows, fill=0),
        )


def _rows_of(parts: Sequence[torch.Tensor | None], rows: Sequence[int], fill: int) -> torch.Tensor | None:
    """Return the rows of all parts, filled where a part is None; None if all are. ``rows``: how many each part has."""
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    shape = like.shape[1:]
    pairs = zip(parts, rows, strict=True)
    return torch.cat([like.new_full((count, *shape), fill) if part is None else part for part, count in pairs])


def unstacked(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the hidden states and the additions of a tensor that ``BlockInput.stacked`` returned."""
    return (tensor, None) if tensor.dim() == 3 else (tensor[:, :, 0], tensor[:, :, 1:])


def with_same_axes(positions: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return position ids that can be joined: if some have axes, those without get the same value on each axis."""
    axes = next((each.shape[2] for each in positions if each.dim() == 3), None)
    if axes is None:
        return positions
    return [each if each.dim() == 3 else each[..., None].expand(-1, -1, axes) for each in positions]


def joined_of(inputs: BlockInput) -> torch.Tensor:
    """Return ``joined`` of these inputs, [batch, tokens]: zeros for text."""
    return torch.zeros(inputs.hidden.shape[:2], dtype=torch.uint8) if inputs.joined is None else inputs.joined


def run_numbers(joined: torch.Tensor) -> torch.Tensor:
    """Return a number for each position, [batch, tokens], which only positions of the same run share in a row."""
    return pad((joined[:, :-1] == 0).cumsum(1), (1, 0))  # a position that does not join the next one ends its run


def ends_of_runs(joined: torch.Tensor) -> list[int]:
    """Return the numbers of positions after which a step may end, because no row has a run that goes on."""
    inner = (~joined[:, :-1].bool().any(0)).nonzero().flatten() + 1
    return [*inner.tolist(), joined.shape[1]]


def longest_run(joined: torch.Tensor) -> int:
    """Return the most positions between two places where a step may end; 1 for text."""
    return max(end - start for start, end in pairwise([0, *ends_of_runs(joined)]))


def most_tokens(max_step_tokens: int, batch_size: int, joined: torch.Tensor | None = None) -> int:
    """Return how many positions per row a step may have on a server that takes ``max_step_tokens`` in all rows.

    It may be longer by its longest run, which cannot be cut, and by a page, unless the run itself is too long.
    """
    most, longest = max(1, max_step_tokens // batch_size), 1 if joined is None else longest_run(joined)
    return most + longest + PAGE_TOKENS if 1 < longest <= MAX_JOINED // batch_size else most
