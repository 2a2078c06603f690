"""States that recurrent and convolutional blocks keep for a session, whose size does not grow with the session.

The states of all rows of a session after some length are one value, whose tensors are never written again. Reordering
picks rows, and a step that fails leaves the states before it. A recurrent state cannot be undone, so the states before
the last step are kept as well. Convolutions keep their last inputs, and can go back as far as inputs were recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers.cache_utils import LinearAttentionLayer

from swarm_server.kv.kv_cache import Lease

CPU = torch.device("cpu")
COPIES = 3  # copies of a row's states: after the last step, before it, and in computation


@dataclass(frozen=True)
class Slot:
    """A state tensor that a block keeps for a row.

    Attributes:
        index: the number of the state among the block's states of this kind.
        shape: the shape for one row; the last dimension of a convolution's state is positions.
        device: the device of the block.
    """

    is_convolution: bool
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = CPU

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class RowStatesRoom:
    """The room for the states of a session's rows, charged to its lease for as long as this object lives."""

    def __init__(self, num_rows: int, row_bytes: int, lease: Lease) -> None:
        """Take the room from the lease; raise PeerBusy if there is none."""
        self.num_rows = num_rows
        lease.take(COPIES * num_rows * row_bytes, self)


States = tuple[tuple[torch.Tensor, ...], ...]  # of some rows: for each block, the tensors of its slots


@dataclass(frozen=True)
class RowStates:
    """The states of all rows of a session, after ``length`` positions.

    Attributes:
        states: a tensor [rows, *shape] for each slot; a convolution's tensor may have more positions in front.
        before: the states before the last step, if they are known.
    """

    length: int
    states: States
    room: RowStatesRoom
    before: RowStates | None = None

    def picked(self, indices: Sequence[int]) -> RowStates:
        """Return the states in a new order of rows: new row i is old row ``indices[i]``."""
        states = tuple(tuple(tensor[list(indices)] for tensor in of_block) for of_block in self.states)
        return replace(self, states=states, before=None if self.before is None else self.before.picked(indices))

    def cropped(self, length: int, blocks: Sequence[tuple[Slot, ...]]) -> RowStates | None:
        """Return the states after the first ``length`` positions; None if they are no longer known."""
        if length == self.length:
            return self
        if self.before is not None and self.before.length == length:
            return self.before
        removed = self.length - length
        cropped = []
        for slots, of_block in zip(blocks, self.states, strict=True):
            for slot, tensor in zip(slots, of_block, strict=True):
                if not slot.is_convolution or tensor.shape[-1] - removed < slot.shape[-1]:
                    return None
            cropped.append(tuple(tensor[..., : tensor.shape[-1] - removed] for tensor in of_block))
        return replace(self, length=length, states=tuple(cropped), before=None)


def state_layers(
    blocks: Sequence[tuple[Slot, ...]],
    members: Sequence[States] | None,
    num_rows: int,
    device: torch.device,
    *,
    recording: bool,
) -> list[LinearAttentionLayer | None]:
    """Return for each block the layer that transformers' code reads and writes; None for blocks without states.

    Args:
        blocks: the slots of each block.
        members: the states of each session, with equally much recorded; None if the sessions have no positions yet.
        num_rows: the number of rows of all sessions together.
        recording: whether the inputs of convolutions are kept, so that their states can be cropped later.
    """
    layers: list[LinearAttentionLayer | None] = []
    for number, slots in enumerate(blocks):
        if not slots:
            layers.append(None)
            continue
        layer = LinearAttentionLayer(number_of_states=1 + max(slot.index for slot in slots))
        layers.append(layer)
        if recording:
            layer.activate_past_recording()
        for place, slot in enumerate(slots):
            if members is not None:
                given = [states[number][place] for states in members]
                if slot.is_convolution and not recording:
                    given = [tensor[..., -slot.shape[-1] :] for tensor in given]
                _fill(layer, slot, torch.cat(given))  # a copy, because it is written to
            elif recording:  # before the first position, a convolution sees zeros
                _fill(layer, slot, torch.zeros(num_rows, *slot.shape, dtype=slot.dtype, device=device))
    return layers


def _fill(layer: LinearAttentionLayer, slot: Slot, state: torch.Tensor) -> None:
    # Not by lazy_initialization, which would make zeros to write over, and import torch's compiler to mark them.
    layer.has_previous_state[slot.index] = True
    layer.dtype, layer.device = state.dtype, state.device  # type: ignore[assignment]
    if slot.is_convolution:
        layer.conv_states[slot.index], layer.is_conv_states_initialized[slot.index] = state, True
        layer.conv_kernel_size[slot.index] = slot.shape[-1]
    else:
        layer.recurrent_states[slot.index], layer.is_recurrent_states_initialized[slot.index] = state, True


def states_after(
    blocks: Sequence[tuple[Slot, ...]], layers: Sequence[LinearAttentionLayer | None], num_rows: Sequence[int]
) -> list[States]:
    """Return the states of each session; ``num_rows``: the number of rows of each session."""
    split = [
        [_state(layer, slot).split(list(num_rows)) for slot in slots]
        for slots, layer in zip(blocks, layers, strict=True)
    ]
    if len(num_rows) == 1:
        return [tuple(tuple(parts[0] for parts in of_block) for of_block in split)]
    # Copies, because a view of a tensor would keep all of it in memory.
    return [
        tuple(tuple(parts[member].clone() for parts in of_block) for of_block in split)
        for member in range(len(num_rows))
    ]


def _state(layer: LinearAttentionLayer | None, slot: Slot) -> torch.Tensor:
    assert layer is not None
    state = (layer.conv_states if slot.is_convolution else layer.recurrent_states)[slot.index]
    assert state is not None
    return state
