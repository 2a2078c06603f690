"""Memory with which training computes less: activations of forward passes, and transposed weights."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from swarm_models.kernels.int8_linear import Int8Weight
from swarm_protocol.errors import CacheMiss, PeerBusy, RequestRejected
from swarm_protocol.span import Span
from swarm_server.blocks.recording import Recorded
from swarm_server.kv.kv_cache import CacheBudget, Charge

KEPT_S = 120.0  # after this time, a forward pass without a backward pass is dropped
UNUSED_S = 600.0  # after this time without a backward pass, transposed weights are dropped
_SHARE = 0.5  # share of the cache's room that training may get
_TRANSPOSED_SHARE = 0.75  # share of training's room that transposed weights may get
AT_ONCE_BYTES = 64 << 20  # of weights that one backward pass transposes; decoding waits meanwhile


@dataclass(frozen=True)
class KeptSizes:
    """The sizes of a kept pass, which remain known when the pass is gone.

    Attributes:
        shape: the shape of the hidden states, [batch, tokens, hidden_size].
        num_rows: the number of rows of each piece.
    """

    shape: tuple[int, ...]
    num_rows: list[int]


@dataclass(eq=False)
class RecordedPass:
    """One request's forward pass through ``blocks``, in pieces of its rows.

    Attributes:
        counted: addresses of memory that is counted already.
        refused: whether there was no room for a piece, so that no piece is kept.
        since_s: the time at which the pass was complete.
    """

    blocks: Span
    pieces: list[Recorded] = field(default_factory=list)
    charges: list[Charge] = field(default_factory=list)
    counted: set[int] = field(default_factory=set)
    refused: bool = False
    since_s: float = 0.0

    def complete(self) -> None:
        self.since_s = time.monotonic()

    def refuse(self) -> None:
        self.refused = True

    def free(self) -> int:
        """Release the memory of all pieces, even if something still holds the pass; return how many bytes these are."""
        for charge, piece in zip(self.charges, self.pieces, strict=True):
            charge.release()
            piece.free()
        size_bytes = sum(piece.size_bytes for piece in self.pieces)
        self.charges, self.pieces = [], []
        return size_bytes


class _Transposed:
    """A transposed copy of a weight, whose memory counts against the cache."""

    def __init__(self, weight: Int8Weight, budget: CacheBudget, evict: Callable[[], bool]) -> None:
        """Keep a copy. Raise PeerBusy if there is no room."""
        self._weight = weight
        self._charge = budget.keep(weight.transpose_bytes, self, evict)
        weight.keep_transpose(True)

    def drop(self) -> None:
        self._weight.keep_transpose(False)
        self._charge.release()


class TrainingMemory:
    """The room that sessions leave in the KV cache, up to a share of it. Sessions get it back when they need it.

    Any thread may call the methods, except for methods that must be called on the event loop.
    """

    def __init__(
        self,
        budget: CacheBudget,
        weights: Sequence[Int8Weight] = (),
        evict: Callable[[], bool] = lambda: False,
        kept_s: float = KEPT_S,
        unused_s: float = UNUSED_S,
        at_once_bytes: int = AT_ONCE_BYTES,
    ) -> None:
        """Divide the room between transposed weights and passes.

        Args:
            evict: gives up a little of what other parts keep in the cache; returns False if nothing is kept.
        """
        self._budget = budget
        self._evict = evict
        self._kept_s = kept_s
        self._unused_s = unused_s
        self._at_once_bytes = at_once_bytes
        max_bytes = int(budget.capacity_bytes * _SHARE)
        self._weights = _fitting(weights, max_bytes * _TRANSPOSED_SHARE)
        self._max_bytes = max_bytes - sum(weight.transpose_bytes for weight in self._weights)  # for passes
        self._used_bytes = 0  # by passes, including passes that are incomplete or in use
        self._passes: OrderedDict[bytes, RecordedPass] = OrderedDict()
        self._transposed: list[_Transposed] = []  # the first ones of ``_weights``
        self._sweeping: asyncio.TimerHandle | None = None
        self._resting: asyncio.TimerHandle | None = None  # until the transposed weights are dropped
        self._closed = False

    def __len__(self) -> int:
        return len(self._passes)

    # ------------------------------------------------------------ passes

    @contextmanager
    def keeping(self, blocks: Span) -> Iterator[RecordedPass]:
        """Yield a pass to which pieces are added, and which is dropped afterwards unless it was kept.

        If the client has gone, the compute thread may still add a piece afterwards. That piece is refused.
        """
        kept = RecordedPass(blocks)
        try:
            yield kept
        finally:
            with self._budget.lock:
                if kept not in self._passes.values():
                    self._refuse(kept)

    def room(self, kept: RecordedPass) -> int:
        """Return the bytes that the next piece of the pass may take."""
        with self._budget.lock:
            if kept.refused or self._closed:
                return 0
            return max(0, min(self._max_bytes, self._budget.bytes_left) - self._used_bytes)

    def add(self, kept: RecordedPass, piece: Recorded | None) -> None:
        """Add a piece if there is room; refuse the pass otherwise. None: there was too little room to record it."""
        with self._budget.lock:
            if piece is None or piece.size_bytes > self.room(kept):
                return self._refuse(kept)
            try:
                charge = self._budget.keep(piece.size_bytes, piece, self._evict)
            except PeerBusy:
                return self._refuse(kept)
            self._used_bytes += piece.size_bytes
            kept.pieces.append(piece)
            kept.charges.append(charge)

    def keep(self, key: bytes, kept: RecordedPass) -> bool:
        """Keep a complete pass; return False if it was refused. Only call this on the event loop."""
        with self._budget.lock:
            if kept.refused or self._closed:
                return False
            self._drop(key)
            kept.complete()
            self._passes[key] = kept
            if self._sweeping is None:
                self._sweeping = asyncio.get_running_loop().call_later(self._kept_s, self._sweep)
            return True

    def look(self, key: bytes, blocks: Span) -> KeptSizes:
        """Return the sizes of a pass, which stays here. It may vanish at any time: compute threads reclaim room.

        Raises:
            CacheMiss: there is no pass under this key.
            RequestRejected: the pass went through other blocks.
        """
        with self._budget.lock:
            kept = self._passes.get(key)
            if kept is None:
                raise CacheMiss("this server does not have the pass (any more)")
            if kept.blocks != blocks:
                raise RequestRejected(f"the pass that was kept went through blocks {kept.blocks}, not {blocks}")
            outputs = [piece.output for piece in kept.pieces if piece.output is not None]
            num_rows = [len(output) for output in outputs]
            return KeptSizes((sum(num_rows), *outputs[0].shape[1:]), num_rows)

    @contextmanager
    def taking(self, key: bytes) -> Iterator[Callable[[], RecordedPass]]:
        """Yield a function that takes the pass when its turn has come; the pass is freed at the end of the context.

        The function raises CacheMiss if the pass is gone by then, or if the context has ended.
        """
        taken: list[RecordedPass] = []
        is_over = False

        def take() -> RecordedPass:
            with self._budget.lock:
                if not taken:
                    if key not in self._passes or is_over:
                        raise CacheMiss("this server does not have the pass (any more)")
                    taken.append(self._passes.pop(key))
            return taken[0]

        try:
            yield take
        finally:
            with self._budget.lock:
                is_over = True
                for kept in taken:
                    self._free(kept)

    def _refuse(self, kept: RecordedPass) -> None:
        kept.refuse()
        self._free(kept)

    def _drop(self, key: bytes) -> None:
        if key in self._passes:
            self._free(self._passes.pop(key))

    def _free(self, kept: RecordedPass) -> None:
        """Release the memory of a pass. The caller holds the lock."""
        self._used_bytes -= kept.free()

    def _sweep(self) -> None:
        self._sweeping = None
        with self._budget.lock:
            now_s = time.monotonic()
            while self._passes:
                key, kept = next(iter(self._passes.items()))
                left_s = kept.since_s + self._kept_s - now_s
                if left_s > 0:
                    self._sweeping = asyncio.get_running_loop().call_later(left_s, self._sweep)
                    return
                self._drop(key)

    # ------------------------------------------------------------ weights

    def transpose(self) -> None:
        """Let the next backward pass transpose some more weights, if there is room. Call this on the event loop."""
        with self._budget.lock:
            if self._closed:
                return
            size_bytes = 0
            for weight in self._weights[len(self._transposed) :]:
                try:
                    self._transposed.append(_Transposed(weight, self._budget, self._evict))
                except PeerBusy:
                    break
                size_bytes += weight.transpose_bytes
                if size_bytes >= self._at_once_bytes:
                    break
        if self._resting is not None:
            self._resting.cancel()
        self._resting = asyncio.get_running_loop().call_later(self._unused_s, self._drop_transposed)

    def _drop_transposed(self) -> bool:
        """Drop all transposed weights; return whether there were any."""
        with self._budget.lock:
            dropped, self._transposed = self._transposed, []
            for transposed in dropped:
                transposed.drop()
            return bool(dropped)

    # ------------------------------------------------------------ room

    def reclaim(self) -> bool:
        """Give up a little memory, the oldest pass first; return False if nothing is left."""
        with self._budget.lock:
            if self._passes:
                self._drop(next(iter(self._passes)))
                return True
            return self._drop_transposed()

    def close(self) -> None:
        """Drop everything, and keep nothing from now on. Only call this on the event loop."""
        with self._budget.lock:
            self._closed = True
            for key in list(self._passes):
                self._drop(key)
            self._drop_transposed()
            self._weights = []
        for timer in (self._sweeping, self._resting):
            if timer is not None:
                timer.cancel()


def _fitting(weights: Sequence[Int8Weight], max_bytes: float) -> list[Int8Weight]:
    """Return the weights whose transposes fit together into ``max_bytes``."""
    fitting, size_bytes = [], 0
    for weight in weights:
        if weight.transpose_bytes and size_bytes + weight.transpose_bytes <= max_bytes:
            fitting.append(weight)
            size_bytes += weight.transpose_bytes
    return fitting
