"""A training run as those see it who drive it or look at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class RunLike(Protocol):
    """Parameters and optimizer are the run's from its beginning to ``close``."""

    @property
    def num_steps(self) -> int:
        """Global steps taken."""

    @property
    def num_rollbacks(self) -> int:
        """So often has it gone back to a checkpoint; ``num_steps`` has become less each time."""

    @property
    def went_back_to(self) -> int:
        """The step of the checkpoint that it went back to last."""

    @property
    def initial_peers(self) -> Sequence[str]:
        """Multiaddrs for others to join by."""

    def step(self, samples: int, loss: float | None = None) -> object:
        """Takes the gradients in ``.grad``, the mean over so many samples, and leaves none there; ``loss``, the mean
        over the same ones, is for those who watch, and says when the run has diverged.

        When all peers together have the target batch, it averages and steps the optimizer.
        """

    def close(self) -> None: ...


@dataclass(frozen=True)
class PeerView:
    """
    Attributes:
        name: of the user, from the peer's token; empty: it has none.
        samples: of the batch that is being gathered.
    """

    peer_id: str
    name: str
    samples: int
    samples_per_s: float


@dataclass(frozen=True)
class BanView:
    """``until``: Unix time in seconds."""

    peer_id: str
    until: float
    reason: str


@dataclass(frozen=True)
class UserView:
    """``share``: of all samples that are known to have been given, from 0 to 1."""

    name: str
    samples: int
    share: float


@dataclass(frozen=True)
class StagePeerView:
    """A peer of a stage.

    Attributes:
        micro_batches: of the present batch, that it has added up.
        holds: it holds the average of its stage, and waits for other stages.
        next_stage: where it has said that it will go.
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
    """One stage of a run; for the rest, see its peers.

    Attributes:
        micro_batches: of the present batch, that its peers have added up together.
        holds: its average is decided.
    """

    stage: int
    step: int
    rollbacks: int
    micro_batches: int
    holds: bool
    micro_batches_per_s: float
    peers: tuple[StagePeerView, ...] = ()


@dataclass(frozen=True)
class RunView:
    """A run at one moment.

    Attributes:
        step: global steps taken.
        loss: of the last step, over the samples that peers have told it of; infinity: it is not finite; None: nobody
            has told.
        samples: of the batch that is being gathered, of ``target_batch_size``.
        next_step_s: until the batch is expected to be complete; None: nobody computes.
        bytes_sent, bytes_received: by all peers for the last step.
        rollbacks: so often has it gone back to a checkpoint.
        users: who have given most, as far as signed rounds have come.
        stages: of a run in stages, whose samples are micro-batches; else none.
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
