"""``RobustRun``: known peers train one model in lockstep, although some of them may cheat."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType

import torch
from torch import nn

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.net.identity import Identity
from swarm_protocol.process import network_loop
from swarm_training.core.config import check_run_name
from swarm_training.core.moment import Moment
from swarm_training.core.robust_config import RobustConfig
from swarm_training.core.robust_network import RobustNetwork
from swarm_training.net.membership import RunMembership
from swarm_training.robust.btard import Btard
from swarm_training.robust.instructions import Remove
from swarm_training.robust.roster import Rules
from swarm_training.robust.workbench import Workbench
from swarm_training.robust_run.data import StepData, to_tensor
from swarm_training.robust_run.gradients import Loss, PeerGradients
from swarm_training.robust_run.member import RobustMember, StepResult
from swarm_training.robust_run.presence import RobustPresence, in_thread
from swarm_training.robust_run.standings import Standings
from swarm_training.run.state import TrainedState

MAX_PEERS = 64


@dataclass(frozen=True)
class GlobalStep:
    """A global step that has been taken.

    Attributes:
        number: the number of the step, from 1 on.
        workers: ids of the peers whose gradients were aggregated.
        removed: peers removed since the last step, each with the reason, and whether the peer may come back.
    """

    number: int
    workers: tuple[str, ...]
    removed: tuple[Remove, ...]


class RobustRun:
    """One peer of a run by BTARD (Gorbunov et al., 2021). All peers take each step together, and stay bitwise equal.

    Batches must follow from step and peer id, so that any peer can recompute any gradient. ``loss(step, peer_id)`` is
    the loss of the peer's batch of that step, a scalar. It depends on these two and the parameters alone: no dropout,
    no batch statistics. ``advance`` calls ``loss`` in another thread, also for other peers, and also at the parameters
    of the last step. Do not call the optimizer's own ``step``.
    """

    def __init__(
        self,
        name: str,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        founders: Sequence[str],
        identity: Identity,
        initial_peers: Sequence[str] = (),
        rules: Rules | None = None,
        config: RobustConfig | None = None,
        access: AccessControl | None = None,
        token: bytes = b"",
    ) -> None:
        """Enter the network. The first ``advance`` waits for all founders, or joins their run if it has begun.

        Args:
            founders: ids of the peers that begin, the same for all peers; more than two thirds must be honest.
                Other peers, and peers removed for silence, join as newcomers: their gradients count after some audits.
            identity: this peer's key.
            initial_peers: multiaddrs of a peer that is there already; empty: the other peers come to this one.
            rules: the protocol's settings, the same for all peers.
            access, token: access control and this peer's token, for a private run.

        Raises:
            ValueError: an argument is wrong, or nothing can be trained with these arguments.
            NoSwarm: no initial peer answered.
        """
        check_run_name(name)
        if isinstance(initial_peers, str) or isinstance(founders, str):
            raise ValueError("initial_peers or founders is a text: expected a list")
        self._founders = sorted(set(founders))
        if identity.peer_id not in self._founders and not initial_peers:
            raise ValueError("this peer is no founder of the run: expected initial_peers to join it by")
        self._state = TrainedState(parameters, optimizer)
        if len(self._founders) > min(MAX_PEERS, self._state.length):
            raise ValueError(f"{len(self._founders)} founders: expected {MAX_PEERS} at most, and a parameter for each")
        self._identity = identity
        self._rules = rules or Rules()
        self._config = config or RobustConfig()
        self._gradients = PeerGradients(self._state, loss)
        self._member: RobustMember | None = None
        self._using = threading.Lock()
        self._is_closed = False
        member = RunMembership(identity, list(initial_peers), access, token)
        self._presence = network_loop.run(RobustPresence.enter(name, self._model_digest(), member, self._config))

    @property
    def initial_peers(self) -> list[str]:
        """Return the multiaddrs by which other peers join."""
        return self._presence.addresses

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def num_steps(self) -> int:
        """Return the number of global steps taken."""
        return self._state.step

    @property
    def members(self) -> list[str]:
        """Return the ids of the peers that take part."""
        return list(self._founders if self._member is None else self._member.machine.roster.all)

    def advance(self) -> GlobalStep:
        """Take one global step with the other peers, which wait up to ``compute_s`` for this call.

        Raises:
            ValueError: the run is closed, or the loss is no scalar that depends on the parameters.
            PeerUnavailable: not all founders have come; later: this peer was removed for silence, or hears nothing of
                most other peers.
            AccessDenied: this peer has been banned.
        """
        if self._is_closed:
            raise ValueError("the run is closed")
        with self._using:
            if self._member is None:
                entering = self._presence.take_part(self._founders, self._make_member, self._load)
                self._member = network_loop.run(entering)
            finished: StepResult = network_loop.run(self._member.finished())
            self._gradients.remember()
            self._state.apply(finished.gradient)
            if finished.joined:
                network_loop.run(self._member.offer(finished, self._state.to_bytes()[1]))
        return GlobalStep(finished.step + 1, finished.workers, finished.removed)

    def close(self) -> None:
        """Leave the run. The other peers wait for this one until one deadline has passed."""
        if not self._is_closed:
            self._is_closed = True
            network_loop.run(self._presence.leave())

    def __enter__(self) -> RobustRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_member(self, session: bytes, network: RobustNetwork) -> RobustMember:
        me = self.peer_id
        machine = Btard(me, self._founders, self._state.length, self._rules)
        data = StepData(self._make_bench(), machine.num_elements, network, self._config, in_thread)
        candidates = self._presence.directory.joining
        return RobustMember(self._identity, session, machine, data, network, self._config, candidates)

    async def _load(self, member: RobustMember, standings: Standings, state: bytes, result: bytes) -> None:
        """Fill a new member from other peers' data. Raises ValueError if the state does not fit the parameters."""
        await in_thread(lambda: self._state.load(Moment(0, standings.step), state))
        member.load(standings.snapshot, to_tensor(result))

    def _make_bench(self) -> Workbench:
        return Workbench(self.peer_id, self._state.length, self._gradients, self._rules)

    def _model_digest(self) -> bytes:
        """Return the digest of all that must be equal for two peers to train together."""
        config = self._config
        times = config.compute_s, config.phase_s, config.spread_s, config.bytes_per_s
        facts = self._state.model_digest.hex(), self._founders, sorted(asdict(self._rules).items()), times
        return hashlib.sha256(repr(("btard", *facts)).encode()).digest()
