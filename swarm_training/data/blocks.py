"""Blocks of tokens of one length: how texts are packed into blocks, and a table of blocks on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from math import inf
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from swarm_protocol.atomic_file import written_atomically
from swarm_protocol.errors import CheckpointError
from swarm_protocol.failures import call_after
from swarm_protocol.untrusted.json_file import read_object
from swarm_training.data.order import PartCursor
from swarm_training.data.token_cache import FACTS, remove_unused, table_in_use

Tokenize = Callable[[str], list[int]]
_TOKENS = "tokens.bin"
_DTYPE = np.dtype("<i4")


class TokenBlocks:
    """A table of blocks, ``[num_blocks, block_length]``, from which single rows are read."""

    def __init__(self, tokens: NDArray[np.int32], block_length: int) -> None:
        """Cut ``tokens``, [n], into blocks; tokens at the end that fill no block are left out."""
        if block_length < 2:
            raise ValueError(f"block_length is {block_length}: expected at least 2 tokens")
        num_blocks = len(tokens) // block_length
        if num_blocks == 0:
            raise ValueError(f"the data have {len(tokens)} tokens: expected at least a block of {block_length}")
        self.block_length = block_length
        self._table = tokens[: num_blocks * block_length].reshape(num_blocks, block_length)

    def __len__(self) -> int:
        return len(self._table)

    def rows(self, samples: NDArray[np.int64]) -> torch.Tensor:
        """Return the blocks of these samples, ``[len(samples), block_length]``, int64."""
        return torch.from_numpy(self._table[samples].astype(np.int64))

    @classmethod
    def pack(
        cls,
        texts: Iterable[str],
        tokenize: Tokenize,
        end: int | None,
        block_length: int,
        most_blocks: int | None = None,
    ) -> TokenBlocks:
        """Pack texts one after the other in memory, each followed by the token ``end`` if there is one. No more texts
        are read than ``most_blocks`` blocks need; None: all are."""
        parts, missing = [np.empty(0, _DTYPE)], inf if most_blocks is None else most_blocks * block_length
        for ids in _with_end(texts, tokenize, end):
            parts.append(np.asarray(ids, _DTYPE))
            missing -= len(ids)
            if missing <= 0:
                break
        tokens = np.concatenate(parts)
        return cls(tokens if most_blocks is None else tokens[: most_blocks * block_length], block_length)

    @classmethod
    def pack_to_disk(
        cls, directory: Path, texts: Iterable[str], tokenize: Tokenize, end: int | None, block_length: int
    ) -> TokenBlocks:
        """Pack texts as ``pack`` does, for data larger than memory. Tokens that are already on disk are only read.

        The table is locked as long as the object lives. Before a new one is made, those beside ``directory`` that were
        not used for long are removed.
        """
        with ExitStack() as held:
            held.enter_context(table_in_use(directory))
            if not (directory / FACTS).exists():
                remove_unused(directory.parent)
                _write_table(directory, _with_end(texts, tokenize, end))
            num_tokens = read_object(directory / FACTS).get("num_tokens")
            path = directory / _TOKENS
            if not path.is_file() or path.stat().st_size != (num_tokens or 0) * _DTYPE.itemsize:
                raise CheckpointError(f"{directory} is damaged: its {_TOKENS} is not as {FACTS} says; remove it")
            blocks = cls(np.memmap(path, _DTYPE, "r") if num_tokens else np.empty(0, _DTYPE), block_length)
            call_after(blocks, held.pop_all().close)
        return blocks


def _write_table(directory: Path, parts: Iterable[list[int]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with written_atomically(directory / _TOKENS) as partial, partial.open("wb") as file:
        for ids in parts:
            np.asarray(ids, _DTYPE).tofile(file)
    facts = json.dumps({"num_tokens": (directory / _TOKENS).stat().st_size // _DTYPE.itemsize})
    with written_atomically(directory / FACTS) as partial:
        partial.write_text(facts)  # written last: a directory with it is complete


def _with_end(texts: Iterable[str], tokenize: Tokenize, end: int | None) -> Iterator[list[int]]:
    for text in texts:
        yield tokenize(text) + ([] if end is None else [end])


class BlockBatches:
    """An endless, resumable series of batches of a peer's part of a table; its state is the cursor's state."""

    def __init__(self, blocks: TokenBlocks, cursor: PartCursor, batch_size: int) -> None:
        assert len(blocks) == cursor.order.num_samples
        self._blocks = blocks
        self._cursor = cursor
        self.batch_size = batch_size

    def next_batch(self) -> torch.Tensor:
        """Return the next batch, ``[batch_size, block_length]``, int64."""
        return self._blocks.rows(self._cursor.take(self.batch_size))

    def state_dict(self) -> dict[str, int]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._cursor.load_state_dict(state)
