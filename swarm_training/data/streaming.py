"""A stream of blocks through a shuffling buffer, which can resume exactly, even in the middle of the buffer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from swarm_training.data.blocks import Tokenize
from swarm_training.data.order import derived_seed
from swarm_training.data.permutation import Permutation
from swarm_training.data.sources import State, TextSource

_CHANGED = "the data are not those of the saved state: expected the same files, tokenizer and settings as before"


@dataclass(frozen=True)
class StreamSettings:
    """The settings by which texts become batches."""

    tokenize: Tokenize
    end: int | None  # the token that follows each text; None: no token
    block_length: int
    buffer_size: int  # the number of blocks that are read, and then returned in another order, at a time
    batch_size: int
    seed: str  # the seed of these orders


@dataclass
class _Document:
    before: State  # state of the source in which this text comes next
    ids: list[int]
    used: int  # ids that are already in blocks

    def take(self, most: int) -> list[int]:
        """Return the next ids, which are now in blocks."""
        taken = self.ids[self.used : self.used + most]
        self.used += len(taken)
        return taken


class StreamBatches:
    """An endless series of batches of texts. At the end of each epoch, tokens that fill no block are left out.

    The state contains no tokens. It says where the buffer's first token stands in the source, and how many blocks were
    taken from the buffer, which is read again on resuming.
    """

    def __init__(self, source: TextSource, settings: StreamSettings) -> None:
        self._source = source
        self._settings = settings
        self._texts = source.texts()
        self._documents: deque[_Document] = deque()  # texts with tokens that are in no block yet
        self._buffer: list[list[int]] = []  # in the order of the source
        self._order: list[int] = []
        self._number = -1  # number of the buffer
        self._taken = 0
        self._start: tuple[State, int] = source.state_dict(), 0  # the buffer's first text, and tokens used of it
        self._used_before = 0  # tokens used of the text that is read next

    def next_batch(self) -> torch.Tensor:
        """Return the next batch, ``[batch_size, block_length]``, int64. Raise ValueError if an epoch has no block."""
        return torch.tensor([self._next_block() for _ in range(self._settings.batch_size)])

    def _next_block(self) -> list[int]:
        if self._taken == len(self._buffer):
            self._fill()
        self._taken += 1
        return self._buffer[self._order[self._taken - 1]]

    def _fill(self) -> None:
        if not (self._read_buffer() or self._begin_epoch()):
            length = self._settings.block_length
            raise ValueError(f"the data of this peer have fewer tokens than a block has: expected at least {length}")
        self._number += 1
        self._taken = 0
        key = derived_seed(self._settings.seed, "buffer", self._number).encode()
        self._order = Permutation(len(self._buffer), key).at(np.arange(len(self._buffer))).tolist()

    def _begin_epoch(self) -> bool:
        """Begin the next epoch, and return whether it has a block."""
        self._documents.clear()
        self._source.next_epoch()
        self._texts = self._source.texts()
        return self._read_buffer()

    def _read_buffer(self) -> bool:
        first = self._documents[0] if self._documents else None
        self._start = (first.before, first.used) if first else (self._source.state_dict(), self._used_before)
        wanted = self._settings.buffer_size * self._settings.block_length
        waiting = sum(len(document.ids) - document.used for document in self._documents)
        while waiting < wanted:
            before = self._source.state_dict()
            text = next(self._texts, None)
            if text is None:
                break
            ids = self._settings.tokenize(text) + ([] if self._settings.end is None else [self._settings.end])
            if self._used_before > len(ids):
                raise ValueError(_CHANGED)
            self._documents.append(_Document(before, ids, self._used_before))
            waiting += len(ids) - self._used_before
            self._used_before = 0
        self._buffer = [self._cut_block() for _ in range(min(waiting, wanted) // self._settings.block_length)]
        return bool(self._buffer)

    def _cut_block(self) -> list[int]:
        block: list[int] = []
        while lacking := self._settings.block_length - len(block):
            document = self._documents[0]
            block += document.take(lacking)
            if document.used == len(document.ids):
                self._documents.popleft()
        return block

    def state_dict(self) -> State:
        source, used = self._start
        return {"source": source, "used": used, "buffer": self._number, "taken": self._taken}

    def load_state_dict(self, state: State) -> None:
        """Load a state, and read its buffer again, if it had one.

        Raise ValueError if the data have changed; the present state stays then.
        """
        before = self.state_dict()
        try:
            self._load(state)
        except (ValueError, KeyError):  # perhaps in the middle of a file that comes at another place in this order
            self._load(before)
            raise

    def _load(self, state: State) -> None:
        self._source.load_state_dict(state["source"])
        self._texts = self._source.texts()
        self._documents.clear()
        self._start, self._used_before = (state["source"], state["used"]), state["used"]
        self._buffer, self._number = [], state["buffer"] - 1  # ``_fill`` counts up
        if state["buffer"] >= 0:
            self._fill()
        if state["taken"] > len(self._buffer):
            raise ValueError(_CHANGED)
        self._number, self._taken = state["buffer"], state["taken"]
