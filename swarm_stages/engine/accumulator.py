"""Gradients of micro-batches: pending until they are committed, then added up, each micro-batch once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from swarm_protocol.errors import PeerBusy, PeerMoved, RequestRejected

MAX_MICRO_BATCHES = 4096
GRID = 2.0**-40  # of float64 sums
Key = tuple[int, str]  # micro-batch, trainer


class Trained(Protocol):
    """What the gradients are of; a ``Stage``."""

    parameters: list[nn.Parameter]


class Accumulator:
    """Of one peer of a stage, for one step after the other. Its methods may be called from several threads.

    A step has micro-batches 0 … M−1. ``add`` keeps what a trainer's backward has given as pending: it counts for
    nothing until that trainer commits it, when it is added to the sums and the micro-batch's bit is set. A trainer
    without an answer asks another peer and never commits here, so that no micro-batch counts twice.

    Sums in float64 are exact: each gradient is first rounded to a multiple of 2^−40, and sums of such numbers have no
    rounding error below 2^13. They do not depend on the order of commits, nor on how micro-batches are divided among
    peers whose sums are added; one process that rounds the same (``rounded``) has the same bits. Sums in float32 depend
    on both in their last bits.

    Attributes:
        step: the global step of these gradients.
        num_micro_batches: M.
    """

    def __init__(
        self, stage: Trained, num_micro_batches: int, dtype: torch.dtype, max_pending_bytes: int, step: int = 0
    ) -> None:
        """Raises ValueError if M, the dtype or the limit is out of range."""
        if not 1 <= num_micro_batches <= MAX_MICRO_BATCHES:
            raise ValueError(f"num_micro_batches is {num_micro_batches}: expected 1 to {MAX_MICRO_BATCHES}")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"sums cannot be {dtype}: expected torch.float32 or torch.float64")
        if max_pending_bytes <= 0:
            raise ValueError(f"max_pending_bytes is {max_pending_bytes}: expected a number above 0")
        self.step = step
        self.num_micro_batches = num_micro_batches
        self._shapes = [each.shape for each in stage.parameters]
        self._sums = torch.zeros(sum(map(torch.Size.numel, self._shapes)), dtype=dtype)
        self._done: set[int] = set()
        self._pending: dict[Key, list[Tensor]] = {}  # never of a micro-batch that is done
        self._pending_bytes = 0
        self._max_pending_bytes = max_pending_bytes
        self._lock = threading.Lock()

    @property
    def done(self) -> frozenset[int]:
        """The micro-batches in the sums."""
        with self._lock:
            return frozenset(self._done)

    @property
    def bits(self) -> bytes:
        """The same as a bitmap: bit m % 8, from the lowest, of byte m // 8; [⌈M / 8⌉]."""
        number = sum(1 << m for m in self.done)
        return number.to_bytes((self.num_micro_batches + 7) // 8, "little")

    @property
    def sums(self) -> Tensor:
        """A copy of the sums, in the order of the stage's parameters: [elements of all]."""
        with self._lock:
            return self._sums.clone()

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    def add(self, step: int, m: int, trainer: str, gradients: Sequence[Tensor]) -> None:
        """Keeps a micro-batch's gradients, one for each parameter, in place of what this trainer gave of it before.

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
            self._drop((m, trainer))
            self._require_room(size)
            self._pending[m, trainer] = [each.detach() for each in gradients]
            self._pending_bytes += size

    def require_room(self, m: int, trainer: str) -> None:
        """Raises PeerBusy, as ``add`` would, before a micro-batch's gradients are computed."""
        with self._lock:
            if m not in self._done and (m, trainer) not in self._pending:
                self._require_room(next((_size_bytes(each) for each in self._pending.values()), 0))

    def commit(self, step: int, m: int, trainer: str) -> bool:
        """Adds to the sums what the trainer's backward has given; nothing if the micro-batch is in them already.

        Returns whether it is in them now. If not, nothing of it is pending: the backward must be computed again.

        Raises:
            PeerMoved, RequestRejected: as ``add``.
        """
        with self._lock:
            self._check(step, m)
            gradients = self._pending.get((m, trainer))
            if gradients is not None:
                num_added = 0
                try:
                    for part, flat in self._parts(gradients):
                        part += flat
                        num_added += 1
                except BaseException:  # such as too little memory: it will be computed again, here or elsewhere
                    for part, flat in self._parts(gradients[:num_added]):
                        part -= flat
                    raise
                self._done.add(m)
            if m in self._done:
                for key in [key for key in self._pending if key[0] == m]:
                    self._drop(key)
            return m in self._done

    def _parts(self, gradients: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the sums, each with what is to be added to it: one by one, since together they are as large."""
        at = 0
        for gradient in gradients:
            flat = gradient.reshape(-1).to("cpu", self._sums.dtype)
            yield self._sums[at : at + flat.numel()], rounded(flat) if flat.dtype == torch.float64 else flat
            at += flat.numel()

    def pending(self, m: int, trainer: str) -> list[Tensor] | None:
        """What this trainer's backward has given, one for each parameter; None if nothing of it waits."""
        with self._lock:
            return self._pending.get((m, trainer))

    def withdraw(self, m: int, trainer: str) -> None:
        """This trainer will not commit it."""
        with self._lock:
            self._drop((m, trainer))

    @property
    def waiting(self) -> frozenset[int]:
        """The micro-batches of which something is pending."""
        with self._lock:
            return frozenset(m for m, _ in self._pending)

    def drop(self, m: int) -> None:
        """What is pending of a micro-batch, whoever's it is."""
        with self._lock:
            for key in [key for key in self._pending if key[0] == m]:
                self._drop(key)

    def forget(self, trainer: str) -> None:
        """Drops what is pending of a trainer that is gone."""
        with self._lock:
            for key in [key for key in self._pending if key[1] == trainer]:
                self._drop(key)

    def discard(self) -> None:
        """Sums and bits are empty again, in the same step; what is pending may still be committed."""
        with self._lock:
            self._sums.zero_()
            self._done.clear()

    def clear(self, next_step: int) -> None:
        """All is empty, for another step."""
        with self._lock:
            self._sums.zero_()
            self._done.clear()
            self._pending.clear()
            self._pending_bytes = 0
            self.step = next_step

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

    def _drop(self, key: Key) -> None:
        self._pending_bytes -= _size_bytes(self._pending.pop(key, ()))


def rounded(gradient: Tensor) -> Tensor:
    """To multiples of 2^−40, float64, ties to even."""
    return (gradient.double() / GRID).round_().mul_(GRID)


def _size_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
