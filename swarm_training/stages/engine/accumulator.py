"""The sums of micro-batches' gradients, which are pending until a commit adds them; each micro-batch counts once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swarm_protocol.errors import PeerBusy, PeerMoved, RequestRejected
from swarm_protocol.failures import undone_on_error

if TYPE_CHECKING:
    from swarm_training.stages.engine.stage import Stage

GRID = 2.0**-40  # the unit of float64 sums
Key = tuple[int, str]  # micro-batch, trainer


class Accumulator:
    """The gradient sums of one peer of a stage, for one step after another. Several threads may call its methods.

    A step has micro-batches 0 … M−1. ``add`` keeps the gradients from a trainer's backward as pending. They count for
    nothing until that trainer calls ``commit``, which adds them to the sums and sets the micro-batch's bit. A trainer
    without an answer asks another peer and never commits here, so that no micro-batch counts twice.

    Sums in float64 are exact: each gradient is first rounded to a multiple of 2^−40, and sums of such numbers have no
    rounding error below 2^13. They do not depend on the order of commits, nor on how micro-batches are divided among
    peers whose sums are added. One process that rounds the same (``rounded``) has the same bits. Sums in float32 depend
    on both in their last bits.
    """

    def __init__(self, stage: Stage, num_micro_batches: int, dtype: torch.dtype, max_pending_bytes: int) -> None:
        """Start with empty sums, at step 0. ``dtype``: that of the sums, float32 or float64."""
        self.step = 0
        self.num_micro_batches = num_micro_batches
        self._shapes = [each.shape for each in stage.parameters]
        self._sums = torch.zeros(sum(map(torch.Size.numel, self._shapes)), dtype=dtype)
        self._done: set[int] = set()
        self._num_summed = 0
        self._pending: dict[Key, list[Tensor]] = {}  # never has a micro-batch that is done
        self._pending_bytes = 0
        self._max_pending_bytes = max_pending_bytes
        self._lock = threading.Lock()

    @property
    def sums(self) -> Tensor:
        """Return a copy of the sums, [elements of all parameters], in the order of the stage's parameters."""
        with self._lock:
            return self._sums.clone()

    @property
    def num_summed(self) -> int:
        """Return the number of micro-batches in the sums: those that are done, without those that were taken."""
        return self._num_summed  # without the lock, for which an event loop may not wait

    def take(self) -> tuple[Tensor, int]:
        """Return the sums, [elements of all parameters], and the number of micro-batches in them, and begin new sums.
        These micro-batches stay done: their gradients do not come again in this step."""
        empty = torch.zeros_like(self._sums)  # before the lock is held: others wait for it
        with self._lock:
            taken = self._sums, self._num_summed
            self._sums, self._num_summed = empty, 0
            return taken

    def add(self, step: int, m: int, trainer: str, gradients: Sequence[Tensor]) -> None:
        """Keep a micro-batch's gradients, one in the shape of each parameter, in place of this trainer's earlier ones.

        Raises:
            PeerMoved: the peer is at another step.
            PeerBusy: there is no room for more at present; another peer may have some.
            RequestRejected: there is no such micro-batch.
        """
        assert [each.shape for each in gradients] == self._shapes, "gradients of other parameters"
        size = _size_bytes(gradients)
        with self._lock:
            self._check(step, m)
            if m in self._done:
                return
            self._drop(lambda key: key == (m, trainer))
            self._require_room(size)
            self._pending[m, trainer] = [each.detach() for each in gradients]
            self._pending_bytes += size

    def require_room(self, m: int, trainer: str) -> None:
        """Check for room before a micro-batch's gradients are computed. Raises PeerBusy, as ``add`` would."""
        with self._lock:
            if m not in self._done and (m, trainer) not in self._pending:
                self._require_room(next((_size_bytes(each) for each in self._pending.values()), 0))

    def commit(self, step: int, m: int, trainer: str) -> bool:
        """Add the trainer's pending gradients to the sums, unless the micro-batch is in them already.

        Return whether it is in the sums now. If not, nothing of it is pending: the backward must be computed again.

        Raises:
            PeerMoved, RequestRejected: as ``add``.
        """
        with self._lock:
            self._check(step, m)
            gradients = self._pending.get((m, trainer))
            if gradients is not None:
                self._add(gradients)
                self._done.add(m)
                self._num_summed += 1
            if m in self._done:
                self._drop(lambda key: key[0] == m)
            return m in self._done

    def _add(self, gradients: Sequence[Tensor]) -> None:
        num_added = 0

        def subtract() -> None:
            for part, flat in self._parts(gradients[:num_added]):
                part -= flat

        with undone_on_error(subtract):  # such as too little memory: some peer will compute the micro-batch again
            for part, flat in self._parts(gradients):
                part += flat
                num_added += 1

    def _parts(self, gradients: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a view of the sums for each gradient, with the summand. Summands are made one by one, as all of them
        together would take as much memory as the sums."""
        at = 0
        for gradient in gradients:
            flat = gradient.reshape(-1).to("cpu", self._sums.dtype)
            yield self._sums[at : at + flat.numel()], rounded(flat) if flat.dtype == torch.float64 else flat
            at += flat.numel()

    def pending(self, m: int, trainer: str) -> list[Tensor] | None:
        """Return this trainer's pending gradients, one in the shape of each parameter; None if there are none."""
        with self._lock:
            return self._pending.get((m, trainer))

    def withdraw(self, m: int, trainer: str) -> None:
        """Drop a micro-batch's pending gradients that this trainer will not commit."""
        with self._lock:
            self._drop(lambda key: key == (m, trainer))

    @property
    def waiting(self) -> frozenset[int]:
        """Return the micro-batches with pending gradients."""
        with self._lock:
            return frozenset(m for m, _ in self._pending)

    def drop(self, m: int) -> None:
        """Drop a micro-batch's pending gradients, whichever trainer they belong to."""
        with self._lock:
            self._drop(lambda key: key[0] == m)

    def forget(self, trainer: str) -> None:
        """Drop the pending gradients of a trainer that is gone."""
        with self._lock:
            self._drop(lambda key: key[1] == trainer)

    def discard(self) -> None:
        """Empty the sums and bits, in the same step; pending gradients may still be committed."""
        with self._lock:
            self._empty()

    def clear(self, next_step: int) -> None:
        """Empty everything, for another step."""
        with self._lock:
            self._empty()
            self._pending.clear()
            self._pending_bytes = 0
            self.step = next_step

    def _empty(self) -> None:
        self._sums.zero_()
        self._num_summed = 0
        self._done.clear()

    def _check(self, step: int, m: int) -> None:
        if step != self.step:
            raise PeerMoved(f"micro-batch {m} is of step {step}: this peer is at step {self.step}")
        if not 0 <= m < self.num_micro_batches:
            raise RequestRejected(f"there is no micro-batch {m}: expected 0 to {self.num_micro_batches - 1}")

    def _require_room(self, size: int) -> None:
        if self._pending_bytes + size > self._max_pending_bytes:
            raise PeerBusy(
                f"{len(self._pending)} micro-batches of step {self.step} wait here for their commit, and there is no "
                f"room for {size} bytes more: commit them, or ask another peer"
            )

    def _drop(self, is_moot: Callable[[Key], bool]) -> None:
        for key in list(filter(is_moot, self._pending)):
            self._pending_bytes -= _size_bytes(self._pending.pop(key))


def rounded(gradient: Tensor) -> Tensor:
    """Return the gradient in its shape, rounded to multiples of 2^−40 in float64, with ties to even."""
    return (gradient.double() / GRID).round_().mul_(GRID)


def _size_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)
