"""Sums of an adapter's gradients over the backward passes of one client, which takes a sum when it is complete.

Sums are kept with the client's adapters, and dropped like adapters. Then the client has the passes computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarm_protocol.errors import CacheMiss, PeerBusy, RequestRejected
from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import MAX_SUMMANDS
from swarm_server.adapters.shared_store import SharedStore
from swarm_server.net.validation import require_key

_SHARE = 4  # a sum may have one part in this many of a client's share: old and new adapters need room too


@dataclass(eq=False)
class _Sum:
    """A sum of gradients, which are added in the order of their numbers, so that the sum is the same every time.

    Attributes:
        num_added: how many passes, of the numbers 0, 1, 2, …, are in ``total``.
        ahead: the gradients of passes after a pass that has not come yet, by number.
    """

    blocks: Span
    total: list[torch.Tensor] = field(default_factory=list)
    num_added: int = 0
    ahead: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    @property
    def numbers(self) -> list[int]:
        return [*range(self.num_added), *sorted(self.ahead)]

    @property
    def num_held(self) -> int:
        """Return the number of lists of gradients in memory."""
        return bool(self.total) + len(self.ahead)

    def add(self, number: int, grads: list[torch.Tensor]) -> None:
        self.ahead[number] = grads
        while self.num_added in self.ahead:
            self._add_to_total(self.ahead.pop(self.num_added))
            self.num_added += 1

    def finish(self) -> list[torch.Tensor]:
        """Return the sum of all gradients that have come, even if some are missing."""
        for number in sorted(self.ahead):
            self._add_to_total(self.ahead.pop(number))
        return self.total

    def _add_to_total(self, grads: list[torch.Tensor]) -> None:
        self.total = [sum_ + grad for sum_, grad in zip(self.total, grads, strict=True)] if self.total else grads


class GradientSums:
    """The gradient sums of all clients, used on one event loop."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store

    def add(self, summand: pb.Summand, blocks: Span, grads: list[torch.Tensor], client: Caller) -> bool:
        """Add gradients, which the sum then owns, unless it has this number; return False if there is no room.

        Raises:
            RequestRejected: the sum is over other blocks, or of other tensors.
        """
        key, size_bytes = _key(summand.key, client), sum(grad.nbytes for grad in grads)
        if size_bytes > self._store.share_bytes // _SHARE:
            return False
        # Room is taken for one more list of gradients. Once the sum is in the store, its entry counts what it holds.
        try:
            self._store.take(size_bytes, client)
        except PeerBusy:
            return False
        sum_ = self._find(key)
        if sum_ is None:
            sum_ = _Sum(blocks)
            self._store.put(key, sum_, 0, client)
        held = sum_.num_held
        try:
            _require_like(sum_, blocks, grads)
            if summand.number not in sum_.numbers:
                sum_.add(summand.number, grads)
        finally:
            self._store.resize(key, size_bytes * (sum_.num_held - held))
            self._store.give_back(size_bytes, client)
        return True

    def take(self, message: pb.TakeSum, blocks: Span, client: Caller) -> list[torch.Tensor]:
        """Return the sum and drop it from the store.

        Raises:
            CacheMiss: the sum was dropped before, or other passes were added.
            RequestRejected: the sum is over other blocks, or too many passes are named.
        """
        if len(message.numbers) > MAX_SUMMANDS:
            raise RequestRejected(f"a sum of {len(message.numbers)} passes: expected at most {MAX_SUMMANDS}")
        key = _key(message.key, client)
        sum_ = self._find(key)
        if sum_ is None:
            raise CacheMiss("this server does not have the sum (any more)")
        _require_like(sum_, blocks)
        self._store.drop(key)
        if sum_.numbers != list(message.numbers):
            raise CacheMiss("this server has added other passes to the sum")
        return sum_.finish()

    def _find(self, key: bytes) -> _Sum | None:
        entry = self._store.find(key)
        if entry is None:
            return None
        assert isinstance(entry.value, _Sum)
        return entry.value


def require_summand(summand: pb.Summand) -> None:
    """Raise RequestRejected if ``summand`` is not valid."""
    require_key(summand.key, "the key of a sum")
    if summand.number >= MAX_SUMMANDS:
        raise RequestRejected(f"pass {summand.number} of a sum: expected a number below {MAX_SUMMANDS}")


def _key(key: bytes, client: Caller) -> bytes:
    """Return the sum's key in the store, which no adapter has."""
    return b"sum %s %s" % (client.peer_id.encode(), key)


def _require_like(sum_: _Sum, blocks: Span, grads: Sequence[torch.Tensor] | None = None) -> None:
    if sum_.blocks != blocks:
        raise RequestRejected(f"the sum is one over blocks {sum_.blocks}, not {blocks}")
    known = sum_.total or next(iter(sum_.ahead.values()), [])
    if known and grads is not None and [t.shape for t in known] != [t.shape for t in grads]:
        raise RequestRejected("the sum is one of other tensors: expected those of one adapter")
