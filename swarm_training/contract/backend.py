"""The interface through which commands reach a run over the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from swarm_training.contract.views import RunView
from swarm_training.core.config import TrainingConfig
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
class PeerAddress:
    """The address and ports on which a peer listens, and the host that it announces, see ``TrainingConfig``."""

    host: str | None = None
    port: int = 0
    dht_port: int = 0
    announce_host: str | None = None


@dataclass(frozen=True)
class Joining:
    """The identity, peers and settings with which a peer joins a run."""

    run: str
    target_batch_size: int
    initial_peers: tuple[str, ...]  # multiaddrs of members; empty: this peer founds the run
    identity: Identity = field(repr=False)
    organiser: SwarmKey | None = None  # the key whose members alone take part; None: anybody may
    token: bytes = field(default=b"", repr=False)  # this peer's grant; empty without an organiser
    # The settings of this peer; ``straggler_s`` must fit ``local``, and ``checkpoint_directory`` is chosen later.
    config: TrainingConfig = field(default_factory=TrainingConfig)
    # ``power_sgd_rank``, ``error_feedback``: see ``AveragingSettings``.
    power_sgd_rank: int = 0
    error_feedback: bool = False
    # The moment of the checkpoint that model and optimizer have been loaded from; None: they are new.
    resumed_at: Moment | None = None
    local: LocalSteps | None = None  # the steps that this peer takes between two global steps; None: there are none
    evaluation: Evaluation | None = None  # the evaluation on held-out data; None: there is none
    address: PeerAddress = PeerAddress()
    client_mode: bool = False  # whether nobody can call this peer, so that it calls others

    def membership(self) -> RunMembership:
        """Return the identity and the peers with which the process enters the network."""
        from swarm_protocol.access.access_control import AccessControl
        from swarm_training.net.membership import RunMembership

        access = None if self.organiser is None else AccessControl(self.organiser)
        return RunMembership(self.identity, self.token, access, initial_peers=self.initial_peers)


OpenRun: TypeAlias = "Callable[[Joining, Sequence[nn.Parameter], torch.optim.Optimizer], TrainingRun]"


@dataclass(frozen=True)
class Backend:
    """The functions that reach a run. All raise NoSwarm or PeerUnavailable if no initial peer answers, AccessDenied if
    this peer may not take part."""

    open_run: OpenRun
    look: Callable[[Joining], AbstractContextManager[Callable[[], RunView]]]  # each call inside it: the present view
    send_order: Callable[[Joining, bytes], None]  # a moderator's signed order
    read_ledger: Callable[[Joining], Ledger]  # the rounds that peers gave and that were verified here
