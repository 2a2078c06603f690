"""The micro-batches that count at this peer: first pending, then in its sums, once each."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swarm_protocol.errors import PeerBusy, PeerMoved
from swarm_training.optim.local_steps import InnerSteps, LocalSteps
from swarm_training.run.state import TrainedState

if TYPE_CHECKING:
    from swarm_training.stages.engine.accumulator import Accumulator
    from swarm_training.stages.engine.stage import StageGradients

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
_logger = logging.getLogger(__name__)


class StageDrift:
    """The drift of a stage's weights by local steps, see ``LocalSteps``. Call all methods in the compute thread.

    The sums have the micro-batches since the last local step. Earlier ones of the round are in the weights.
    """

    def __init__(self, sums: Accumulator, state: TrainedState, local: LocalSteps) -> None:
        """Begin without steps. ``local``: its samples are micro-batches."""
        self._sums, self._state, self._batch_size = sums, state, local.batch_size
        self._inner = InnerSteps(local, state.parameters)

    @property
    def is_due(self) -> bool:
        """Return whether there are enough micro-batches for a local step. Any thread may ask."""
        return self._sums.num_summed >= self._batch_size

    def step(self, is_last: bool = False) -> bool:
        """Take a local step with the mean gradient of the micro-batches in the sums. A mean that is not finite is left
        out. Return False if the weights are not finite afterwards: ``withdraw`` must follow.

        ``is_last``: whether the round ends, so that fewer micro-batches than usual make a step too."""
        if not self._sums.num_summed or not (is_last or self.is_due):
            return True
        gradient, num_summed = self._sums.take()
        self._state.set_gradients(gradient.div_(num_summed))
        if not self._inner.take(num_summed):
            _logger.warning("gradients are not finite: %d micro-batches are left out", num_summed)
            return True
        self._inner.step(is_last)
        return all(bool(torch.isfinite(each).all()) for each in self._state.parameters)

    def weighted(self, num_done: int, dtype: torch.dtype) -> Tensor:
        """Return the drift times the micro-batches of the round, [n]: peers' drifts are averaged with these weights."""
        return self._state.drift().to(dtype).mul_(num_done)

    def withdraw(self) -> None:
        """Take all local steps of the round back, and empty the sums."""
        self._sums.discard()
        self.forget()
        self._state.restore()

    def forget(self) -> None:
        """Discard what the inner optimizer remembers: the weights have been replaced."""
        self._inner.forget()


class Counting:
    """A peer's count of micro-batches. Its methods are for one event loop, except ``add`` and ``clear``.

    Attributes:
        done: the micro-batches in the sums, or in the weights by local steps.
        changing: the lock that is held while sums or weights change.
    """

    def __init__(
        self,
        sums: Accumulator,
        in_thread: InThread,
        counts_elsewhere: Callable[[int], bool],
        on_change: Callable[[], None],
        drift: StageDrift | None = None,
        compute: InThread | None = None,
    ) -> None:
        """Start with nothing. ``counts_elsewhere``: returns whether another peer of the stage has the micro-batch by
        its record. ``on_change``: called when ``done`` has grown, or an answer is not finite. ``drift``: that of the
        weights, if there are local steps. ``compute``: calls a function in the compute thread; given with ``drift``."""
        self.done: frozenset[int] = frozenset()
        self.changing = asyncio.Lock()
        self._sums = sums
        self._in_thread = in_thread
        self._counts_elsewhere = counts_elsewhere
        self._on_change = on_change
        self._drift, self._compute = drift, compute or in_thread
        self._losses = _Losses()
        self._is_not_finite = False
        self._is_closed = False

    def add(self, step: int, m: int, trainer: str, gradients: StageGradients) -> None:
        """Keep a result of ``backward`` for this micro-batch until ``commit``. Call it in the compute thread.

        Raises:
            PeerMoved: the peer is at another step.
            PeerBusy: there is no room for it.
            RequestRejected: there is no such micro-batch.
        """
        self._sums.add(step, m, trainer, gradients.parameters)
        self._losses.add(m, trainer, gradients.loss_sum, gradients.num_tokens)

    def forget(self) -> None:
        """Count nothing as done, since the sums are those of another state."""
        self.done = frozenset()

    async def commit(self, step: int, m: int, trainer: str) -> bool:
        """Add what is pending to the sums. Return whether the micro-batch counts at this stage now, also if another
        peer of the stage has it. If not, it must be computed again.

        Raises:
            PeerMoved: the peer is at another step.
            PeerBusy: the stage is averaging; it takes later what it lacks for that.
            RequestRejected: there is no such micro-batch.
        """
        async with self.changing:
            if step != self._sums.step:
                raise PeerMoved(f"micro-batch {m} is of step {step}: this peer is at step {self._sums.step}")
            if m in self.done or self._counts_elsewhere(m):
                self._sums.drop(m)
                return True
            if self._is_closed:
                raise PeerBusy(f"the gradients of step {step} are being averaged")
            is_done: bool = await self._in_thread(partial(self._sums.commit, step, m, trainer))
            if is_done:
                self.done |= {m}
                self._losses.commit(m, trainer)
                self._on_change()
            return is_done

    def drop_moot(self) -> None:
        """Drop what is pending of micro-batches that count elsewhere: their trainers have asked another peer.

        Nothing is dropped while sums change: the thread that adds to them holds their lock, and the event loop must not
        wait for it.
        """
        if self.changing.locked():
            return
        for m in filter(self._counts_elsewhere, self._sums.waiting):
            self._sums.drop(m)

    def note_not_finite(self) -> None:
        """Record that no peer can compute the gradient of some micro-batch: the loss of the step is infinity."""
        self._is_not_finite = True
        self._on_change()

    async def step_locally(self) -> None:
        """Take a local step, if there are such steps and one is due. If it fails, what counts here is discarded, and
        other peers compute it again."""
        if self._drift is not None and self._drift.is_due and not await self._compute(self._drift.step):
            _logger.warning(
                "a local step led to weights that are not finite: %d micro-batches are given up", len(self.done)
            )
            await self.discard()

    async def discard(self) -> None:
        """Empty the sums, and take local steps back."""
        async with self.changing:
            await self._discard()

    async def _discard(self) -> None:
        if self._drift is None:
            await self._in_thread(self._sums.discard)
        else:
            await self._compute(self._drift.withdraw)
        self.done = frozenset()

    def clear(self, step: int, is_next: bool = False) -> None:
        """Empty the sums and what is pending, for another step. The caller holds ``changing``, and sets ``done``.
        ``is_next``: whether the weights are those after a step, and not those of another state."""
        self._sums.clear(step)
        if self._drift is not None and not is_next:
            self._drift.forget()
        self._losses.clear()
        self._is_not_finite = False

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Refuse to add to the sums while the context is active."""
        self._is_closed = True
        try:
            yield
        finally:
            self._is_closed = False

    async def vector(self, dtype: torch.dtype) -> Tensor:
        """Return the sums, [n] in this dtype. With local steps, return the drift times the number of micro-batches,
        after a last local step with those that are left."""
        async with self.changing:
            vector: Tensor
            if self._drift is not None:
                if await self._compute(partial(self._drift.step, is_last=True)):
                    vector = await self._compute(partial(self._drift.weighted, len(self.done), dtype))
                    return vector
                await self._discard()
            vector = await self._in_thread(lambda: self._sums.sums.to(dtype))
            return vector

    def loss(self) -> tuple[float, int]:
        """Return the mean loss over the tokens of all done micro-batches, infinity if anything is not finite, and the
        number of micro-batches with a known loss."""
        if self._is_not_finite:
            return inf, max(1, len(self.done))
        return self._losses.mean(self.done)


class _Losses:
    """The losses of micro-batches that a peer of the last stage has computed. Several threads may use them."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, str], tuple[float, int]] = {}
        self._done: dict[int, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def add(self, m: int, trainer: str, loss_sum: float | None, num_tokens: int | None) -> None:
        """Keep a loss as pending: the sum over so many tokens. None is ignored: only the last stage has a loss."""
        if loss_sum is not None and num_tokens:
            with self._lock:
                self._pending[m, trainer] = loss_sum, num_tokens

    def commit(self, m: int, trainer: str) -> None:
        with self._lock:
            if (found := self._pending.pop((m, trainer), None)) is not None:
                self._done[m] = found

    def mean(self, done: frozenset[int]) -> tuple[float, int]:
        with self._lock:
            known = [self._done[m] for m in sorted(done) if m in self._done]
        if not known:
            return 0.0, 0
        loss = sum(loss_sum for loss_sum, _ in known) / sum(num_tokens for _, num_tokens in known)
        return (loss if isfinite(loss) else inf), len(known)

    def clear(self) -> None:
        with self._lock:
            self._pending.clear()
            self._done.clear()
