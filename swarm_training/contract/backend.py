"""The interface through which commands reach a run over the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from swarm_training.compression.settings import AveragingSettings
from swarm_training.contract.views import RunView
from swarm_training.core.config import RollbackPolicy
from swarm_training.core.moment import Moment

if TYPE_CHECKING:
    import torch
    from torch import nn

    from swarm_protocol.access.organiser import SwarmKey
    from swarm_protocol.net.identity import Identity
    from swarm_training.evaluation.evaluation import Evaluation
    from swarm_training.ledger.ledger import Ledger
    from swarm_training.net.membership import RunMembership
    from swarm_training.optim.local_steps import LocalSteps
    from swarm_training.run.training_run import TrainingRun


@dataclass(frozen=True)
class Joining:
    """The identity, peers and settings with which a peer joins a run.

    Attributes:
        initial_peers: multiaddrs of members; empty: this peer founds the run.
        organiser: the key whose members alone take part; None: anybody may.
        token: this peer's grant; empty without an organiser.
        checkpoint_every: the steps between checkpoints, to go back to when ``rollback`` asks for it; 0: never.
        resumed_at: the moment of the checkpoint that model and optimizer have been loaded from; None: they are new.
        restart_wait_s: the time in which who founds a run again takes a newer checkpoint from others; 0: none is taken.
        max_norm: the norm to which averaged gradients are clipped; 0: they are not clipped.
        average_decay: the decay of the moving average of the weights; 0: there is no such average.
        ledger: the file that keeps who has contributed how much; None: there is none.
        local: the steps that this peer takes between two global steps; None: there are none.
        evaluation: the evaluation on held-out data; None: there is none.
    """

    run: str
    target_batch_size: int
    initial_peers: tuple[str, ...]
    identity: Identity = field(repr=False)
    organiser: SwarmKey | None = None
    token: bytes = field(default=b"", repr=False)
    averaging: AveragingSettings = field(default_factory=AveragingSettings)
    checkpoint_every: int = 0
    rollback: RollbackPolicy = field(default_factory=RollbackPolicy)
    max_norm: float = 0.0
    average_decay: float = 0.0
    ledger: str | None = None
    resumed_at: Moment | None = None
    restart_wait_s: float = 0.0
    local: LocalSteps | None = None
    evaluation: Evaluation | None = None

    def membership(self) -> RunMembership:
        """Return the identity and the peers with which the process enters the network."""
        from swarm_protocol.access.access_control import AccessControl
        from swarm_training.net.membership import RunMembership

        access = None if self.organiser is None else AccessControl(self.organiser)
        return RunMembership(self.identity, self.initial_peers, access, self.token)


# All raise NoSwarm or PeerUnavailable if no initial peer answers, AccessDenied if this peer may not take part.
OpenRun: TypeAlias = "Callable[[Joining, Sequence[nn.Parameter], torch.optim.Optimizer], TrainingRun]"
Look = Callable[[Joining], AbstractContextManager[Callable[[], RunView]]]  # each call inside it: the present view
SendOrder = Callable[[Joining, bytes], None]  # a moderator's signed order
ReadLedger: TypeAlias = "Callable[[Joining], Ledger]"  # the rounds that peers gave and that were verified here


@dataclass(frozen=True)
class Backend:
    """The functions that reach a run."""

    open_run: OpenRun
    look: Look
    send_order: SendOrder
    read_ledger: ReadLedger
