"""A server of experts: it joins the DHT, takes cells, answers calls, and saves and replicates its experts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.access.tokens import Role
from swarm_protocol.dht.node import Listening
from swarm_protocol.errors import NoSwarm, SwarmError
from swarm_protocol.failures import Closing, logged_errors
from swarm_protocol.net.hosts import host_port
from swarm_protocol.net.identity import Identity
from swarm_protocol.net.tls import Certificate, ClientCredentials
from swarm_protocol.process import network_loop
from swarm_protocol.process.routine import end_tasks, repeat
from swarm_training.experts.core.cells import Cell, is_in
from swarm_training.experts.core.config import ExpertServerConfig
from swarm_training.experts.core.expert import Expert
from swarm_training.experts.core.replica import Replica
from swarm_training.experts.directory.board import DhtExpertRegistry, DhtNodeOfExperts
from swarm_training.experts.directory.records import ExpertHolder
from swarm_training.experts.net.replica_calls import ReplicaCalls
from swarm_training.experts.replicas.keeper import Keeper
from swarm_training.experts.replicas.replication import FoundReplica, Replication
from swarm_training.experts.server.adopting import Adopter
from swarm_training.experts.server.announcing import Announcer
from swarm_training.experts.server.host import ExpertHost
from swarm_training.experts.server.registry import build
from swarm_training.experts.server.service import start_service
from swarm_training.experts.server.storage import ExpertFiles

_NO_STEPS = -1  # less than any replica has
_RENEWALS = 3  # in the lifetime of one record
_GRACE_S = 1.0  # for calls that are being answered when the server ends
_LAST_REPLICAS_S = 10.0  # for sending replicas when the server ends
_logger = logging.getLogger(__name__)


class ExpertServer(Closing):
    """A server of experts that serves from its construction until ``close``; also a context manager.

    It works on the network loop of this process, in parallel to the caller.

    Attributes:
        peer_id: the server's own peer id.
        initial_peers: multiaddrs through which clients and other servers join.
    """

    def __init__(
        self, config: ExpertServerConfig, identity: Identity | None = None, *, membership: Path | None = None
    ) -> None:
        """Start the server.

        Args:
            membership: the membership file of a private swarm, from its organiser; the environment variable
                SWARM_MEMBERSHIP may have its content instead. Only members may call then.

        Raises:
            ValueError: the server cannot listen at an address, the kind of expert is unknown, saved experts do not fit,
                or the membership cannot be used.
            SwarmError: the grid is full, or another server has the cells. NoSwarm: no initial peer answered.
        """
        self.config = config
        self._access = SwarmAccess.of(Role.SERVER, membership, identity)
        self._host = ExpertHost(config)
        self._files = None if config.directory is None else ExpertFiles(config.directory, config.name)
        saved = [] if self._files is None else [cell for cell in self._files.cells() if is_in(cell, config.grid)]
        if config.cells:
            saved = [cell for cell in saved if cell in config.cells]
        self._saved = saved[: config.num_experts]
        self._loaded = [self._expert(cell) for cell in self._saved]
        self._loaded += [self._expert(None) for _ in range(config.num_experts - len(self._saved))]
        self._tasks: list[asyncio.Task[Any]] = []
        self._dht: DhtNodeOfExperts | None = None
        self._service: Any = None
        self._calls: ReplicaCalls | None = None
        self.initial_peers: list[str] = []
        with ExitStack() as on_error:
            on_error.callback(self.close)
            network_loop.run(self._start())
            on_error.pop_all()

    @property
    def peer_id(self) -> str:
        return self._access.identity.peer_id

    @property
    def experts(self) -> dict[Cell, Expert]:
        """Return a copy of the experts, by cell."""
        return dict(self._host.experts)

    @property
    def replicas(self) -> list[Replica]:
        """Return the descriptions of the replicas that this server keeps for other servers."""
        return self._keeper.replicas

    def check(self) -> None:
        """Raise NoSwarm if the libp2p daemon has ended, because nobody finds this server any more."""
        if self._dht is not None and not self._dht.is_alive:
            raise NoSwarm("the libp2p daemon of this server has ended: start the server again")

    def close(self) -> None:
        """Withdraw the experts, save them if the server has a directory, and stop."""
        network_loop.run(self._stop())

    def _expert(self, saved: Cell | None) -> Expert:
        config = self.config
        expert = Expert(build(config.kind, config.hidden), config.learning_rate, config.max_grad_norm)
        if saved is not None and self._files is not None:
            try:
                expert.load(self._files.read(saved))
            except ValueError as error:
                raise ValueError(f"expert {saved} in {self._files.directory} cannot be used: {error}") from None
        return expert

    async def _start(self) -> None:
        config = self.config
        certificate = Certificate.generate()
        listening = Listening(config.host, config.dht_port, config.announce_host)
        self._dht = await DhtNodeOfExperts.join(config.initial_peers, self._access, listening)
        self._board = DhtExpertRegistry(self._dht, config.name, config.grid, config.hidden)
        self._keeper = Keeper(config, self._board)
        self._service, port = await start_service(
            self._host, self._keeper, certificate, config.host, config.port, self._access.control
        )
        address = host_port(config.announce_host or config.host, port)
        self._own = ExpertHolder(self.peer_id, address, certificate.fingerprint)
        self._announcer = Announcer(self._board, self._own, config)
        credentials = ClientCredentials(self._access.identity, self._access.token)
        self._calls = ReplicaCalls(credentials, config.name, config.grid)
        self._replication = Replication(
            config, self._own, self._board, self._calls, self._keeper, self._host.pool.in_thread
        )
        self._adopter = Adopter(config, self.peer_id, self._board, self._announcer, self._keeper, self._replication)
        claimed = await self._announcer.claimed(config.cells)
        found = await self._replication.find()
        wanted = [*self._saved, *sorted(found)]  # the latter have replicas, and no server
        ordered = self._in_order(claimed or await self._announcer.free_cells(config.num_experts, wanted))
        await self._load_replicas(ordered, found)
        self._host.add(dict(zip(ordered, self._loaded, strict=True)))
        for cell, to in zip(self._saved, ordered, strict=False):  # others may have taken some of their cells
            self._move_file(cell, to)
        self._tasks = [asyncio.ensure_future(self._host.pool.run())]
        await self._announcer.publish(self._host.experts)
        await self._renew()  # servers that start together see each other now
        self.initial_peers = await self._dht.addresses()
        every_s = {
            self._announce: self.config.lifetime_s / _RENEWALS,
            self._save: self.config.save_every_s,
            self._send_replicas: self.config.replicate_every_s,
        }
        self._tasks += [asyncio.ensure_future(repeat(work, (pause, pause))) for work, pause in every_s.items()]

    async def _load_replicas(self, cells: Sequence[Cell], found: Mapping[Cell, Sequence[FoundReplica]]) -> None:
        """Load replicas that are newer than the saved experts, before anybody uses the experts."""
        for number, (cell, expert) in enumerate(zip(cells, self._loaded, strict=True)):
            is_saved = number < len(self._saved)
            if is_saved and self._saved[number] != cell:
                continue  # the expert was saved for another cell
            above = expert.num_steps if is_saved else _NO_STEPS
            await self._replication.load(cell, expert, found.get(cell, ()), above)

    def _in_order(self, cells: list[Cell]) -> list[Cell]:
        """Return the cells in the order of the saved experts, each with its own cell if possible, then the rest."""
        rest = iter([cell for cell in cells if cell not in self._saved])
        return [cell if cell in cells else next(rest) for cell in self._saved] + list(rest)

    async def _stop(self) -> None:
        loops, self._tasks = self._tasks[1:], self._tasks[:1]  # the first task computes, until all calls have ended
        await _cancelled(loops)
        if self._dht is not None and loops:
            await self._send_last_replicas()
        if self._dht is not None and self._tasks:  # also if the start has failed after it announced experts
            # The announcements expire; the service and the DHT node must end in any case.
            with logged_errors(_logger, "a server's experts could not be withdrawn"):
                await self._announcer.publish(())
        if self._service is not None:
            await self._service.stop(_GRACE_S)
        await _cancelled(self._tasks)
        if loops:
            await self._save()
            await self._send_last_replicas()  # steps since the last replicas
        if self._calls is not None:
            await self._calls.close()
        self._host.pool.close()
        if self._dht is not None:
            await self._dht.close()
        self._access.release()
        self._dht = self._service = None

    async def _renew(self) -> None:
        self._host.remove(await self._adopter.given_up())
        adopted = self._adopter.adopted
        moves = await self._announcer.moves(self._host.experts.keys() - adopted, staying=adopted)
        for cell, to in moves.items():
            self._host.move(cell, to)
            self._move_file(cell, to)
        if not await self._announcer.publish(self._host.experts):
            _logger.warning("not all experts could be announced: clients may not find them for a while")
        if self.config.replica_bytes:
            await self._board.publish_keeper(self._own, self.config.lifetime_s)
        if self._board.revocations is not None:
            await self._board.revocations.keep()

    async def _adopt(self) -> None:
        """Adopt experts whose server is gone, and announce them at once."""
        adopted = await self._adopter.adopt(self._host.experts.keys(), lambda: self._expert(None))
        if adopted:
            self._host.add(adopted)
            await self._announcer.publish(self._host.experts)

    def _move_file(self, cell: Cell, to: Cell) -> None:
        if self._files is None or cell == to:
            return
        try:
            self._files.move(cell, to)
        except OSError as error:
            _logger.warning("a saved expert could not be renamed in %s: %s", self._files.directory, error)

    async def _announce(self) -> None:
        try:
            await self._renew()
            await self._adopt()
        except SwarmError as error:
            _logger.warning("experts could not be announced: %s", error)

    async def _send_replicas(self) -> None:
        try:
            await self._replication.send(self._host.experts)
        except SwarmError as error:
            _logger.warning("experts are not replicated: %s", error)

    async def _send_last_replicas(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_REPLICAS_S):
                await self._send_replicas()

    async def _save(self) -> None:
        if self._files is None:
            return
        for cell, expert in list(self._host.experts.items()):
            if cell in self._adopter.adopted:  # other servers keep it, and it does not belong in this directory
                continue
            state = await self._host.pool.in_thread(expert.state)
            try:
                await asyncio.to_thread(self._files.write, cell, state)
            except OSError as error:
                _logger.warning("an expert could not be saved in %s: %s", self._files.directory, error)


async def _cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait for their end; log other errors, which must not prevent the server from stopping."""
    for result in await end_tasks(tasks):
        if isinstance(result, Exception):
            _logger.error("a server's routine has failed", exc_info=result)
