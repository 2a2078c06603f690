"""The views of a run, as the commands show and report it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PeerView:
    """The view of a peer."""

    peer_id: str
    name: str  # the user's name, from the peer's token; empty: the peer has none
    samples: int  # the peer's samples in the batch that is being gathered
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
    """The view of a peer of a stage."""

    peer_id: str
    step: int
    rollbacks: int
    micro_batches: int  # the micro-batches of the present batch that the peer has added up
    holds: bool  # True if the peer holds the average of its stage, and waits for other stages
    micro_batches_per_s: float
    next_stage: int | None = None  # the stage to which the peer has said that it will move


@dataclass(frozen=True)
class StageView:
    """The view of one stage of a run; for the rest, see its ``peers``."""

    stage: int
    step: int
    rollbacks: int
    micro_batches: int  # the micro-batches of the present batch that its peers have added up together
    holds: bool  # True if the average of the stage is decided
    micro_batches_per_s: float
    peers: tuple[StagePeerView, ...] = ()


@dataclass(frozen=True)
class EventView:
    """The view of an event, such as a peer that has joined. ``at``: Unix time in seconds."""

    at: float
    text: str


@dataclass(frozen=True)
class RunView:
    """The view of a run at one moment."""

    run: str
    step: int  # the number of global steps taken
    # The loss of the last step, over the samples for which peers have reported one; infinity: it is not finite; None:
    # no peer has reported it.
    loss: float | None
    samples: int  # the samples gathered for the present batch, which needs ``target_batch_size``
    target_batch_size: int
    next_step_s: float | None  # the time until the batch is expected to be complete; None: nobody computes
    # ``bytes_sent``, ``bytes_received``: the bytes of all peers for the last step.
    bytes_sent: int
    bytes_received: int
    peers: tuple[PeerView, ...] = ()
    bans: tuple[BanView, ...] = ()
    rollbacks: int = 0  # how often the run has gone back to a checkpoint
    users: tuple[UserView, ...] = ()  # the users with the most samples, by the signed rounds received so far
    # The stages of a run in stages, whose samples are micro-batches; empty for other runs.
    stages: tuple[StageView, ...] = ()
    held_out: HeldOutView | None = None  # the newest loss on held-out data; None: none is known
    best_held_out: HeldOutView | None = None  # the lowest one, whose checkpoint stays
    has_ended: bool = False  # True if ``step`` is the last one, since the loss on held-out data has stopped falling
    learning_rate: float | None = None  # the rate of the last step; None: it is not known
    checkpoint: int | None = None  # the newest step of which peers keep a checkpoint; None: there is none yet
    # The estimated share of time in which peers compute, from 0 to 1, see ``RunObserver``; None: it is not known yet.
    computing: float | None = None
    events: tuple[EventView, ...] = ()  # the last events, the oldest first

    @property
    def samples_per_s(self) -> float:
        """Return the speed of all peers together. In stages it is that of the slowest stage, in micro-batches."""
        if self.stages:
            return min(stage.micro_batches_per_s for stage in self.stages)
        return sum(peer.samples_per_s for peer in self.peers)
