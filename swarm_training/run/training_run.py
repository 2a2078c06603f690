"""``TrainingRun``: one model that many peers train together, for any training loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.net.identity import Identity
from swarm_protocol.process import network_loop
from swarm_training.compression.compressor import Compressor, Encoder, Plain
from swarm_training.core.config import TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.ledger.ledger import UserTotal
from swarm_training.progress import policy
from swarm_training.run.meetings import Compression
from swarm_training.run.presence import Presence
from swarm_training.run.share import Asking, DelayedShare, Share
from swarm_training.run.state import TrainedState


class TrainingRun:
    """One peer of a run.

    After ``loss.backward()``, ``step(samples)`` takes the gradients; when all peers together have the target batch,
    they are averaged, weighted by samples, and all peers take the same step, so that their parameters are equal bit for
    bit. ``loss`` must be a mean over the samples. The optimizer's own ``step`` and ``zero_grad`` are not to be called.
    """

    def __init__(
        self,
        name: str,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        target_batch_size: int,
        initial_peers: Sequence[str] = (),
        config: TrainingConfig | None = None,
        identity: Identity | None = None,
        compressor: Compressor | None = None,
        encoder: Encoder | None = None,
        access: AccessControl | None = None,
        token: bytes = b"",
        resumed_at: Moment | None = None,
    ) -> None:
        """Joins the run through ``initial_peers`` and loads its state, or founds it if there are none.

        Args:
            name: of the run, the same for all peers.
            parameters: of the model, or those of them that are trained. Frozen ones that are given must be equal at all
                peers, bit for bit. Buffers, such as a BatchNorm's means, are each peer's own.
            optimizer: has all parameters that are trained, and steps without a closure.
            target_batch_size: samples of all peers together between two global steps.
            identity: this peer's key; a new one if it is None.
            compressor: what is averaged in place of the gradient.
            encoder: keeps what encoding has lost, see ``Encoder``.
            access, token: of a private run.
            resumed_at: what the founder's parameters and optimizer are of, if they are those of a checkpoint:
                ``Checkpoint.moment``.

        Raises:
            ValueError: nothing can be trained so, or the peers of the run train another model.
            NoSwarm, PeerUnavailable: no initial peer answered, or none of them trains this run.
        """
        if not name or not name.isprintable() or len(name) > 200:
            raise ValueError(f"the name of a run is {name!r}: expected up to 200 printable characters")
        if target_batch_size <= 0:
            raise ValueError(f"target_batch_size is {target_batch_size}: expected at least 1")
        if isinstance(initial_peers, str):
            raise ValueError("initial_peers is a text: expected a list of multiaddrs")
        if resumed_at is not None and initial_peers:
            raise ValueError("resumed_at is for who founds a run: who joins loads the state of the others")
        config = config or TrainingConfig()
        if config.client_mode and not initial_peers:
            raise ValueError("client_mode needs initial_peers: a run is founded by a peer that others can call")
        compressor = compressor or Plain()
        if config.delay and compressor.state_dict():
            kind = type(compressor).__name__
            raise ValueError(f"delay is on, and {kind} has a state: expected a compressor without one")
        if config.aggregation != "mean" and compressor.state_dict():
            kind = type(compressor).__name__
            raise ValueError(f"aggregation is {config.aggregation!r}, and {kind} has a state: expected one without")
        self._state = TrainedState(parameters, optimizer, compressor, config.common)
        self._presence = network_loop.run(
            Presence.enter(
                name,
                target_batch_size,
                list(initial_peers),
                config,
                identity or Identity.generate(),
                self._state,
                Compression(compressor, encoder),
                access,
                token,
            )
        )
        self._share = (DelayedShare if config.delay else Share)(self._presence.peer, self._state)
        self._using = threading.Lock()
        self._is_closed = False
        try:
            if initial_peers:
                self._join(config.join_timeout_s)
            else:
                network_loop.run(self._presence.peer.found(self._state.digest(), resumed_at))
        except BaseException:
            self.close()
            raise

    @property
    def initial_peers(self) -> list[str]:
        """For others to join by."""
        return self._presence.addresses

    @property
    def peer_id(self) -> str:
        return self._presence.peer.own.peer_id

    @property
    def num_steps(self) -> int:
        """Global steps taken, by whoever it was."""
        return self._state.step

    @property
    def num_rollbacks(self) -> int:
        """So often has the run gone back to a checkpoint; ``num_steps`` has become less each time."""
        return self._state.moment.rollbacks

    @property
    def went_back_to(self) -> int:
        """The step of the checkpoint that the run went back to last; 0 before the first time."""
        return self._presence.peer.rollbacks.went_back_to

    @property
    def last_group(self) -> list[str]:
        """Peer ids of those whose gradients were averaged last, in the order in which they were added up."""
        return list(self._share.last_group)

    @property
    def last_batch_size(self) -> int:
        """How many samples they had together: at least the target, as peers end what they have begun."""
        return self._share.last_batch_size

    @property
    def seconds_to_step(self) -> float | None:
        """Until the next global step, as far as can be told now."""
        return policy.seconds_to_step(network_loop.run(self._view()))

    @property
    def num_peers(self) -> int:
        """That have been heard of lately, this one included."""
        return len(network_loop.run(self._view()).all)

    @property
    def ledger(self) -> dict[str, UserTotal]:
        """Samples and rounds by user, most samples first, of all steps that this peer has heard of: signed by who gave
        them, and countersigned. A user is the name in a peer's token, or in a run without an organiser the peer id."""
        return network_loop.run(self._totals())

    def step(self, samples: int, loss: float | None = None) -> None:
        """Takes the gradients, a mean over so many samples; if the batch is complete, blocks while they are averaged,
        unless ``delay`` is on.

        ``loss``, the mean over the same samples, is shown to those who watch the run, and says when it has diverged.

        Raises:
            ValueError: ``samples`` is less than 1, or the run is closed.
            AccessDenied: a moderator has banned this peer.
        """
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ValueError(f"samples is {samples!r}: expected a whole number of at least 1")
        if self._is_closed:
            raise ValueError("the run is closed")
        with self._using:
            self._share.add(samples, loss)
            self._drive(self._share.report())

    def close(self) -> None:
        """Leaves the run: what has been accumulated since the last global step is withdrawn."""
        if not self._is_closed:
            self._is_closed = True
            network_loop.run(self._presence.leave())

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _join(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self._presence.peer.own.state_digest:
            self._drive(self._share.load())
            if time.monotonic() > deadline_s and not self._presence.peer.own.state_digest:
                raise PeerUnavailable("no peer of the run has given its state")

    def _drive(self, asking: Asking) -> None:
        """Answers what is asked from the network loop."""
        answer: Any = None
        try:
            while True:
                answer = network_loop.run(asking.send(answer))
        except StopIteration:
            return
        finally:
            asking.close()

    async def _view(self) -> policy.View:
        return self._presence.peer.view()

    async def _totals(self) -> dict[str, UserTotal]:
        return self._presence.peer.ledger.totals()
