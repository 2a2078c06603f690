"""A batch of sessions in the form that blocks need: masks, positions, and where keys and values are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import joined_of, with_same_axes
from swarm_server.engine.session_state import KvState, Session, SessionStep
from swarm_server.kv.kv_rows import ChannelPlace, Growth, PageLayout, Run, length_of, runs
from swarm_server.kv.row_states import Slot, States
from swarm_server.kv.rows_cache import BlockRuns


@dataclass
class Prepared:
    """A step of one session, or the next positions of several, with room for the new positions.

    Several sessions have one layout, and one adapter if any. No session has changed yet.

    Attributes:
        step: the step, or the hidden states of all sessions.
        states: the state of each session once the step is computed.
        lengths: the number of positions of each row once the step is computed.
        num_matched: leading positions whose keys and values the prefix cache has.
        growth: room for the other positions; None if all positions are matched.
        block_outputs: the outputs of the parts computed so far, if they are wanted.
        states_after: the recurrent states after computed blocks, by block index.
    """

    sessions: Sequence[Session]
    step: SessionStep
    states: Sequence[KvState]
    lengths: Sequence[int]
    num_matched: int = 0
    growth: Growth | None = None
    block_outputs: list[torch.Tensor] = field(default_factory=list)
    states_after: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    @property
    def session(self) -> Session:
        """Return the only session, or one of those that are alike."""
        return self.sessions[0]

    @property
    def state(self) -> KvState:
        """Return the new state of the only session."""
        (state,) = self.states
        return state

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def runs(self, group: int, first: int) -> list[Run]:
        """Return where the rows are, which begin at row ``first`` of the batch."""
        if len(self.states) == 1:
            return runs(self.state.rows, group, first)
        parts = [state.rows[0].parts[group] for state in self.states]
        return [Run(row, 1, each, length_of(each)) for row, each in enumerate(parts, first)]

    @property
    def new_hidden(self) -> torch.Tensor:
        """Return the hidden states that are to be computed, [rows, new, hidden_size]."""
        hidden = self.step.inputs.hidden
        return hidden[:, self.num_matched :] if self.num_matched else hidden

    @property
    def bounds(self) -> Iterable[int]:
        """Return the block boundaries at which this step needs hidden states."""
        blocks = self.session.blocks
        if self.step.every_block:
            return range(blocks.start, blocks.end + 1)
        additions = self.step.inputs.additions
        if additions is None:
            return blocks.start, blocks.end
        return blocks.start, *range(blocks.start + 1, min(additions.shape[2] + 1, blocks.end)), blocks.end

    def with_addition(self, output: torch.Tensor, block: int) -> torch.Tensor:
        """Return a block's output of the computed positions, with the step's additions to it."""
        additions = self.step.inputs.additions
        if additions is None or block >= additions.shape[2]:
            return output
        return output + additions[:, self.num_matched :, block].to(output)

    @property
    def records(self) -> bool:
        """Return whether the inputs of convolutions are recorded, so that their states can be cropped later."""
        layout = self.session.layout
        return bool(layout.slots) and layout.crops_states and self.state.settled is not None

    @property
    def num_recorded(self) -> int:
        """Return how many positions of input the convolutions have recorded so far."""
        if not (self.records and self.step.start):
            return 0
        assert self.state.states is not None
        return max(tensor.shape[-1] for of_block in self.state.states.states for tensor in of_block)

    def slots(self, blocks: Span) -> tuple[tuple[Slot, ...], ...]:
        """Return the state slots of each of these blocks."""
        first, slots = self.session.blocks.start, self.session.layout.slots
        return slots[blocks.start - first : blocks.end - first] or ((),) * len(blocks)  # empty if no block has states

    def states_before(self, blocks: Span) -> States:
        if self.state.states is None:
            return ((),) * len(blocks)
        first = self.session.blocks.start
        return self.state.states.states[blocks.start - first : blocks.end - first]


def positions_and_mask(step: SessionStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the position ids, [batch, tokens] or [batch, tokens, axes], and the mask [batch, tokens] of a step."""
    batch_size, num_tokens, _ = step.inputs.hidden.shape
    positions, mask = step.inputs.position_ids, step.inputs.attention_mask
    if positions is None:
        positions = torch.arange(step.start, step.start + num_tokens)[None]
    mask = torch.ones(1, num_tokens, dtype=torch.long) if mask is None else mask[:, -num_tokens:]
    return positions.expand(batch_size, *positions.shape[1:]), mask.expand(batch_size, -1)


def batch_positions(batch: list[Prepared], num_new: int) -> torch.Tensor:
    """Return the position ids of the new positions of all rows, [rows, num_new] or [rows, num_new, axes]."""
    if num_new == 1 and all(work.step.inputs.position_ids is None for work in batch):  # decoding: one call for all
        last = np.array([length - 1 for work in batch for length in work.lengths], dtype=np.int64)
        return torch.from_numpy(last[:, None])
    return torch.cat(with_same_axes([_last_positions(work, num_new) for work in batch]))


def _last_positions(work: Prepared, num_new: int) -> torch.Tensor:
    if work.step.inputs.position_ids is None:
        return torch.tensor(work.lengths)[:, None] + torch.arange(-num_new, 0)
    return positions_and_mask(work.step)[0][:, -num_new:]


def hides_nothing(batch: list[Prepared]) -> bool:
    """Return whether every session attends to all its positions."""
    masks = [work.step.inputs.attention_mask for work in batch]
    return all(mask is None or bool(mask.all()) for mask in masks)


def positions_seen(batch: list[Prepared]) -> list[int] | None:
    """Return how many of its last positions each row attends to; None if a row attends to any other positions."""
    seen: list[int] = []
    for work in batch:
        mask = work.step.inputs.attention_mask
        if mask is None:
            seen += work.lengths
            continue
        counts = mask.sum(-1)
        # No holes: from the first visible position on, there are as many to the end as the mask leaves visible.
        if not bool((mask.argmax(-1) + counts == work.state.length).all()):
            return None
        seen += counts.tolist()
    return seen


def batch_mask(batch: list[Prepared], length: int) -> torch.Tensor | None:
    """Return the mask [rows, length] of rows that are aligned at their ends; None if it hides nothing."""
    lengths = list(chain.from_iterable([work.lengths for work in batch]))
    if all([each == length for each in lengths]) and hides_nothing(batch):
        return None
    result = torch.zeros(len(lengths), length, dtype=torch.long)
    first = 0
    for work in batch:
        mask = work.step.inputs.attention_mask
        for row, own_length in enumerate(work.lengths, first):
            result[row, length - own_length :] = 1 if mask is None else mask[row - first]
        first += work.num_rows
    return result


def batch_joined(batch: list[Prepared], num_new: int) -> torch.Tensor | None:
    """Return ``BlockInput.joined`` of the new positions of all rows, [rows, num_new]; None if they are all text."""
    if all(work.step.inputs.joined is None for work in batch):
        return None
    return torch.cat([joined_of(work.step.inputs)[:, -num_new:] for work in batch])


def block_runs(blocks: Span, batch: list[Prepared]) -> list[BlockRuns]:
    """Return for each block of ``blocks`` where the keys and values of all rows are."""
    if (layout := _common_layout(batch)) is not None:
        return _common_runs(blocks, batch, layout)
    by_group = _runs_by_group(batch)
    joined: dict[tuple[int, ...], tuple[Run, ...]] = {}  # one object for all blocks with the same runs
    result = []
    for block in blocks:
        found = [work.session.layout.blocks[block - work.session.blocks.start] for work in batch]
        places = [place for place in found if place is not None]
        is_stored = len(places) == len(found)
        result.append(_runs_at(places, by_group, joined) if is_stored else BlockRuns((), (), ()))
    return result


def _common_layout(batch: list[Prepared]) -> PageLayout | None:
    """Return the layout of all sessions of the batch; None if there are several, or they begin at several blocks."""
    first = batch[0].session
    layout, start = first.layout, first.blocks.start
    is_common = all(work.session.layout is layout and work.session.blocks.start == start for work in batch)
    return layout if is_common else None


def _common_runs(blocks: Span, batch: list[Prepared], layout: PageLayout) -> list[BlockRuns]:
    """Return the runs of each block for sessions of one layout, whose channels are the same."""
    by_group = _runs_by_group(batch)
    joined = [tuple(run for groups in by_group for run in groups[group]) for group in range(len(layout.groups))]
    first = batch[0].session.blocks.start
    result = []
    for place in layout.blocks[blocks.start - first : blocks.end - first]:
        if place is None:
            result.append(BlockRuns((), (), ()))
            continue
        runs_of_group = joined[place.group]
        count = len(runs_of_group)
        index = () if place.index is None else (place.index,) * count
        result.append(BlockRuns(runs_of_group, (place.keys,) * count, (place.values,) * count, index))
    return result


def _runs_by_group(batch: list[Prepared]) -> list[list[list[Run]]]:
    """Return the runs of the batch's rows, by session, then by group."""
    by_group: list[list[list[Run]]] = []
    first = 0
    for work in batch:
        groups = range(len(work.session.layout.groups))
        by_group.append([work.runs(group, first) for group in groups])
        first += work.num_rows
    return by_group


def _runs_at(
    places: list[ChannelPlace], by_group: list[list[list[Run]]], joined: dict[tuple[int, ...], tuple[Run, ...]]
) -> BlockRuns:
    """Return the runs of one block, which each session stores at one of ``places``."""
    key = tuple(place.group for place in places)
    if key not in joined:
        joined[key] = tuple(run for groups, group in zip(by_group, key, strict=True) for run in groups[group])
    channels = [place for groups, place in zip(by_group, places, strict=True) for _ in groups[place.group]]
    index = tuple(place.index for place in channels if place.index is not None)
    return BlockRuns(joined[key], tuple(p.keys for p in channels), tuple(p.values for p in channels), index)


def adapter_order(work: Prepared) -> bytes:
    return b"" if work.session.adapter is None else work.session.adapter.key
