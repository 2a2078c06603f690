"""A server's life: join the swarm, host blocks where they are needed, keep its record fresh, leave."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from importlib import metadata
from math import inf

import torch

from swarm_protocol.checkpoints.checkpoint import Checkpoint
from swarm_protocol.checkpoints.default_model import locate
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.local_registry import DEFAULT_SWARM, RENEW_S
from swarm_protocol.dht.records import REFRESH_S, ServerRecord, ServerState, SwarmView
from swarm_protocol.errors import SwarmError
from swarm_protocol.net.identity import Certificate
from swarm_protocol.pb.swarm_pb2_grpc import add_BlocksServicer_to_server
from swarm_protocol.process.invocation import typed
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import WIRE_VERSION
from swarm_server.blocks.blocks import BlockStack
from swarm_server.core.config import ServerConfig
from swarm_server.machine.cores import CoreShare
from swarm_server.machine.memory import available_bytes, hosted_bytes_per_block
from swarm_server.net.network_probe import NetworkProbe
from swarm_server.net.push import ChannelPool
from swarm_server.node.addresses import announced, bind
from swarm_server.node.hosting import SpanLoader, SpanRuntime
from swarm_server.node.joining import Membership, join
from swarm_server.node.preloaded import adapter_names, check_adapters
from swarm_server.placement.placement import (
    CHECK_S,
    CONFIRM_S,
    URGENT_DRAIN_S,
    choose_span,
    may_leave,
    others_first,
    own_move,
)
from swarm_server.rpc.service import BlocksService

_logger = logging.getLogger(__name__)
_BLOCKS_OF_FREE, _BLOCKS_OF_GIVEN = 0.6, 0.8  # of memory; what is left is for keys and values
_GRACE_S = 2.0  # for streams that are open when the server stops
_POLL_S = 0.1  # after a libp2p daemon was restarted, before the next is watched
_SETTLE_S = 0.3  # servers that join together have read each other's choices after so long
_MAX_SETTLING = 10  # times that a choice is looked at again
_NEIGHBOURS_S = (10.0, 40.0)  # between two rounds of measuring the network
_WIRE_BYTES = 4  # of one number of a hidden state


class Server:
    """One server; ``run`` is its whole life."""

    # From the beginning of ``run``, in this order.
    _checkpoint: Checkpoint
    _loader: SpanLoader
    _membership: Membership
    _record: ServerRecord
    _service: BlocksService

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._stop = asyncio.Event()
        self._failure: SwarmError | None = None  # for which the server ends
        self._runtime: SpanRuntime | None = None  # None while blocks are loaded
        self._channels = ChannelPool()
        self._network_probe = NetworkProbe(self._channels)
        self.ready = False

    @property
    def config(self) -> ServerConfig:
        return self._config

    def stop(self) -> None:
        """Makes ``run`` withdraw the record and return."""
        self._stop.set()

    async def run(self) -> None:
        """Serves until ``stop``; prints one line to stdout once it is ready.

        Raises:
            ValueError, SwarmError: the configuration cannot work; one sentence says why.
        """
        config = self._config
        checkpoint = await asyncio.to_thread(Checkpoint.open, locate(config.model), config.model_revision)
        self._checkpoint, num_blocks = checkpoint, checkpoint.family.num_blocks
        await asyncio.to_thread(check_adapters, config.adapters, checkpoint.family, checkpoint.config)
        fixed = config.blocks or config.initial_blocks
        if fixed is not None:
            fixed.within(num_blocks)
        async with AsyncExitStack() as cleanup:
            device, dtype = _device_and_dtype(config)
            cores = cleanup.enter_context(CoreShare())
            torch.set_num_threads(cores.threads())  # of threads that have not computed yet
            self._loader = SpanLoader(config, checkpoint, cores, device, dtype)
            loading = None
            if fixed is not None:  # nothing to find out first: load while joining
                loading = self._loader.start_loading(fixed)
                cleanup.callback(loading.cancel)
            cleanup.push_async_callback(self._channels.close)
            self._membership = await join(config, cleanup)
            self._config = config = dataclasses.replace(config, host=self._membership.host)
            certificate = Certificate.generate()
            grpc_server, port = bind(config, certificate)
            cleanup.push_async_callback(grpc_server.stop, _GRACE_S)
            num_hosted = len(fixed) if fixed is not None else self._num_hosted(device)
            self._record = ServerRecord(
                peer_id=self._dht.peer_id,
                addresses=(announced(config, port),),
                model=checkpoint.name,
                revision=checkpoint.revision,
                num_blocks=num_blocks,
                span=fixed or await self._choose_span(num_hosted),
                state=ServerState.JOINING,
                quant=config.quant,
                dtype=str(dtype).removeprefix("torch."),
                tls_fingerprint=certificate.fingerprint,
                software_version=metadata.version("swarm-lm"),
                pinned=config.blocks is not None,
                adapters=adapter_names(config.adapters),
            )
            self._tell_speeds()
            watching = asyncio.ensure_future(_repeat(self._restart_daemon, (_POLL_S, _POLL_S)))
            cleanup.callback(watching.cancel)
            cleanup.push_async_callback(self._withdraw)
            await self._publish()
            keeping = asyncio.ensure_future(_repeat(self._keep_membership, (RENEW_S, RENEW_S)))
            cleanup.callback(keeping.cancel)
            if fixed is None:
                await self._settle()
            self._service = BlocksService(
                None, lambda: self._current_record().to_proto(), config.session_idle_timeout_s
            )
            add_BlocksServicer_to_server(self._service, grpc_server)
            cleanup.push_async_callback(self._close_hosting)
            await self._host(loading or self._loader.start_loading(self._record.span))
            await grpc_server.start()
            await self._publish()
            self.ready = True
            await self._announce_ready()
            await self._serve()
            await self._drain()
        if self._failure is not None:
            raise self._failure

    @property
    def _dht(self) -> Dht:
        return self._membership.dht

    # ------------------------------------------------------------ which blocks

    def _num_hosted(self, device: torch.device) -> int:
        """Raises ValueError if there is no room for one block, or the model has fewer than asked for."""
        config, num_blocks = self._config, self._checkpoint.family.num_blocks
        if config.num_blocks is not None:
            if config.num_blocks > num_blocks:
                raise ValueError(f"{config.num_blocks} blocks are more than the model's {num_blocks}")
            return config.num_blocks
        block_bytes = hosted_bytes_per_block(self._checkpoint, config.quant)
        share = _BLOCKS_OF_FREE if config.memory_bytes is None else _BLOCKS_OF_GIVEN
        affordable = int((config.memory_bytes or available_bytes(device)) * share // block_bytes)
        if affordable < 1:
            given = "free memory" if config.memory_bytes is None else f"memory in {config.memory_bytes >> 20} MiB"
            raise ValueError(
                f"not enough {given} for one block, which takes {block_bytes / 2**20:.1f} MiB beside keys and values"
            )
        return min(affordable, num_blocks)

    async def _view(self, own: ServerRecord | None) -> SwarmView:
        """The servers of the model's revision that is served here, without those that are known to be dead."""
        view = await self._dht.view(self._checkpoint.name, self._checkpoint.family.num_blocks)
        kind = self._checkpoint.revision, WIRE_VERSION
        same = SwarmView(tuple(server for server in view.servers if (server.revision, server.wire_version) == kind))
        return await self._network_probe.living(same, own)

    async def _choose_span(self, num_hosted: int, own: ServerRecord | None = None) -> Span:
        """``own``: what this server has published, if it has chosen before."""
        view = await self._view(own)
        if own is not None:
            view = others_first(view, own.peer_id)
        speeds = self._loader.known_speeds(num_hosted)
        tokens_per_s = 0.0 if speeds is None else speeds.forward_tokens_per_s
        return choose_span(view, self._checkpoint.family.num_blocks, num_hosted, tokens_per_s)

    async def _settle(self) -> None:
        """Chooses again if others have chosen at the same time."""
        num_hosted = len(self._record.span)
        for _ in range(_MAX_SETTLING):
            await asyncio.sleep(_SETTLE_S)
            servers = (await self._view(self._record)).servers
            others = [server for server in servers if server.peer_id != self._record.peer_id]
            if not any(server.state is ServerState.JOINING and not server.pinned for server in others):
                return
            span = await self._choose_span(num_hosted, self._record)
            if span != self._record.span:
                self._record = dataclasses.replace(self._record, span=span)
                self._tell_speeds()
                await self._publish()

    # ------------------------------------------------------------ hosting

    async def _host(self, loading: asyncio.Task[BlockStack]) -> None:
        self._runtime = await self._loader.start(await loading, self._channels)
        self._service.host = self._runtime.host
        self._record = dataclasses.replace(self._record, span=self._runtime.span, state=ServerState.ONLINE)

    async def _close_hosting(self) -> None:
        self._service.host = None
        if self._runtime is not None:
            hosting, self._runtime = self._runtime, None
            await hosting.close()

    async def _serve(self) -> None:
        """Until ``stop``."""
        tasks = [
            asyncio.ensure_future(_repeat(self._publish, (REFRESH_S, REFRESH_S))),
            asyncio.ensure_future(_repeat(self._look_around, _NEIGHBOURS_S)),
            asyncio.ensure_future(_repeat(self._go_where_needed, CHECK_S)),
        ]
        try:
            await self._stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_around(self) -> None:
        await self._network_probe.measure(await self._view(self._record), self._record)

    async def _go_where_needed(self) -> None:
        num_blocks = self._checkpoint.family.num_blocks
        if not self._record.pinned and len(self._record.span) < num_blocks:
            view, peer_id = await self._view(self._record), self._record.peer_id
            to = await asyncio.to_thread(own_move, view, peer_id, num_blocks, self._config.balance_margin)
            if to is not None:
                await self._move(to)

    async def _move(self, to: Span) -> None:
        """Says so first: others may want to leave the same blocks."""
        old, peer_id = self._record.span, self._record.peer_id
        self._record = dataclasses.replace(self._record, next_span=to)
        await self._publish()
        await asyncio.sleep(CONFIRM_S)
        view, num_blocks = await self._view(self._record), self._checkpoint.family.num_blocks
        if not await asyncio.to_thread(may_leave, view, peer_id, num_blocks, self._config.balance_margin):
            self._record = dataclasses.replace(self._record, next_span=None)
            await self._publish()
            return
        self._record = dataclasses.replace(self._record, state=ServerState.DRAINING)
        await self._publish()
        _logger.info("moving from blocks %s to %s, where the swarm needs it more", old, to)
        limit_s = inf if all(view.replicas(num_blocks)) else URGENT_DRAIN_S
        assert self._runtime is not None  # as long as there is no other move
        await self._runtime.host.leave(min(self._config.drain_timeout_s, limit_s))
        await self._close_hosting()
        self._record = dataclasses.replace(self._record, state=ServerState.JOINING, span=to, next_span=None)
        await self._publish()
        try:
            await self._host(self._loader.start_loading(to))
        except (SwarmError, ValueError, OSError) as error:
            _logger.warning("blocks %s could not be loaded: %s; going back to %s and staying there", to, error, old)
            self._record = dataclasses.replace(self._record, span=old, pinned=True)
            await self._host(self._loader.start_loading(old))
        await self._publish()
        _logger.info("hosting blocks %s", self._record.span)

    async def _drain(self) -> None:
        """Lets generations end or move to other servers."""
        timeout_s = self._config.drain_timeout_s
        self._record = dataclasses.replace(self._record, state=ServerState.DRAINING, next_span=None)
        if self._runtime is None:
            return
        host = self._runtime.host
        host.leaving = True
        if host.num_sessions:
            _logger.info(
                "leaving: waiting up to %g s for %d %s to end or move; a second signal exits at once",
                timeout_s,
                host.num_sessions,
                "session" if host.num_sessions == 1 else "sessions",
            )
            publishing = asyncio.ensure_future(self._publish())
            await host.leave(timeout_s)
            await publishing

    # ------------------------------------------------------------ the record

    def _current_record(self) -> ServerRecord:
        self._tell_speeds()
        hosting = self._runtime
        if hosting is None:
            return self._record
        network = self._network_probe.bytes_per_s / (_WIRE_BYTES * self._checkpoint.family.hidden_size)
        return dataclasses.replace(
            self._record,
            cache_tokens_left=hosting.host.budget.tokens_left,
            queue_delay_s=hosting.host.scheduler.queue_delay_s,
            next_hop_rtts_s=self._network_probe.rtts_s,
            network_tokens_per_s=0.0 if self._config.throughput else network,
        )

    def _tell_speeds(self) -> None:
        """Those of the blocks of the record, as far as they are known."""
        hosting = self._runtime
        speeds = hosting.speeds if hosting is not None else self._loader.known_speeds(len(self._record.span))
        if speeds is not None:
            self._record = dataclasses.replace(
                self._record,
                tokens_per_s=speeds.decode_tokens_per_s,
                forward_tokens_per_s=speeds.forward_tokens_per_s,
            )

    async def _publish(self) -> None:
        if not await self._dht.publish(self._current_record()):
            _logger.warning("the swarm did not take this server's record; trying again in %g s", REFRESH_S)

    async def _keep_membership(self) -> None:
        """Publishes to those who are met at once, not only when the record is due."""
        if await self._membership.keep():
            await self._publish()

    async def _restart_daemon(self) -> None:
        """When the libp2p daemon has ended, another takes its place; the server ends if that cannot be."""
        await self._dht.daemon_ended()
        if self._failure is not None:
            return
        level = logging.INFO if self._stop.is_set() else logging.WARNING  # Ctrl-C in a terminal ends both
        _logger.log(level, "the libp2p daemon has ended, nobody can find this server: starting it again")
        try:
            await self._membership.restart_daemon()
        except SwarmError as error:
            self._failure = error
            self._stop.set()
            return
        await self._membership.keep()
        if not await self._dht.publish(self._current_record()):  # one that waits for the old daemon is in the way
            await self._publish()

    async def _withdraw(self) -> None:
        self._record = dataclasses.replace(self._record, state=ServerState.OFFLINE)
        withdrawn = await self._dht.publish(self._current_record())
        if not withdrawn and not self._dht.is_alive and self._failure is None:
            with suppress(SwarmError):
                await self._dht.restart()
                withdrawn = await self._dht.publish(self._current_record())
        if not withdrawn:
            _logger.info("the record could not be withdrawn; it expires by itself")

    async def _announce_ready(self) -> None:
        config, record = self._config, self._record
        assert config.host is not None and self._runtime is not None
        peer = (await self._dht.addresses())[0]
        swarm = "" if config.swarm == DEFAULT_SWARM else f" --swarm {config.swarm}"
        model = "" if config.model == ServerConfig.model else f" --model {config.model}"
        print(
            f"ready model={record.model} blocks={record.span} quant={record.quant} peer={peer} "
            f"grpc={record.addresses[0]}",
            flush=True,
        )
        _logger.info(
            "%.0f tokens/s decoding, %.0f tokens/s otherwise; room for %d tokens",
            record.tokens_per_s,
            record.forward_tokens_per_s,
            self._runtime.cache_tokens,
        )
        if ipaddress.ip_address(config.host).is_loopback:
            _logger.info("only this machine can join; to let others in, start servers with --host ADDRESS")
        else:
            _logger.info("on the next machine: %s%s%s --initial-peers %s", typed("server"), model, swarm, peer)
        _logger.info('try it: %s%s%s "Return a list of"', typed("generate"), model, swarm)


async def _repeat(action: Callable[[], Awaitable[None]], pause_s: tuple[float, float]) -> None:
    """For ever, after pauses of random length. What goes wrong once must not end a server."""
    while True:
        await asyncio.sleep(random.uniform(*pause_s))
        try:
            await action()
        except Exception:
            _logger.exception("a server's routine failed; it is tried again")


def _device_and_dtype(config: ServerConfig) -> tuple[torch.device, torch.dtype]:
    name = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    if config.dtype != "auto":
        return device, getattr(torch, config.dtype)
    return device, torch.bfloat16 if device.type == "cuda" else torch.float32
