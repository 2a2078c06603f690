"""The interfaces that the service needs of its stage peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from swarm_protocol.errors import PeerMoved
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.stages.peer.counting import CountedGradients

T = TypeVar("T")


class Output(Protocol):
    """The interface of ``StageOutput`` in the engine."""

    @property
    def hidden(self) -> Tensor | None: ...
    @property
    def loss_sum(self) -> Tensor | None: ...
    @property
    def num_tokens(self) -> int | None: ...


class HostedGradients(CountedGradients, Protocol):
    """The interface of ``StageGradients`` in the engine."""

    @property
    def inputs(self) -> Tensor | None: ...


class ComputingStage(Protocol):
    """The interface of ``Stage`` in the engine."""

    @property
    def index(self) -> int: ...
    @property
    def is_first(self) -> bool: ...
    @property
    def is_last(self) -> bool: ...
    @property
    def width(self) -> int: ...

    def forward(self, inputs: Tensor, labels: Tensor | None = None, keeps: bool = True) -> Output: ...

    def backward(
        self, inputs: Tensor, labels: Tensor | None = None, grad: Tensor | None = None, loss_scale: float = 1.0
    ) -> HostedGradients: ...


class StageHost(Protocol):
    """A stage peer. ``moment`` is that of its weights, and changes in its compute thread alone."""

    @property
    def moment(self) -> Moment: ...
    @property
    def stage(self) -> ComputingStage: ...
    @property
    def num_micro_batches(self) -> int: ...

    async def compute(self, work: Callable[[], T], share: float) -> T:
        """Do work in the compute thread, one after another. ``share``: the share of a micro-batch's computation."""

    def require_room(self, m: int, trainer: str) -> None:
        """Check for room before the gradients are computed. Raises PeerBusy if ``add`` would."""

    def add(self, step: int, m: int, trainer: str, gradients: HostedGradients) -> None:
        """Keep a micro-batch's gradients until the trainer commits them. Call it in the compute thread.

        Raises PeerBusy if there is no room, PeerMoved if the peer is at another step.
        """

    async def commit(self, step: int, m: int, trainer: str) -> bool:
        """Add pending gradients once; return whether the micro-batch counts now. Raises PeerMoved, PeerBusy."""

    def note_not_finite(self, step: int) -> bool:
        """See ``StagePeer``. Raises PeerMoved."""

    def forget(self, trainer: str) -> None:
        """Drop what the trainer has not committed."""


class Life(Protocol):
    """The interface of ``StagePeer``."""

    @property
    def moment(self) -> Moment: ...

    def record(self) -> Progress: ...

    async def compute(self, function: Callable[[], T], share: float) -> T: ...

    def add(self, step: int, m: int, trainer: str, gradients: HostedGradients) -> None: ...

    async def commit(self, step: int, m: int, trainer: str) -> bool: ...

    def note_not_finite(self, step: int) -> bool: ...


class HostedSums(Protocol):
    """The interface of ``Accumulator`` in the engine."""

    @property
    def num_micro_batches(self) -> int: ...

    def require_room(self, m: int, trainer: str) -> None: ...

    def forget(self, trainer: str) -> None: ...


@dataclass(frozen=True)
class HostedStage:
    """A stage, its peer and its sums, as a ``StageHost``."""

    stage: ComputingStage
    peer: Life
    sums: HostedSums

    @property
    def moment(self) -> Moment:
        """Return the weights' moment. Raises PeerMoved before the peer has joined: its results may be anything."""
        if not self.peer.record().state_digest:
            raise PeerMoved("this peer has not joined its stage yet")
        return self.peer.moment

    @property
    def num_micro_batches(self) -> int:
        return self.sums.num_micro_batches

    async def compute(self, work: Callable[[], T], share: float) -> T:
        return await self.peer.compute(work, share)

    def require_room(self, m: int, trainer: str) -> None:
        self.sums.require_room(m, trainer)

    def add(self, step: int, m: int, trainer: str, gradients: HostedGradients) -> None:
        self.peer.add(step, m, trainer, gradients)

    async def commit(self, step: int, m: int, trainer: str) -> bool:
        return await self.peer.commit(step, m, trainer)

    def note_not_finite(self, step: int) -> bool:
        return self.peer.note_not_finite(step)

    def forget(self, trainer: str) -> None:
        self.sums.forget(trainer)
