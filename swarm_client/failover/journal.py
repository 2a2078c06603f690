"""The record of a client's inputs to its chain, from which the session is replayed to a replacement server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from swarm_protocol.errors import RequestRejected
from swarm_protocol.wire.block_input import BlockInput, joined_of

_MAX_CHUNKS = 512  # the number of tensors in a pool at which it is compacted; each step adds one


@dataclass
class _Pool:
    """A store of positions of ``BlockInput``s, numbered in order of arrival. Reading joins the tensors of each list."""

    _hidden: list[torch.Tensor] = field(default_factory=list)  # each tensor: [positions, hidden_size]
    _positions: list[torch.Tensor] = field(default_factory=list)  # each tensor: [positions, axes]
    _joined: list[torch.Tensor] = field(default_factory=list)  # each tensor: [positions]
    # By the number of the first position, each tensor: [positions, blocks, hidden_size]. Most positions have none.
    _additions: dict[int, torch.Tensor] = field(default_factory=dict)
    size: int = 0

    def add(
        self, hidden: torch.Tensor, positions: torch.Tensor, joined: torch.Tensor, additions: torch.Tensor | None = None
    ) -> None:
        if additions is not None and (used := additions.flatten(1).any(1).nonzero()[:, 0].tolist()):
            # All are copies: a view would keep the caller's whole tensor, which the caller may also write into.
            self._additions[self.size + used[0]] = additions[used[0] : used[-1] + 1].detach().to("cpu", copy=True)
        self._hidden.append(hidden.detach().to("cpu", copy=True))
        positions = positions if positions.dim() == 2 else positions[:, None]
        self._positions.append(positions.detach().to("cpu", copy=True))
        self._joined.append(joined.to("cpu", copy=True))
        self.size += len(hidden)

    def copy(self) -> _Pool:
        """Return an independent pool whose entries share this pool's memory."""
        chunks = list(self._hidden), list(self._positions), list(self._joined)
        return _Pool(*chunks, dict(self._additions), self.size)

    def joined(self, which: torch.Tensor) -> torch.Tensor:
        """Return ``BlockInput.joined`` of these entries."""
        self._joined[:] = [torch.cat(self._joined)]
        return self._joined[0][which]

    def features(self, which: torch.Tensor, num: int) -> torch.Tensor:
        """Return the first ``num`` numbers of these entries' hidden states, [entries, num]."""
        return torch.cat([hidden[:, :num] for hidden in self._hidden])[which]

    @property
    def num_added(self) -> int:
        """Return the number of blocks that have additions at some position."""
        return max((additions.shape[1] for additions in self._additions.values()), default=0)

    @property
    def num_chunks(self) -> int:
        return len(self._hidden)

    def read(self, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return hidden states [entries, hidden_size], position ids, ``joined`` [entries] and additions.

        The position ids are [entries], or [entries, axes] if they differ between axes. The additions are [entries,
        blocks, hidden_size]; None if no entry has any.
        """
        axes = max(positions.shape[1] for positions in self._positions)
        self._hidden[:] = [torch.cat(self._hidden)]
        self._positions[:] = [torch.cat([positions.expand(-1, axes) for positions in self._positions])]
        positions = self._positions[0][which]
        positions = positions[:, 0] if bool((positions == positions[:, :1]).all()) else positions
        return self._hidden[0][which], positions, self.joined(which), self._read_additions(which)

    def _read_additions(self, which: torch.Tensor) -> torch.Tensor | None:
        found: torch.Tensor | None = None
        for first, additions in self._additions.items():
            inside = (which >= first) & (which < first + len(additions))
            if bool(inside.any()):
                found = additions.new_zeros(len(which), *additions.shape[1:]) if found is None else found
                found[inside] = additions[which[inside] - first]
        return found


@dataclass(frozen=True)
class Journal:
    """The inputs of every row of a session. A journal is a value: a failed step leaves the journal before it intact.

    Attributes:
        entries: [batch, length], the pool index of each position; rows with the same beginning share entries.
        mask: [batch, length], 0 for padding; None if nothing is hidden.
    """

    pool: _Pool
    entries: torch.Tensor
    mask: torch.Tensor | None = None

    @classmethod
    def empty(cls, batch_size: int) -> Journal:
        return cls(_Pool(), torch.empty(batch_size, 0, dtype=torch.long))

    @property
    def batch_size(self) -> int:
        return self.entries.shape[0]

    @property
    def length(self) -> int:
        return self.entries.shape[1]

    @property
    def num_added(self) -> int:
        """Return the number of blocks to whose output something is added at some position; see ``BlockInput``."""
        return self.pool.num_added

    def copy(self) -> Journal:
        """Return the same rows in a pool of their own."""
        return replace(self, pool=self.pool.copy())

    def cropped(self, length: int) -> Journal:
        """Return the first ``length`` positions.

        Raises:
            RequestRejected: the last position attends to the next one, so that a replay would give other values.
        """
        if 0 < length < self.length and bool(self.pool.joined(self.entries[:, length - 1]).any()):
            raise RequestRejected(
                f"{self.length} positions cannot be cropped to {length}, within a picture whose positions attend to "
                "each other: crop to where the picture begins"
            )
        return replace(
            self, entries=self.entries[:, :length], mask=None if self.mask is None else self.mask[:, :length]
        )

    def reordered(self, indices: Sequence[int]) -> Journal:
        """Return the journal whose row i is the old row ``indices[i]``."""
        rows = torch.tensor(indices, dtype=torch.long)
        return replace(self, entries=self.entries[rows], mask=None if self.mask is None else self.mask[rows])

    def appended(self, inputs: BlockInput) -> Journal:
        """Return the journal with new positions; a mask that comes with them replaces the old mask."""
        batch_size, num_tokens, hidden_size = inputs.hidden.shape
        positions = inputs.position_ids
        if positions is None:
            positions = torch.arange(self.length, self.length + num_tokens)[None]
        first = self.pool.size
        axes = positions.shape[2:]
        positions = positions.expand(batch_size, num_tokens, *axes).reshape(-1, *axes)
        additions = None if inputs.additions is None else inputs.additions.flatten(0, 1)
        self.pool.add(inputs.hidden.reshape(-1, hidden_size), positions, joined_of(inputs).flatten(), additions)
        new = torch.arange(first, self.pool.size).view(batch_size, num_tokens)
        mask: torch.Tensor | None
        if inputs.attention_mask is not None:
            attend = inputs.attention_mask.detach().cpu() != 0
            mask = None if bool(attend.all()) else attend.to(torch.long)
        elif self.mask is not None:
            mask = torch.cat([self.mask, torch.ones(batch_size, num_tokens, dtype=torch.long)], 1)
        else:
            mask = None
        # If the step fails, its entries stay in the pool, unused.
        journal = Journal(self.pool, torch.cat([self.entries, new], 1), mask)
        return journal.compacted() if self.pool.num_chunks >= _MAX_CHUNKS else journal

    def read(self, start: int, end: int) -> BlockInput:
        """Return positions ``start`` … ``end`` of all rows, with the mask over everything up to ``end``."""
        entries = self.entries[:, start:end]
        hidden, positions, joined, additions = self.pool.read(entries.reshape(-1))
        return BlockInput(
            hidden.view(*entries.shape, hidden.shape[-1]),
            None if self.mask is None else self.mask[:, :end],
            positions.view(*entries.shape, *positions.shape[1:]),
            additions=None if additions is None else additions.view(*entries.shape, *additions.shape[1:]),
            joined=joined.view(entries.shape) if bool(joined.any()) else None,
        )

    def features(self, row: int, num_positions: int, num: int) -> torch.Tensor:
        """Return the first ``num`` numbers of the hidden states of a row's first positions, [positions, num]."""
        return self.pool.features(self.entries[row, :num_positions], num)

    def compacted(self) -> Journal:
        """Return the journal in a new pool, without the entries that no row uses any more."""
        used, entries = self.entries.unique(return_inverse=True)
        pool = _Pool()
        pool.add(*self.pool.read(used))
        return replace(self, pool=pool, entries=entries.view(self.entries.shape))
