"""A training run as seen by the code that drives it or shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from swarm_training.evaluation.policy import EvaluationHistory

if TYPE_CHECKING:
    from swarm_training.core.record import Progress
    from swarm_training.ledger.orders import ModeratorOrder


class RunLike(Protocol):
    """A training run. Parameters and optimizer belong to the run from its beginning to ``close``."""

    @property
    def num_steps(self) -> int:
        """Return the number of global steps taken."""

    @property
    def num_rollbacks(self) -> int:
        """Return how often the run has gone back to a checkpoint; ``num_steps`` has decreased each time."""

    @property
    def went_back_to(self) -> int:
        """Return the step of the checkpoint that the run went back to last."""

    @property
    def max_norm(self) -> float:
        """Return the norm to which averaged gradients are clipped; 0: they are not clipped."""

    @property
    def evaluations(self) -> EvaluationHistory:
        """Return the losses on held-out data that are known."""

    @property
    def reason_of_end(self) -> str:
        """Return why the run has ended, for all peers at this step; empty while it goes on."""

    @property
    def initial_peers(self) -> Sequence[str]:
        """Return the multiaddrs by which other peers join."""

    @property
    def last_loss(self) -> float | None:
        """Return the mean loss over the batch of the last global step, before the step; None: it is not known."""

    @property
    def records(self) -> Sequence[Progress]:
        """Return the newest record of each peer that has been heard from recently."""

    @property
    def bans(self) -> Mapping[str, ModeratorOrder]:
        """Return the moderators' bans that are in force now, by peer id."""

    def step(self, samples: int, loss: float | None = None) -> object:
        """Take the gradients in ``.grad``, the mean over ``samples`` samples, and leave none there. ``loss``: the mean
        over the same samples, for the view of the run and to detect that the run has diverged.

        When all peers together have the target batch, average and step the optimizer.
        """

    def shared_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the parameters that all peers share, without local steps."""

    def finish(self) -> None:
        """Wait until the loss on held-out data is known, if the parameters of the last steps are being evaluated."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class PeerView:
    """The view of a peer.

    Attributes:
        name: the user's name, from the peer's token; empty: the peer has none.
        samples: the peer's samples in the batch that is being gathered.
    """

    peer_id: str
    name: str
    samples: int
    samples_per_s: float


@dataclass(frozen=True)
class HeldOutView:
    """The view of a loss on held-out data with the parameters of a step. ``loss``: None if it is not finite."""

    step: int
    loss: float | None


@dataclass(frozen=True)
class BanView:
    """The view of a ban. ``until``: Unix time in seconds."""

    peer_id: str
    until: float
    reason: str


@dataclass(frozen=True)
class UserView:
    """The view of a user. ``share``: the share of all samples that are known to have been given, from 0 to 1."""

    name: str
    samples: int
    share: float


@dataclass(frozen=True)
class StagePeerView:
    """The view of a peer of a stage.

    Attributes:
        micro_batches: the micro-batches of the present batch that the peer has added up.
        holds: True if the peer holds the average of its stage, and waits for other stages.
        next_stage: the stage to which the peer has said that it will move.
    """

    peer_id: str
    step: int
    rollbacks: int
    micro_batches: int
    holds: bool
    micro_batches_per_s: float
    next_stage: int | None = None


@dataclass(frozen=True)
class StageView:
    """The view of one stage of a run; for the rest, see its ``peers``.

    Attributes:
        micro_batches: the micro-batches of the present batch that its peers have added up together.
        holds: True if the average of the stage is decided.
    """

    stage: int
    step: int
    rollbacks: int
    micro_batches: int
    holds: bool
    micro_batches_per_s: float
    peers: tuple[StagePeerView, ...] = ()


@dataclass(frozen=True)
class EventView:
    """The view of an event, such as a peer that has joined. ``at``: Unix time in seconds."""

    at: float
    text: str


@dataclass(frozen=True)
class RunView:
    """The view of a run at one moment.

    Attributes:
        step: the number of global steps taken.
        loss: the loss of the last step, over the samples for which peers have reported one; infinity: it is not
            finite; None: no peer has reported it.
        samples: the samples gathered for the present batch, which needs ``target_batch_size``.
        next_step_s: the time until the batch is expected to be complete; None: nobody computes.
        bytes_sent, bytes_received: the bytes of all peers for the last step.
        rollbacks: how often the run has gone back to a checkpoint.
        users: the users with the most samples, by the signed rounds received so far.
        stages: the stages of a run in stages, whose samples are micro-batches; empty for other runs.
        held_out: the newest loss on held-out data; None: none is known.
        best_held_out: the lowest one, whose checkpoint stays.
        has_ended: True if ``step`` is the last one, since the loss on held-out data has stopped falling.
        learning_rate: the rate of the last step; None: it is not known.
        checkpoint: the newest step of which peers keep a checkpoint; None: there is none yet.
        computing: the estimated share of time in which peers compute, from 0 to 1, see ``RunObserver``; None: it is
            not known yet.
        events: the last events, the oldest first.
    """

    run: str
    step: int
    loss: float | None
    samples: int
    target_batch_size: int
    next_step_s: float | None
    bytes_sent: int
    bytes_received: int
    peers: tuple[PeerView, ...] = ()
    bans: tuple[BanView, ...] = ()
    rollbacks: int = 0
    users: tuple[UserView, ...] = ()
    stages: tuple[StageView, ...] = ()
    held_out: HeldOutView | None = None
    best_held_out: HeldOutView | None = None
    has_ended: bool = False
    learning_rate: float | None = None
    checkpoint: int | None = None
    computing: float | None = None
    events: tuple[EventView, ...] = ()

    @property
    def samples_per_s(self) -> float:
        """Return the speed of all peers together. In stages it is that of the slowest stage, in micro-batches."""
        if self.stages:
            return min(stage.micro_batches_per_s for stage in self.stages)
        return sum(peer.samples_per_s for peer in self.peers)
