"""The views of a run, as the commands show and report it."""

from __future__ import annotations

from dataclasses import dataclass


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
