"""How commands reach a run over the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from swarm_training.compression.settings import AveragingSettings
from swarm_training.contract.run_like import RunLike, RunView

if TYPE_CHECKING:
    import torch
    from torch import nn

    from swarm_protocol.access.organiser import SwarmKey
    from swarm_protocol.net.identity import Identity


@dataclass(frozen=True)
class Joining:
    """As whom, and through whom.

    Attributes:
        initial_peers: none: the run is founded.
        organiser: only members take part; None: anybody may.
        token: this peer's grant; empty without an organiser.
    """

    run: str
    target_batch_size: int
    initial_peers: tuple[str, ...]
    identity: Identity = field(repr=False)
    organiser: SwarmKey | None = None
    token: bytes = field(default=b"", repr=False)
    averaging: AveragingSettings = field(default_factory=AveragingSettings)


# All raise NoSwarm or PeerUnavailable if no initial peer answers, AccessDenied if the peer may not.
OpenRun: TypeAlias = "Callable[[Joining, Sequence[nn.Parameter], torch.optim.Optimizer], RunLike]"
Look = Callable[[Joining], AbstractContextManager[Callable[[], RunView]]]  # inside it, the run as it is at each call
SendOrder = Callable[[Joining, bytes], None]  # a moderator's signed order


@dataclass(frozen=True)
class Backend:
    """What there is none of, the command line does not offer."""

    open_run: OpenRun
    look: Look | None = None
    send_order: SendOrder | None = None
