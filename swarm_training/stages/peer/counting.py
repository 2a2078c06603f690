"""The micro-batches that count at this peer: first pending, then in its sums, once each."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swarm_protocol.errors import PeerBusy, PeerMoved
from swarm_protocol.failures import undone_on_error
from swarm_training.core.callbacks import InThread
from swarm_training.optim.local_steps import InnerSteps, LocalSteps
from swarm_training.run.state import TrainedState

if TYPE_CHECKING:
    from swarm_training.stages.engine.accumulator import Accumulator
    from swarm_training.stages.engine.stage import StageGradients

_logger = logging.getLogger(__name__)


class StageDrift:
    """The drift of a stage's weights by local steps, see ``LocalSteps``. Call all methods but ``discard`` in the
    compute thread.

    The sums have the micro-batches since the last local step. Earlier ones of the round are in the weights.

    Attributes:
        has_failed: whether a local step has led to weights that are not finite. All steps of the round have been taken
            back, and what counts here must be discarded.
    """

    def __init__(self, sums: Accumulator, state: TrainedState, local: LocalSteps) -> None:
        """Begin without steps. ``local``: its samples are micro-batches."""
        self._sums, self._state, self._batch_size = sums, state, local.batch_size
        self._inner = InnerSteps(local, state.parameters)
        self.has_failed = False
        self._is_discarded = False  # until the next job of the compute thread takes the steps so far back

    @property
    def is_behind(self) -> bool:
        """Return whether ``catch_up`` has something to do. Any thread may ask."""
        return self._is_discarded or self._sums.num_summed >= self._batch_size

    def catch_up(self, is_last: bool = False) -> None:
        """Take discarded steps back. Then take a local step with the mean gradient of the micro-batches in the sums, if
        these are enough. A mean that is not finite is left out.

        ``is_last``: whether the round ends, so that fewer micro-batches than usual make a step too."""
        if self._is_discarded:
            self._withdraw()
        if self._sums.num_summed < (1 if is_last else self._batch_size):
            return
        gradient, num_summed = self._sums.take()
        if not num_summed:
            return  # the event loop has emptied the sums
        with undone_on_error(self._fail):
            self._state.set_gradients(gradient.div_(num_summed))
            if not self._inner.take(num_summed):
                _logger.warning("gradients are not finite: %d micro-batches are left out", num_summed)
                return
            self._inner.step(is_last)
            if not all(bool(torch.isfinite(each).all()) for each in self._state.parameters):
                self._fail()  # at once: the next job computes with these weights

    def weighted(self, num_done: int, dtype: torch.dtype) -> Tensor | None:
        """Take the last local step of the round, and return the drift times the micro-batches of the round, [n]: peers'
        drifts are averaged with these weights. Return None if a step has failed."""
        self.catch_up(is_last=True)
        return None if self.has_failed else self._state.drift().to(dtype).mul_(num_done)

    def discard(self) -> None:
        """Have the next job of the compute thread take all steps of the round back. The sums must be empty, so that a
        step which is under way is the last one with what was in them. Call it in the event loop."""
        self._is_discarded, self.has_failed = True, False

    def forget(self) -> None:
        """Discard the state of the inner optimizer, because the weights have been replaced."""
        self._is_discarded = self.has_failed = False
        self._inner.forget()

    def _withdraw(self) -> None:
        self.forget()
        self._state.restore()

    def _fail(self) -> None:
        self._withdraw()
        self.has_failed = True


class Counting:
    """A peer's count of micro-batches. Its methods are for one event loop, except ``add``, ``catch_up`` and ``clear``,
    which are for the compute thread."""

    def __init__(
        self,
        sums: Accumulator,
        in_thread: InThread,
        counts_elsewhere: Callable[[int], bool],
        on_change: Callable[[], None],
        drift: StageDrift | None = None,
        compute: InThread | None = None,
    ) -> None:
        """Start without micro-batches. ``counts_elsewhere``: returns whether a mate has a micro-batch, as its record
        says. ``on_change``: called when ``done`` has grown, or an answer is not finite. ``drift``: that of the
        weights, if there are local steps. ``compute``: calls a function in the compute thread; given with ``drift``."""
        self.done: frozenset[int] = frozenset()  # the micro-batches in the sums, or in the weights by local steps
        self.changing = asyncio.Lock()  # the lock that is held while sums or weights change
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
            PeerBusy: the stage is averaging. If it gets no average, the micro-batch may be committed later.
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

    @property
    def is_behind(self) -> bool:
        """Return whether there are local steps to take, or to take back."""
        return self._drift is not None and self._drift.is_behind

    def catch_up(self) -> None:
        """Take a local step if one is due, and take back steps that were discarded. Call it in the compute thread, at
        the beginning of each job: so no step waits for the jobs that are queued."""
        if self._drift is not None:
            self._drift.catch_up()

    async def discard_failed(self) -> None:
        """If a local step has failed, discard what counts here: other peers compute it again."""
        if self._drift is not None and self._drift.has_failed:
            _logger.warning(
                "a local step failed, or led to weights that are not finite: %d micro-batches are given up",
                len(self.done),
            )
            await self.discard()

    async def discard(self) -> None:
        """Empty the sums. The next job of the compute thread takes local steps back before it computes."""
        async with self.changing:
            await self._discard()

    async def _discard(self) -> None:
        await self._in_thread(self._sums.discard)
        if self._drift is not None:
            self._drift.discard()
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
        after a last local step with the micro-batches that are left."""
        async with self.changing:
            if self._drift is not None:
                vector: Tensor | None = await self._compute(partial(self._drift.weighted, len(self.done), dtype))
                if vector is not None:
                    return vector
                await self._discard()  # nothing counts here then, and the sums are zeros
            summed: Tensor = await self._in_thread(lambda: self._sums.sums.to(dtype))
            return summed

    def loss(self) -> tuple[float, int]:
        """Return the mean loss over the tokens of all done micro-batches, infinity if anything is not finite, and the
        number of micro-batches with a known loss."""
        if self._is_not_finite:
            return inf, max(1, len(self.done))  # a loss of no micro-batch would not be heeded
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
