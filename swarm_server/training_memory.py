"""What a server remembers so that training computes less: activations of forward passes, transposed weights."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from swarm_protocol.errors import Forgotten, PeerBusy
from swarm_protocol.int8_linear import Int8Weight
from swarm_server.kv_cache import CacheBudget, Charge
from swarm_server.recording import Recorded

KEPT_S = 60.0  # after which a forward pass without a backward is dropped
UNUSED_S = 600.0  # after which weights for backward passes are dropped, if there is none
_SHARE = 0.5  # of the cache's room that training may get
_TRANSPOSED_SHARE = 0.75  # of that


@dataclass(eq=False)
class KeptPass:
    """One request's forward, in pieces of its rows."""

    pieces: Sequence[Recorded]
    charge: Charge | None = None
    dropping: asyncio.TimerHandle | None = None

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the hidden states, [batch, tokens, hidden_size]."""
        return sum(self.num_rows), *self.pieces[0].output.shape[1:]

    @property
    def num_rows(self) -> list[int]:
        """Of each piece."""
        return [len(piece.output) for piece in self.pieces]

    def free(self) -> None:
        self.charge.release()
        for piece in self.pieces:
            piece.free()


@dataclass(eq=False)
class _Transposed:
    weights: Sequence[Int8Weight]
    size_bytes: int


class TrainingMemory:
    """Room that sessions leave in the KV cache, at most a part of it, and theirs again when they need it.

    Used on one event loop; ``reclaim`` from any thread.
    """

    def __init__(
        self,
        budget: CacheBudget,
        weights: Sequence[Int8Weight] = (),
        kept_s: float = KEPT_S,
        unused_s: float = UNUSED_S,
    ) -> None:
        """``weights``: of the hosted blocks."""
        self._budget = budget
        self._max_bytes = int(budget.capacity_bytes * _SHARE)
        self._weights = weights
        self._kept_s = kept_s
        self._unused_s = unused_s
        self._passes: OrderedDict[bytes, KeptPass] = OrderedDict()
        self._transposed: _Transposed | None = None
        self._resting: asyncio.TimerHandle | None = None  # until the transposed weights are dropped
        self._taking = False

    def __len__(self) -> int:
        return len(self._passes)

    @property
    def bytes_left(self) -> int:
        """What one more pass may take, if sessions leave so much."""
        transposed = self._transposed
        used = sum(kept.size_bytes for kept in list(self._passes.values()))
        return max(0, self._max_bytes - used - (0 if transposed is None else transposed.size_bytes))

    def keep(self, key: bytes, pieces: Sequence[Recorded]) -> bool:
        """Keeps a pass; whether there was room for it."""
        kept = KeptPass(pieces)
        kept.charge = self._take(kept)
        if kept.charge is None:
            return False
        self._drop(key)
        kept.dropping = asyncio.get_running_loop().call_later(self._kept_s, self._drop, key)
        self._passes[key] = kept
        return True

    @contextmanager
    def taken(self, key: bytes) -> Iterator[KeptPass]:
        """A pass, which is freed afterwards.

        Raises:
            Forgotten: there is none under this key.
        """
        kept = self._passes.pop(key, None)
        if kept is None:
            raise Forgotten("this server does not have the pass (any more)")
        kept.dropping.cancel()
        try:
            yield kept
        finally:
            kept.free()

    def transpose(self) -> None:
        """Before a backward pass: weights are transposed in it, as far as there is room for them."""
        if self._transposed is None:
            transposed = self._fitting()
            if not transposed.weights or self._take(transposed) is None:
                return
            self._transposed = transposed
            for weight in transposed.weights:
                weight.keep_transpose(True)
        if self._resting is not None:
            self._resting.cancel()
        self._resting = asyncio.get_running_loop().call_later(self._unused_s, self._drop_transposed)

    def reclaim(self) -> bool:
        """Gives up a little, the oldest; False if there is nothing, and for what training itself takes."""
        if self._taking:
            return False
        try:
            _, kept = self._passes.popitem(last=False)
        except KeyError:
            return self._drop_transposed()
        kept.free()
        return True

    def close(self) -> None:
        """Drops everything."""
        for key in list(self._passes):
            self._drop(key)
        self._drop_transposed()
        if self._resting is not None:
            self._resting.cancel()

    def _fitting(self) -> _Transposed:
        weights, size_bytes, max_bytes = [], 0, min(self.bytes_left, self._max_bytes * _TRANSPOSED_SHARE)
        for weight in self._weights:
            if weight.transpose_bytes and size_bytes + weight.transpose_bytes <= max_bytes:
                weights.append(weight)
                size_bytes += weight.transpose_bytes
        return _Transposed(weights, size_bytes)

    def _take(self, owner: KeptPass | _Transposed) -> Charge | None:
        """Takes room for as long as ``owner`` lives; None if there is not so much."""
        if owner.size_bytes > self.bytes_left:
            return None
        self._taking = True
        try:
            return self._budget.keep(owner.size_bytes, owner)
        except PeerBusy:
            return None
        finally:
            self._taking = False

    def _drop(self, key: bytes) -> None:
        kept = self._passes.pop(key, None)
        if kept is not None:
            kept.dropping.cancel()
            kept.free()

    def _drop_transposed(self) -> bool:
        """Whether there was anything to drop."""
        transposed, self._transposed = self._transposed, None
        if transposed is None:
            return False
        for weight in transposed.weights:
            weight.keep_transpose(False)
        return True
