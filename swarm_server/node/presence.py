"""The published record of a server: it follows the server's state, and outlives libp2p daemons that end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from swarm_models.checkpoints.default_model import is_packaged
from swarm_models.checkpoints.files import LocalFiles
from swarm_protocol.dht.records import REFRESH_S, ServerRecord
from swarm_protocol.errors import SwarmError
from swarm_protocol.process.routine import repeat
from swarm_server.core.access import KnownRevocations, warn_if_no_member
from swarm_server.core.config import AUTO
from swarm_server.net.network_probe import NetworkProbe
from swarm_server.node.states import Draining, Joined, Loading, Serving, Starting, State, end, with_speeds
from swarm_server.sessions.host import SessionManager
from swarm_server.weights.offering import CompetingTraffic, Offering

_logger = logging.getLogger(__name__)
_POLL_S = 0.1  # between the restart of a libp2p daemon and watching the new one
_WIRE_BYTES = 4  # per number of a hidden state


def offers_public_only(starting: Starting) -> bool:
    """Return whether only public files are offered: anybody can join, and the user has not allowed more."""
    is_private = starting.access.control is not None and not starting.config.open_to_clients
    return starting.config.share_weights == AUTO and not is_private


def offered_bytes_per_s(starting: Starting) -> float | None:
    """Return the most bytes per second of the checkpoint's files to send, as ``Offering`` takes it; 0 offers nothing.

    Files in a local directory may be secret.
    """
    config, files = starting.config, starting.checkpoint.files
    if offers_public_only(starting) and isinstance(files, LocalFiles) and not is_packaged(files.location):
        _logger.info("%s is not offered to members that have none: --share-weights always offers it", files.location)
        return 0.0
    return config.share_bytes_per_s


class RecordPublisher:
    """The publisher of a server's state, and of its record in the DHT.

    Attributes:
        offering: the offer of the checkpoint's files, whose digest the record contains.
    """

    def __init__(self, joined: Joined, network_probe: NetworkProbe, state: Loading) -> None:
        self._membership = joined.membership
        self._dht = joined.membership.dht
        self._known_speeds = joined.starting.loader.known_speeds
        self._hidden_bytes = _WIRE_BYTES * joined.starting.checkpoint.family.hidden_size
        self._access = joined.starting.access
        control = self._access.control
        self._known_revocations = None if control is None else KnownRevocations(control)
        self._measures_network = joined.starting.config.throughput is None
        self._network_probe = network_probe
        self._reach = joined.reach
        self._counters = joined.starting.counters
        self._state: State = state
        self.offering = Offering(
            joined.starting.checkpoint,
            offered_bytes_per_s(joined.starting),
            self._load,
            public_only=offers_public_only(joined.starting),
        )

    @property
    def state(self) -> State:
        return self._state

    def enter(self, state: State) -> None:
        """Change to another state; the swarm learns of it with the next ``publish``."""
        self._state = state

    @property
    def sessions(self) -> SessionManager | None:
        """Return the sessions of the hosted blocks, or None while no blocks are hosted."""
        return self._state.runtime.host if isinstance(self._state, Serving | Draining) else None

    def is_quiet(self) -> bool:
        """Return whether blocks are hosted without any sessions, waiting work, or kept training passes."""
        sessions = self.sessions
        if sessions is None or sessions.num_sessions:
            return False
        return not sessions.services.scheduler.num_waiting and not len(sessions.services.training)

    def record(self) -> ServerRecord:
        """Return the record as it is at this moment."""
        reach, work, weights = self._reach, self._counters.work(), self.offering.digest
        return replace(
            self._measured(), work=work, weights=weights, addresses=reach.addresses, relay_address=reach.relay_address
        )

    def _measured(self) -> ServerRecord:
        state = self._state
        if not isinstance(state, Serving | Draining):
            return with_speeds(state.record, self._known_speeds(len(state.record.span)))
        network = self._network_probe.bytes_per_s / self._hidden_bytes if self._measures_network else 0.0
        return state.measured(self._network_probe.rtts_s, network)

    def _load(self) -> CompetingTraffic:
        sessions = self.sessions
        has_sessions = sessions is not None and sessions.services.scheduler.num_active > 0
        return CompetingTraffic(has_sessions, self._network_probe.bytes_per_s)

    async def publish(self) -> None:
        """Publish the present record. A failure is only logged, because the record is renewed all the time."""
        if not await self._dht.publish(self.record()):
            _logger.warning("the swarm did not take this server's record; trying again in %g s", REFRESH_S)

    async def keep_offer(self) -> None:
        """Refresh the offer of files, and publish the record at once if the offer has changed."""
        before = self.offering.digest
        await self.offering.refresh()
        if self.offering.digest != before:
            await self.publish()

    async def keep_membership(self) -> None:
        """Renew the membership, and publish the record at once if a new peer was contacted."""
        if await self._membership.keep():
            await self.publish()

    async def keep_revocations(self) -> None:
        """Fetch a private swarm's revocations, and keep them in the DHT and on disk."""
        if self._dht.revocations is not None and self._known_revocations is not None:
            await self._dht.revocations.keep()
            self._known_revocations.save()
            warn_if_no_member(self._access)

    async def keep_daemon(self, is_stopping: Callable[[], bool]) -> SwarmError:
        """Start another libp2p daemon whenever one has ended; return the error when that is no longer possible."""

        async def restart() -> SwarmError | None:
            await self._dht.daemon_ended()
            if is_stopping():  # Ctrl-C in a terminal ends both
                _logger.info("the libp2p daemon has ended, too: another one tells the swarm that this server leaves")
            else:
                _logger.warning("the libp2p daemon has ended, nobody can find this server: starting it again")
            try:
                await self._membership.restart_daemon()
                self._counters.restart_daemon()
            except SwarmError as error:
                return error
            await self._membership.keep()
            # The first attempt may time out behind a publication that still waits for the old daemon.
            if not await self._dht.publish(self.record()):
                await self.publish()
            return None

        return await repeat(restart, (_POLL_S, _POLL_S))

    async def withdraw(self, may_restart: bool) -> None:
        """Withdraw the record. If ``may_restart``, a libp2p daemon that has ended may be restarted for this."""
        self.enter(end(self._state))
        withdrawn = await self._dht.publish(self.record())
        if not withdrawn and not self._dht.is_alive and may_restart:
            with suppress(SwarmError):
                await self._dht.restart()
                withdrawn = await self._dht.publish(self.record())
        if not withdrawn:
            _logger.info("the record could not be withdrawn; it expires by itself")
